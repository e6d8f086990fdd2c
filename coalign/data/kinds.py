"""What the rows of a data set can become: the names that a recipe's ``source`` may have.

What rows of a prompt and responses to it have in common (preferences, labelled responses, judged steps).

Prompts to generate from (reinforcement learning, evaluation, `coalign generate`).

Conversations to learn from (supervised fine-tuning).

Documents to learn from token by token (pre-training).

Responses to compare: pairs of a chosen and a rejected one, or several with ranks or scores.

Single responses, each desirable or not (Kahneman-Tversky optimisation).

Solutions whose steps are judged one by one (process reward models).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from coalign.data.examples import Example, RowEncoder, exclude_first_token
from coalign.data.messages import Message, format_prompt
from coalign.data.sources import BadRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ResponseEncoder(RowEncoder):
    """Rows of which each gives one or more sequences that begin with the same prompt.

    The column ``prompt_length`` is the number of tokens that they share, so that the prompt can be computed once; the
    loss mask covers the assistant's turns after it. ``data.max_prompt_tokens`` bounds the prompt, ``data.max_tokens``
    prompt and response; where ``on_long`` is `truncate_left`, the prompt is cut, by the same number of tokens in all
    sequences of a row, and never a response.
    """

    longest = "max_tokens"

    @property
    def bound(self) -> str:
        prompt = f"{self.config.max_prompt_tokens} tokens of prompt"
        return prompt if self.max_tokens is None else f"{prompt} or {self.max_tokens} in all"

    def sequences(
        self, row: dict[str, Any], prompt: list[Message], responses: list[list[Message]], columns: list[dict[str, Any]]
    ) -> list[Example]:
        """One sequence for each response, with its ``columns``, ``index`` and ``prompt_length``."""
        tools = self.reader.tools(row)
        made = [
            trim_after_last_trained(*self.template.conversation([*prompt, *said], tools, since=len(prompt)))
            for said in responses
        ]
        shared = count_shared_tokens(made)
        return [
            Example(tokens, dict(row), mask, {"index": i, "prompt_length": shared} | own)
            for i, ((tokens, mask), own) in enumerate(zip(made, columns, strict=True))
        ]

    def fit(self, examples: list[Example]) -> list[Example]:
        prompt = examples[0].columns["prompt_length"]
        response = max(len(example.tokens) for example in examples) - prompt
        room = self.config.max_prompt_tokens
        if self.max_tokens is not None:
            room = min(room, self.max_tokens - response)
        if prompt > room:
            bos = self.template.tokenizer.bos_token_id
            if self.policy["long"] != "truncate_left" or room < 1 + (examples[0].tokens[0] == bos):
                raise BadRow(f"{prompt} tokens of prompt, {response} of response; over {self.bound}", "long")
            examples = [example.cut_left(prompt - room, bos) for example in examples]
        return [exclude_first_token(example) for example in examples]


def trim_after_last_trained(tokens: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
    """Without what a template writes after the last turn's end: generated responses end there, too, and a reward model
    reads its score from the last token. BadRow (empty) where nothing is trained."""
    if not any(mask):
        raise BadRow("a response without a token of the assistant", "empty")
    length = len(mask) - mask[::-1].index(True)
    return tokens[:length], mask[:length]


def count_shared_tokens(made: Iterable[tuple[list[int], list[bool]]]) -> int:
    """How many tokens all (tokens, loss mask) begin with before the first trained one of any."""
    prompts = [tokens[: mask.index(True)] for tokens, mask in made]
    differ = (i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    return next(differ, min(map(len, prompts)))


class PromptEncoder(RowEncoder):
    """Rows as prompts, ready to be continued.

    An Example's row is the data set's, with these keys set: ``prompt`` (its text as people read it, without the
    template), ``messages`` (those that the template got), ``answer`` (the reference answer, if the row has one),
    ``_source`` and ``_row`` (file name and row number, from 0).
    """

    longest = "max_prompt_tokens"

    def encode(self, row: dict[str, Any]) -> list[Example]:
        messages = self.reader.prompt(row)
        tokens = self.template.prompt(messages, self.reader.tools(row))
        if not tokens:
            raise BadRow("the prompt has no tokens", "empty")
        reference = self.reader.reference(row)
        answer = {} if reference is None else {"answer": reference}
        return [Example(tokens, row | {"prompt": format_prompt(messages), "messages": messages} | answer)]


class ConversationEncoder(RowEncoder):
    """Rows as conversations: tokens, and a loss mask over what the assistant says and the end of its turns.

    ``data.train_on`` narrows the mask to the assistant's last message, or widens it to every token. Where a long one is
    cut on the left, its last answer stays whole, and something before it. An Example's row is the data set's, with
    ``_source`` and ``_row`` (file name and row number, from 0).
    """

    longest = "max_tokens"

    def encode(self, row: dict[str, Any]) -> list[Example]:
        messages, tools = self.reader.conversation(row), self.reader.tools(row)
        since = len(messages) - 1 if self.config.train_on == "last" else 0
        tokens, mask = self.template.conversation(messages, tools, since=since)
        if self.config.train_on == "all":
            mask = [True] * len(tokens)
        return [Example(tokens, dict(row), mask)]

    def shortened(self, example: Example) -> Example:
        cut = super().shortened(example)
        dropped = len(example.tokens) - len(cut.tokens)
        if dropped and self.config.train_on != "all" and dropped >= _last_answer(example.loss_mask or []):
            raise BadRow(f"the last answer leaves no room for a question in {self.bound}", "long")
        return cut


def _last_answer(mask: list[bool]) -> int:
    """Where the last run of trained tokens begins."""
    end = len(mask) - mask[::-1].index(True)
    return next((t for t in range(end, 0, -1) if not mask[t - 1]), 0)


class DocumentEncoder(RowEncoder):
    """Rows as documents: one BOS if the tokenizer adds one, the text under ``data.text_key``, one EOS.

    Every token is trained except the first. A document of more than ``data.max_tokens`` tokens becomes several
    sequences (column ``index``); each begins with the last token of the one before, as context only, so every token is
    still trained once.
    """

    longest = "max_tokens"
    from_tokens = True
    counted = {"split": "of these cut into pieces"}

    def encode(self, row: dict[str, Any]) -> list[Example]:
        key = self.config.text_key
        text = self.reader.value(row, key)
        if not isinstance(text, str):
            raise BadRow(f"'{key}' is {type(text).__name__}; expected a string")
        if not text.strip():
            raise BadRow(f"'{key}' is empty", "empty")
        tokens = tokenize_document(text, self.template.tokenizer)
        size = self.max_tokens or len(tokens)
        pieces = [tokens[start : start + size] for start in range(0, max(1, len(tokens) - 1), max(1, size - 1))]
        return [Example(piece, dict(row), [True] * len(piece), {"index": i}) for i, piece in enumerate(pieces)]

    def count(self, examples: list[Example]) -> dict[str, int]:
        return {"split": int(len(examples) > 1)}


def tokenize_document(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a document, with exactly one EOS at the end, and exactly one BOS in front if the tokenizer adds one
    or the text brings it."""
    tokens = tokenizer(text, verbose=False)["input_ids"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begins = tokens[:1] == [bos]
    while tokens and tokens[0] == bos:
        tokens = tokens[1:]
    while tokens and tokens[-1] == eos:
        tokens = tokens[:-1]
    return [bos] * begins + tokens + [eos]


class PreferenceEncoder(ResponseEncoder):
    """Rows as groups of sequences, one for each response to the prompt.

    Sequence columns: ``preference``, higher is better within the row (a pair: 1 and 0; several responses: their scores,
    or 0, -1, -2 … in the order given, best first); ``margin``, how much better the chosen one is where the row says so
    and 0.0 elsewhere; ``index`` (chosen before rejected); ``prompt_length``, of the prompt that they share.

    A pair stands under ``data.chosen_key`` and ``rejected_key``: texts, assistant messages, lists of messages that
    follow the prompt, or whole conversations that begin alike. Several responses stand under ``responses_key``, with
    ``scores_key`` where they have scores.
    """

    def encode(self, row: dict[str, Any]) -> list[Example]:
        said, columns = self._ranked(row) if self.reader.has(row, self.config.responses_key) else self._pair(row)
        prompt, responses = self.reader.compared(row, said)
        examples = self.sequences(row, prompt, responses, columns)
        if all(example.tokens == examples[0].tokens for example in examples):
            raise BadRow(f"{', '.join(said)} are identical", "identical")
        return examples

    def _pair(self, row: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, float]]]:
        said = {key: self.reader.value(row, key) for key in (self.config.chosen_key, self.config.rejected_key)}
        return said, [{"preference": 1.0, "margin": self._margin(row)}, {"preference": 0.0, "margin": 0.0}]

    def _margin(self, row: dict[str, Any]) -> float:
        key = self.config.margin_key
        if not self.reader.has(row, key):
            return 0.0
        if not (_is_number(row[key]) and row[key] >= 0):
            raise BadRow(f"'{key}' is {row[key]!r}; expected how much better the chosen response is, a number from 0")
        return float(row[key])

    def _ranked(self, row: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, float]]]:
        key = self.config.responses_key
        responses = row[key]
        if not isinstance(responses, list) or len(responses) < 2:
            raise BadRow(f"'{key}' is {str(responses)[:80]!r}; expected a list of two responses or more")
        scores = self._scores(row, len(responses))
        if len(set(scores)) == 1:
            raise BadRow(f"'{self.config.scores_key}' are all {scores[0]}", "identical")
        said = {f"{key}[{i}]": response for i, response in enumerate(responses)}
        return said, [{"preference": score, "margin": 0.0} for score in scores]

    def _scores(self, row: dict[str, Any], count: int) -> list[float]:
        key = self.config.scores_key
        if not self.reader.has(row, key):
            return [-float(rank) for rank in range(count)]
        scores = row[key]
        if not isinstance(scores, list) or len(scores) != count or not all(map(_is_number, scores)):
            raise BadRow(f"'{key}' is {str(scores)[:80]}; expected {count} numbers, one for each response")
        return [float(score) for score in scores]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class LabelledEncoder(ResponseEncoder):
    """Rows as one sequence, or as two where they hold a pair.

    Sequence columns: ``preference``, 1.0 for a desirable response and 0.0 for another; ``index``; ``prompt_length``.
    A row has a prompt, a response (under ``data.answer_key``, or the end of its messages) and a ``label_key``; or a
    chosen and a rejected response, which are a desirable and an undesirable one.
    """

    counted = {"desirable": "desirable", "undesirable": "undesirable"}

    def encode(self, row: dict[str, Any]) -> list[Example]:
        config = self.config
        if self.reader.has(row, config.chosen_key):
            said = {key: self.reader.value(row, key) for key in (config.chosen_key, config.rejected_key)}
            prompt, responses = self.reader.compared(row, said)
            examples = self.sequences(row, prompt, responses, [{"preference": 1.0}, {"preference": 0.0}])
            if examples[0].tokens == examples[1].tokens:
                raise BadRow(f"{', '.join(said)} are identical", "identical")
            return examples
        label = self._label(row)
        prompt, response = self.reader.answered(row)
        return self.sequences(row, prompt, [response], [{"preference": label}])

    def count(self, examples: list[Example]) -> Mapping[str, int]:
        return Counter("desirable" if example.columns["preference"] else "undesirable" for example in examples)

    def concern(self) -> str:
        absent = [label for label in self.counted if not self.counts[label]]
        return f"none of the {self.counts['used']} usable rows is {' or '.join(absent)}" if absent else ""

    def _label(self, row: dict[str, Any]) -> float:
        value = self.reader.value(row, self.config.label_key)
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise BadRow(f"'{self.config.label_key}' is {value!r}; expected true or false, or 1 or 0")
        return float(value)


