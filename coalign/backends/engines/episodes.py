"""Plays a policy's samples as episodes: environments on their event loop, turns by an open run of the engine."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from coalign.backends.engines.contract import InferenceEngine, OnToken, Progress, Run
from coalign.backends.engines.request import Request, Response
from coalign.backends.engines.samples import missing_groups
from coalign.backends.engines.sampling import Sampling
from coalign.data.batch import Batch
from coalign.data.templates import load_template
from coalign.environments.episode import Episode, Log
from coalign.environments.loop import EnvironmentBatch, EnvironmentCall, EnvironmentFunction, EnvironmentLoop
from coalign.environments.rendering import Rendering
from coalign.roles import Context
from coalign.types import TOKEN_COLUMNS, Max, Stat, Stats, Status, Total, merge_stats

log = logging.getLogger(__name__)


class EpisodesFailed(RuntimeError):
    """Every episode of a batch failed."""


class EnginePolicy:
    """Takes the turns of episodes, as requests to ``run``. ``longest``: tokens of a sample that others still take."""

    def __init__(
        self, run: Run, tokenizer: PreTrainedTokenizerBase, loop: EnvironmentLoop, longest: int | None = None
    ) -> None:
        self.run = run
        self.tokenizer = tokenizer
        self.loop = loop
        self.room = min((room for room in (run.room, longest) if room is not None), default=None)

    async def respond(
        self, tokens: list[int], *, group: int, index: int, opening: int, limit: int, stop: tuple[str, ...] | None
    ) -> Response:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Response] = loop.create_future()

        def settle(response: Response) -> None:
            if not answer.done():
                answer.set_result(response)

        prompt = self.run.submit(
            Request(tokens, group, first=index, opening=opening, limit=limit, stop=stop),
            lambda place, response: loop.call_soon_threadsafe(settle, response),
        )
        self.loop.news.set()
        try:
            return await answer
        except asyncio.CancelledError:
            self.run.cut(prompt)
            raise

    def forget(self, group: int, index: int) -> None:
        self.run.forget(group, index)

    def decode(self, tokens: Sequence[int], *, special: bool) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


class EpisodeRunner:
    """The environment of a policy, with what it needs to be played."""

    def __init__(self, environment: EnvironmentFunction, tokenizer: PreTrainedTokenizerBase, context: Context) -> None:
        self.environment = environment
        self.tokenizer = tokenizer
        self.seed = context.seed
        self.longest = context.sample_tokens
        self.rendering = Rendering(load_template(tokenizer, context.chat_template))
        self.loop = EnvironmentLoop()
        self._shown: set[str] = set()  # reasons of failures whose traceback has been logged

    def close(self) -> None:
        self.loop.close()

    def run(
        self,
        engine: InferenceEngine,
        begun: Batch,
        sampling: Sampling,
        *,
        min_complete: float | None = None,
        progress: Progress | None = None,
        on_token: OnToken | None = None,
    ) -> tuple[Batch, Stats]:
        """The samples, which have no response yet, played to their end; see RolloutModule.generate.

        Raises EpisodesFailed, with the environment's own exception as cause, if none could be, EnvironmentBlocked if
        one holds up the others.
        """
        groups = None if min_complete is None else missing_groups(begun, min_complete)
        with engine.open(sampling, on_token) as run:
            episodes = self._episodes(begun, sampling, EnginePolicy(run, self.tokenizer, self.loop, self.longest))
            running = self.loop.start(self.environment, episodes, min_groups=groups)
            try:
                self._compute(engine, run, running, progress, len(episodes))
            finally:
                running.stop()
        self._report(running.calls)
        return _to_batch(begun, episodes), {**_stats(running.calls), **_prefill_stats(run, len(episodes))}

    def _compute(
        self, engine: InferenceEngine, run: Run, running: EnvironmentBatch, progress: Progress | None, total: int
    ) -> None:
        while not running.done:
            if run.unfinished:
                engine.advance(run)
                if progress is not None:
                    progress(running.finished, total, run.tokens_chosen)
            else:
                running.wait()

    def _episodes(self, begun: Batch, sampling: Sampling, player: EnginePolicy) -> list[Episode]:
        if not torch.equal(begun.lengths, begun["prompt_length"].long()):
            name = getattr(self.environment.fn, "__name__", "")
            raise ValueError(
                f"rollout.fn: '{name}' cannot go on with samples that another call began: what its environment knew is "
                "gone; unset rollout.round_tokens"
            )
        own = begun.get("max_new_tokens")
        limits = [sampling.max_new_tokens] * len(begun) if own is None else own.clamp(max=sampling.max_new_tokens)
        return [
            Episode(
                row=row.get("rows") or {},
                group=int(row["group"]),
                index=int(row["index"]),
                seed=self.seed,
                prompt=row["tokens"].tolist(),
                max_new_tokens=int(limit),
                policy=player,
                rendering=self.rendering,
            )
            for row, limit in zip(begun.rows(), limits, strict=True)
        ]

    def _report(self, calls: Sequence[EnvironmentCall]) -> None:
        """Show a failure's traceback once; raise if there is nothing but failures."""
        failed = [call for call in calls if call.error is not None]
        if not failed:
            return
        first = failed[0]
        message = (
            f"the environment failed in {len(failed)} of {len(calls)} calls; first on group {first.group}: "
            f"{first.reason}: {first.error}"
        )
        if len(failed) == len(calls):
            raise EpisodesFailed(message) from first.error
        fresh = [call for call in failed if call.reason not in self._shown]
        self._shown.update(call.reason for call in failed)
        log.warning(message, exc_info=fresh[0].error if fresh else None)


def _to_batch(begun: Batch, episodes: Sequence[Episode]) -> Batch:
    """The logs, with the sequence columns that the samples began with."""
    token = {
        column.name: torch.tensor(
            [value for episode in episodes for value in getattr(episode.log, column.name)],
            dtype=TOKEN_COLUMNS[column.name],
        )
        for column in fields(Log)
    }
    sequence: dict[str, Any] = {
        "prompt_length": torch.tensor([e.prompt_length for e in episodes], dtype=torch.int32),
        "status": torch.tensor([int(e.status) for e in episodes], dtype=torch.uint8),
        "messages": [e.messages for e in episodes],
    }
    lengths = torch.tensor([len(e.log.tokens) for e in episodes], dtype=torch.int64)
    return Batch(lengths, token, {**begun.sequence, **sequence})


def _prefill_stats(run: Run, episodes: int) -> Stats:
    """How many tokens of prompts an episode took to compute, and how many were still in the cache."""
    return {
        "episode/tokens_prefilled": Stat(run.tokens_prefilled, episodes),
        "episode/tokens_kept": Stat(run.tokens_kept, episodes),
    }


def _stats(calls: Sequence[EnvironmentCall]) -> Stats:
    """Means over the episodes that did not fail, and what became of the others."""
    many: list[Stats] = []
    names = {name for call in calls for episode in call.episodes for name in episode.counts}
    for call in calls:
        seconds = {"episode/seconds": Stat(call.clock.used), "episode/seconds_max": Max(call.clock.used)}
        many.append(seconds)
        if call.error is not None:
            many.append({f"episode/failed/{call.reason}": Total(float(len(call.episodes)))})
            continue
        counts: list[Counter[str]] = [e.counts for e in call.episodes if e.status != Status.PARTIAL]
        many += [{f"episode/{name}": Stat(float(count[name])) for name in names} for count in counts]
    return merge_stats(many)
