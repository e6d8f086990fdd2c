"""Encoders for each kind of data that a recipe's ``source`` can name: from a row to token sequences.

prompts (to generate from), conversations (SFT), documents (pre-training), preferences (responses to compare), labelled
(single responses that are desirable or not, KTO), steps (solutions judged step by step, process reward models).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from coalign.data.examples import Example, RowEncoder, exclude_first_token
from coalign.data.messages import ContentGuard, Message, format_prompt, is_learned, tokenize
from coalign.data.sources import BadRow, is_number, read_number
from coalign.data.templates import encode_learned, get_bos, get_eos
from coalign.types import ImageSpan


class _ResponseEncoder(RowEncoder):
    """Base of encoders whose rows hold a prompt with one or more responses.

    All sequences of a row begin with the same prompt; the column ``prompt_length`` is the number of tokens that they
    share. The loss mask covers the assistant's turns after it. ``data.max_prompt_tokens`` limits the prompt,
    ``data.max_tokens`` prompt and response together, models both and the sum of all responses that a loss compares.
    ``on_long: truncate_left`` cuts the prompt, by the same number of tokens in all sequences of a row, and never a
    response.
    """

    longest = "max_tokens"

    @property
    def limit(self) -> str:
        words = [f"{self.config.max_prompt_tokens} tokens of prompt"]
        if limit := self.limits.get("sequence"):
            words.append(f"{limit.amount} in all{limit.origin}")
        return " or ".join([*words, *(str(self.limits[scope]) for scope in ("row", "patches") if scope in self.limits)])

    def build_sequences(
        self, row: dict[str, Any], prompt: list[Message], responses: list[list[Message]], columns: list[dict[str, Any]]
    ) -> list[Example]:
        """Encode each response with its ``columns``, ``index`` and ``prompt_length``."""
        tools = self.reader.tools(row)
        encoded = [
            trim_after_last_trained(*encode_learned(self.template, [*prompt, *response], tools, since=len(prompt)))
            for response in responses
        ]
        shared = _count_shared_tokens(encoded)
        images = [
            self.locate_images(tokens, [*prompt, *response])
            for (tokens, _), response in zip(encoded, responses, strict=True)
        ]
        return [
            Example(tokens, dict(row), mask, {"index": i, "prompt_length": shared} | response_columns, images[i])
            for i, ((tokens, mask), response_columns) in enumerate(zip(encoded, columns, strict=True))
        ]

    def encode_pair(self, row: dict[str, Any], columns: list[dict[str, Any]]) -> list[Example]:
        """Encode the chosen and the rejected response. BadRow (identical) if they do not differ."""
        pair = {key: self.reader.value(row, key) for key in (self.config.chosen_key, self.config.rejected_key)}
        return self.encode_compared(row, pair, columns)

    def encode_compared(
        self, row: dict[str, Any], responses: dict[str, Any], columns: list[dict[str, Any]]
    ) -> list[Example]:
        """Encode ``responses`` (by the names of their keys). BadRow (identical) if all are the same tokens."""
        examples = self.build_sequences(row, *self.reader.compared(row, responses), columns)
        if all(example.tokens == examples[0].tokens for example in examples):
            raise BadRow(f"{', '.join(responses)} are identical", "identical")
        return examples

    def fit(self, examples: list[Example]) -> list[Example]:
        prompt = examples[0].columns["prompt_length"]
        response = max(len(example.tokens) for example in examples) - prompt
        limit, origin = min(self._limit_prompt(prompt, response, examples))
        if prompt > limit:
            bos = get_bos(self.template.tokenizer)
            if self.policy["long"] != "truncate_left" or limit < 1 + (examples[0].tokens[0] == bos):
                lengths = ", ".join(str(len(example.tokens)) for example in examples)
                sums = f" (sequences of {lengths})" if len(examples) > 1 and origin else ""
                problem = f"{prompt} tokens of prompt, {response} of response{sums}; over {self.limit}"
                raise BadRow(problem, "long", origin)
            examples = [example.cut_left(prompt - limit, bos) for example in examples]
        return [exclude_first_token(example) for example in examples]

    def _limit_prompt(self, prompt: int, response: int, examples: list[Example]) -> Iterator[tuple[int, str]]:
        """Yield how many prompt tokens each limit allows, and the model's setting behind it."""
        yield self.config.max_prompt_tokens, ""
        if limit := self.limits.get("sequence"):
            yield limit.amount - response, limit.origin
        if limit := self.limits.get("row"):
            excess = sum(len(example.tokens) for example in examples) - limit.amount
            yield prompt - -(-excess // len(examples)), limit.origin


def trim_after_last_trained(tokens: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
    """Remove the tokens that a template writes after the last turn. BadRow (empty) if no token is trained.

    Generated responses end there as well, and a reward model reads its score from the last token.
    """
    if not any(mask):
        raise BadRow("a response without a token of the assistant", "empty")
    length = len(mask) - mask[::-1].index(True)
    return tokens[:length], mask[:length]


def _count_shared_tokens(encoded: Iterable[tuple[list[int], list[bool]]]) -> int:
    """Count the tokens that all (tokens, loss mask) share before the first trained token of any."""
    prompts = [tokens[: mask.index(True)] for tokens, mask in encoded]
    differing = (i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    return next(differing, min(map(len, prompts)))


class _PromptEncoder(RowEncoder):
    """Encodes rows as prompts to continue.

    The row gets these keys: ``prompt`` (its plain text, without the template), ``messages`` and ``tools`` (as the
    template received them), ``answer`` (the reference answer, if the row has one), ``_source`` and ``_row``.
    """

    keys = "`prompt`, and `answer` for most rewards"
    longest = "max_prompt_tokens"

    def encode(self, row: dict[str, Any]) -> list[Example]:
        messages, tools = self.reader.prompt(row), self.reader.tools(row)
        tokens = self.template.prompt(messages, tools)
        if not tokens:
            raise BadRow("the prompt has no tokens", "empty")
        reference = self.reader.reference(row)
        more = {name: value for name, value in (("answer", reference), ("tools", tools)) if value is not None}
        row = row | {"prompt": format_prompt(messages), "messages": messages} | more
        return [Example(tokens, row, images=self.locate_images(tokens, messages))]


class _ConversationEncoder(RowEncoder):
    """Encodes rows as conversations; the loss mask covers the assistant's words and the end of its turns.

    ``data.train_on`` narrows the mask to the assistant's last message, or widens it to all tokens. A conversation that
    is cut on the left keeps its last answer, and at least one token before it. With ``data.reasoning: last`` no single
    sequence holds all answers as they are generated, so each user message gives a sequence (``index``).
    """

    keys = "`messages`, or `prompt` and `answer`"
    longest = "max_tokens"

    def encode(self, row: dict[str, Any]) -> list[Example]:
        messages, tools = self.reader.conversation(row), self.reader.tools(row)
        examples = []
        for index, (since, stop) in enumerate(self._find_learned(messages)):
            tokens, mask = encode_learned(self.template, messages[:stop], tools, since=since)
            if self.config.train_on == "all":
                _refuse_weights(messages)
                mask = [True] * len(tokens)
            columns = {"index": index} if self.config.reasoning == "last" else {}
            images = self.locate_images(tokens, messages[:stop])
            examples.append(Example(tokens, dict(row), _exclude_images(mask, images), columns, images))
        return examples

    def _find_learned(self, messages: list[Message]) -> list[tuple[int, int]]:
        """Return for each sequence its first learned message and its number of messages."""
        if self.config.train_on == "last":
            return [(len(messages) - 1, len(messages))]
        if self.config.reasoning != "last":
            return [(0, len(messages))]
        asked = [i for i, m in enumerate(messages) if m["role"] == "user"] or [0]
        answered = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        lasts = {q: i for i in answered if (q := max((q for q in asked if q < i), default=None)) is not None}
        learned = [(q, last + 1) for q, last in lasts.items() if any(map(is_learned, messages[q : last + 1]))]
        if not learned:
            raise BadRow("no answer to learn: each has weight 0, or no question before it", "empty")
        return learned

    def truncate(self, example: Example) -> Example:
        cut = super().truncate(example)
        dropped = len(example.tokens) - len(cut.tokens)
        if dropped and self.config.train_on != "all" and dropped >= _find_last_answer(example.loss_mask or []):
            raise BadRow(f"the last answer leaves no room for a question in {self.limit}", "long")
        return cut


def _refuse_weights(messages: list[Message]) -> None:
    for i, message in enumerate(messages):
        if message.get("weight") == 0:
            raise BadRow(f"message {i} has weight 0, and data.train_on: all learns every token; set `assistant`")


def _exclude_images(mask: list[bool], images: tuple[ImageSpan, ...] | None) -> list[bool]:
    """Remove the placeholders of images from the mask: no model predicts them."""
    for span in images or ():
        mask[span.start : span.stop] = [False] * span.length
    return mask


def _find_last_answer(mask: list[bool]) -> int:
    """Position at which the last run of trained tokens begins."""
    end = len(mask) - mask[::-1].index(True)
    return next((t for t in range(end, 0, -1) if not mask[t - 1]), 0)


class DocumentEncoder(RowEncoder):
    """Encodes rows as documents: BOS if the tokenizer adds one, the text under ``data.text_key``, one EOS.

    All tokens but the first are trained. A document of more than ``data.max_tokens`` tokens becomes several sequences
    (column ``index``). Each begins with the last token of the one before, as context only, so that every token is
    trained exactly once.
    """

    keys = "`text`"
    longest = "max_tokens"
    from_tokens = True
    reads_images = False
    counted = {"split": "of these cut into pieces"}

    def encode(self, row: dict[str, Any]) -> list[Example]:
        key = self.config.text_key
        text = self.reader.value(row, key)
        if not isinstance(text, str):
            raise BadRow(f"'{key}' is {type(text).__name__}; expected a string")
        if not text.strip():
            raise BadRow(f"'{key}' is empty", "empty")
        tokens = _tokenize_document(text, self.template.guard)
        size = self.max_tokens or len(tokens)
        pieces = [tokens[start : start + size] for start in range(0, max(1, len(tokens) - 1), max(1, size - 1))]
        return [Example(piece, dict(row), [True] * len(piece), {"index": i}) for i, piece in enumerate(pieces)]

    def count(self, examples: list[Example]) -> dict[str, int]:
        return {"split": int(len(examples) > 1)}


def _tokenize_document(text: str, guard: ContentGuard) -> list[int]:
    """Tokenise a document, with exactly one EOS, and one BOS if the tokenizer adds one or the text may write it."""
    tokens = guard.read(text, special=True)
    bos, eos = get_bos(guard.tokenizer), get_eos(guard.tokenizer)
    begin = [bos] if bos is not None and tokens[:1] == [bos] else []
    while tokens and tokens[0] == bos:
        tokens = tokens[1:]
    while tokens and tokens[-1] == eos:
        tokens = tokens[:-1]
    return [*begin, *tokens, eos]


class _PreferenceEncoder(_ResponseEncoder):
    """Encodes rows as groups of sequences, one for each response to the prompt.

    Sequence columns: ``preference``, higher is better within the row (a pair: 1 and 0; several responses: their scores,
    or 0, -1, -2 … in the given order, best first); ``margin``, how much better the chosen response is, or 0.0 if the
    row does not tell; ``index`` (chosen before rejected); ``prompt_length``.

    A pair is found under ``data.chosen_key`` and ``rejected_key``: texts, assistant messages, lists of messages that
    follow the prompt, or whole conversations with the same beginning. Several responses are found under
    ``responses_key``, with optional scores under ``scores_key``.
    """

    keys = "`prompt`, `chosen` and `rejected`"

    def encode(self, row: dict[str, Any]) -> list[Example]:
        if self.reader.has(row, self.config.responses_key):
            return self.encode_compared(row, *self._rank(row))
        columns = [{"preference": 1.0, "margin": self._margin(row)}, {"preference": 0.0, "margin": 0.0}]
        return self.encode_pair(row, columns)

    def _margin(self, row: dict[str, Any]) -> float:
        key = self.config.margin_key
        if not self.reader.has(row, key):
            return 0.0
        margin = read_number(row[key])
        if not (is_number(margin) and margin >= 0):
            raise BadRow(f"'{key}' is {row[key]!r}; expected how much better the chosen response is, a number from 0")
        return float(margin)

    def _rank(self, row: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, float]]]:
        key = self.config.responses_key
        responses = row[key]
        if not isinstance(responses, list) or len(responses) < 2:
            raise BadRow(f"'{key}' is {str(responses)[:80]!r}; expected a list of two responses or more")
        scores = self._scores(row, len(responses))
        if len(set(scores)) == 1:
            raise BadRow(f"'{self.config.scores_key}' are all {scores[0]}", "identical")
        named = {f"{key}[{i}]": response for i, response in enumerate(responses)}
        return named, [{"preference": score, "margin": 0.0} for score in scores]

    def _scores(self, row: dict[str, Any], count: int) -> list[float]:
        key = self.config.scores_key
        if not self.reader.has(row, key):
            return [-float(rank) for rank in range(count)]
        scores = row[key]
        if not isinstance(scores, list) or len(scores) != count or not all(map(is_number, scores)):
            raise BadRow(f"'{key}' is {str(scores)[:80]}; expected {count} numbers, one for each response")
        return [float(score) for score in scores]


class _LabelledEncoder(_ResponseEncoder):
    """Encodes rows as one sequence, or as two if the row holds a pair.

    Sequence columns: ``preference``, 1.0 for a desirable response and 0.0 otherwise; ``index``; ``prompt_length``.
    A row has a prompt, a response (under ``data.answer_key``, or at the end of its messages) and a ``label_key``; or a
    chosen and a rejected response, which count as desirable and undesirable.
    """

    keys = "`prompt`, `answer` and `label`"
    counted = {"desirable": "desirable", "undesirable": "undesirable"}

    def encode(self, row: dict[str, Any]) -> list[Example]:
        if self.reader.has(row, self.config.chosen_key):
            return self.encode_pair(row, [{"preference": 1.0}, {"preference": 0.0}])
        label = self._label(row)
        prompt, response = self.reader.answered(row)
        return self.build_sequences(row, prompt, [response], [{"preference": label}])

    def count(self, examples: list[Example]) -> Mapping[str, int]:
        return Counter("desirable" if example.columns["preference"] else "undesirable" for example in examples)

    def warning(self) -> str:
        absent = [label for label in self.counted if not self.counts[label]]
        one_sided = f"none of the {self.counts['used']} usable rows is {' or '.join(absent)}" if absent else ""
        return "; ".join(filter(None, [one_sided, self.describe_left_out()]))

    def _label(self, row: dict[str, Any]) -> float:
        value = read_number(self.reader.value(row, self.config.label_key))
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise BadRow(f"'{self.config.label_key}' is {value!r}; expected true or false, or 1 or 0")
        return float(value)


class _StepEncoder(_ResponseEncoder):
    """Encodes rows as a prompt and the steps of its solution, each ended by ``data.step_separator``, then EOS.

        prompt   1 + 1 = 2 \\n   2 + 1 = 3 \\n  EOS
                            ^              ^          the model judges at the last token of each separator
                                ^              ^      trained: the next tokens, which those predict

    Steps and separators are tokenised separately, so all separators are the same tokens. Token columns: ``label``, the
    correctness of a step (0 to 1) at the trained tokens, 0.0 elsewhere; ``candidates`` [T, 2], the ids of
    ``data.step_tokens`` (right, wrong). Steps are found under ``data.steps_key``, their labels under ``labels_key``.
    """

    keys = "`prompt`, `steps` and `labels`"
    reads_images = False
    counted = {"steps": "steps"}

    @cached_property
    def candidates(self) -> list[int]:
        """The token ids for a right and for a wrong step. ValueError if a text is not exactly one token."""
        ids = []
        for text in self.config.step_tokens:
            tokens = self._tokenize(text)
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
        separator = self._tokenize(self.config.step_separator)
        tokens, labelled = list(prompt), {}
        for step, label in zip(steps, labels, strict=True):
            tokens += self.template.guard.read(step) + separator
            labelled[len(tokens)] = label
        tokens.append(get_eos(self.template.tokenizer))
        columns = {
            "index": 0,
            "prompt_length": len(prompt),
            "label": [labelled.get(t, 0.0) for t in range(len(tokens))],
            "candidates": [self.candidates] * len(tokens),
        }
        return [Example(tokens, dict(row), [t in labelled for t in range(len(tokens))], columns)]

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

    def _tokenize(self, text: str) -> list[int]:
        return tokenize(self.template.tokenizer, text)


KINDS: Mapping[str, type[RowEncoder]] = {
    "prompts": _PromptEncoder,
    "conversations": _ConversationEncoder,
    "documents": DocumentEncoder,
    "preferences": _PreferenceEncoder,
    "labelled": _LabelledEncoder,
    "steps": _StepEncoder,
}