class StepEncoder(ResponseEncoder):
    """Rows as a prompt and the steps of its solution, each ended by ``data.step_separator``, then EOS.

        prompt   1 + 1 = 2 \\n   2 + 1 = 3 \\n  EOS
                            ^              ^          here the model judges: the last token of a separator
                                ^              ^      trained: the tokens after them, which those predict

    Steps and separators are tokenised apart, so every separator is the same tokens. Token columns: ``label``, how right
    a step is (0 to 1) at the trained tokens and 0.0 elsewhere; ``candidates`` [T, 2], the ids of ``data.step_tokens``
    (right, wrong). A step stands under ``data.steps_key`` and its label under ``data.labels_key``.
    """

    counted = {"steps": "steps"}

    @cached_property
    def candidates(self) -> list[int]:
        """The ids of what is said of a right and of a wrong step. ValueError for what is not one token."""
        ids = []
        for text in self.config.step_tokens:
            tokens = self._tokens(text)
            if len(tokens) != 1 or tokens[0] == self.template.tokenizer.unk_token_id:
                raise ValueError(
                    f"data.step_tokens: {text!r} must be one token of the tokenizer, not {len(tokens)} "
                    f"({self.template.tokenizer.convert_ids_to_tokens(tokens)}); name another text that is"
                )
            ids += tokens
        if ids[0] == ids[1]:
            raise ValueError(f"data.step_tokens: {self.config.step_tokens} are the same token; they must differ")
        return ids

    def encode(self, row: dict[str, Any]) -> list[Example]:
        steps, labels = self._steps(row)
        prompt = self.template.prompt(self.reader.prompt(row), self.reader.tools(row))
        separator = self._tokens(self.config.step_separator)
        tokens, judged = list(prompt), {}
        for step, label in zip(steps, labels, strict=True):
            tokens += self._tokens(step) + separator
            judged[len(tokens)] = label
        tokens.append(self.template.tokenizer.eos_token_id)
        columns = {
            "index": 0,
            "prompt_length": len(prompt),
            "label": [judged.get(t, 0.0) for t in range(len(tokens))],
            "candidates": [self.candidates] * len(tokens),
        }
        return [Example(tokens, dict(row), [t in judged for t in range(len(tokens))], columns)]

    def count(self, examples: list[Example]) -> dict[str, int]:
        return {"steps": sum(examples[0].loss_mask or [])}

    def _steps(self, row: dict[str, Any]) -> tuple[list[str], list[float]]:
        key, separator = self.config.steps_key, self.config.step_separator
        steps = self.reader.value(row, key)
        if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
            raise BadRow(f"'{key}' is {str(steps)[:80]!r}; expected a list of texts")
        steps = [step.removesuffix(separator) for step in steps]
        if not steps or not all(step.strip() for step in steps):
            raise BadRow(f"'{key}' is empty, or one of its steps is", "empty")
        return steps, self._labels(row, len(steps))

    def _labels(self, row: dict[str, Any], count: int) -> list[float]:
        key = self.config.labels_key
        labels = self.reader.value(row, key)
        if not isinstance(labels, list) or len(labels) != count:
            raise BadRow(f"'{key}' is {str(labels)[:80]}; expected {count} labels, one for each step")
        for i, label in enumerate(labels):
            if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
                raise BadRow(f"'{key}': label {i} is {label!r}; expected true or false, or a probability from 0 to 1")
        return [float(label) for label in labels]

    def _tokens(self, text: str) -> list[int]:
        return self.template.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


KINDS: Mapping[str, type[RowEncoder]] = {
    "prompts": PromptEncoder,
    "conversations": ConversationEncoder,
    "documents": DocumentEncoder,
    "preferences": PreferenceEncoder,
    "labelled": LabelledEncoder,
    "steps": StepEncoder,
}
