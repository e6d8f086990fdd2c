"""Somebody's agent against the gateway, with a scripted model: what of it could be trained."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch

from coalign.data.templates import load_template
from coalign.environments.episode import EnvironmentClock, Episode
from coalign.environments.rendering import Rendering
from coalign.types import Response, Status
from coalign_agents.gateway import join_gateway
from coalign_agents.program import fill, list_variables
from coalign_agents.session import LOOPBACK, EpisodeSession
from coalign_graders.boxes import BoxResult, SandboxConfig, open_sandbox

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SECONDS_FOR_EVER = 1e9


def build_tokenizer() -> Any:
    """Build a tokenizer of bytes with a chat template that shows tools."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_SPECIAL[-1], chat_template=_TEMPLATE)


class ScriptedPolicy:
    """Says one text after the other, and the last one again and again."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], capacity: int | None = None) -> None:
        self.capacity = capacity
        self._tokenizer, self._texts = tokenizer, chain(texts, repeat(texts[-1]))

    async def respond(self, tokens: list[int], *, limit: int, **_: Any) -> Response:
        said = self._tokenizer(next(self._texts), add_special_tokens=False)["input_ids"]
        answer = torch.tensor([*said, self._tokenizer.eos_token_id][:limit])
        status = Status.OK if len(said) < limit else Status.TRUNCATED
        return Response(answer, torch.zeros(len(answer)), torch.zeros(len(answer), dtype=torch.int64), status)

    def forget(self, group: int, index: int) -> None:
        pass

    def decode(self, tokens: Sequence[int], *, special: bool) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=not special)


def read_answers(path: Path | None) -> list[str]:
    """Read what the model says: a JSON text a line, or an object {name, arguments}, which becomes a call of a tool.

    Raises ValueError for another line.
    """
    if path is None:
        return ["Done."]
    texts = []
    for number, line in enumerate(filter(None, map(str.strip, path.read_text().splitlines())), 1):
        try:
            said = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}; a line is a JSON text, or {{name, arguments}}") from error
        if isinstance(said, dict) and "name" in said:
            said = f"<tool_call>{json.dumps(said)}</tool_call>"
        if not isinstance(said, str):
            raise ValueError(f"{path}:{number}: {line[:60]}; expected a JSON text, or {{name, arguments}}")
        texts.append(said)
    if not texts:
        raise ValueError(f"{path}: there is no answer in it")
    return texts


async def try_agent(
    command: Sequence[str], texts: Sequence[str], sandbox: SandboxConfig, seconds: float, capacity: int | None = None
) -> tuple[Episode, EpisodeSession, BoxResult]:
    """Run a command against the gateway; return its episode, its session, and how the command ended."""
    tokenizer = build_tokenizer()
    episode = Episode(
        row={"messages": []},
        group=0,
        index=0,
        seed=0,
        prompt=[],
        max_new_tokens=sys.maxsize,
        policy=ScriptedPolicy(tokenizer, texts, capacity),
        rendering=Rendering(load_template(tokenizer, "auto")),
    )
    episode.clock = EnvironmentClock(_SECONDS_FOR_EVER, lambda: None)
    session = EpisodeSession(episode, "hermes")
    async with join_gateway(LOOPBACK) as server, open_sandbox(sandbox) as box:
        with server.admit(session) as key:
            variables = list_variables(f"http://{await box.expose(server.port)}", key)
            words = [fill(word, {"url": variables["OPENAI_BASE_URL"]}) for word in command]
            result = await box.run(words, seconds=seconds, env=variables)
    episode.close()
    return episode, session, result


def report(episode: Episode, session: EpisodeSession) -> list[str]:
    """Say in lines what was asked, and what would be trained."""
    turns = episode.tree.turns
    sampled = sum(len(turn.tokens) for turn in turns)
    trained = sum(len(turn.tokens) for turn in turns if turn.trained)
    rows = episode.rows if turns else []

    def count(group: str) -> str:
        named = Counter({name: count for (counted, name), count in session.uses.items() if counted == group})
        return ", ".join(f"{count} {name}" for name, count in named.most_common())

    lines = [f"questions   {count('dialect')}", f"with        {count('feature') or 'nothing else'}"]
    lines.append(f"models      {count('model')}")
    ignored = {name.removeprefix("ignored/"): count for name, count in episode.counts.items() if "ignored/" in name}
    if ignored:
        lines.append(f"no effect   {', '.join(f'{name} {count:g}' for name, count in sorted(ignored.items()))}")
    if refused := count("refusal"):
        lines.append(f"refused     {refused}")
    for name, title in (("retries_joined", "retries that got the first one's answer"), ("unread", "answers unread")):
        if episode.counts[name]:
            lines.append(f"also        {episode.counts[name]:g} {title}")
    share = f" ({100 * trained / sampled:.0f} %)" if sampled else ""
    lines.append(f"trained     {trained} of {sampled} sampled tokens{share}, of {len(turns)} turns")
    lines.append(f"rows        {len(rows)}")
    for number, row in enumerate(rows):
        path = row.leaf.path if row.leaf else []
        label = next((f" ({turn.label})" for turn in path if turn.label), "")
        lines.append(
            f"  row {number}     {len(path)} turns, {sum(row.loss_mask)} trained of {len(row.tokens)} tokens{label}"
        )
    return lines
