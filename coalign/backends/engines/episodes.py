"""Plays a policy's samples as episodes: environments run on an event loop, an engine session answers their turns."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from coalign.backends.engines.contract import GenerationSession
from coalign.backends.engines.request import Request, stack_experts
from coalign.backends.engines.session_driver import GenerationTask
from coalign.data.batch import Batch
from coalign.data.images.expansion import Placeholders
from coalign.data.templates import load_template
from coalign.environments.episode import Episode
from coalign.environments.loop import EnvironmentBatch, EnvironmentCall, EnvironmentLoop, Environments
from coalign.environments.rendering import Rendering
from coalign.environments.tree import ROW_COLUMNS
from coalign.roles import Context
from coalign.types import TOKEN_COLUMNS, ImageSpan, Max, Response, Stat, Stats, Status, Total, merge_stats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from coalign.config.schema import SamplingConfig

log = logging.getLogger(__name__)

_MAX_FAILED_BATCHES = 4  # in a row, in which one of several environments fails in every call, before the run ends


class EpisodesFailed(RuntimeError):
    """Every episode of a batch failed."""


class EpisodeBatch(GenerationTask):
    """The episodes of a batch while they are played, and the policy that answers their turns by requests to a session.

    ``samples`` have no response yet. Once ``min_groups`` groups are complete, the episodes of the others end as they
    are (PARTIAL).
    """

    def __init__(
        self, runner: EpisodeRunner, session: GenerationSession, samples: Batch, min_groups: int | None
    ) -> None:
        self.runner, self.session, self.samples = runner, session, samples
        self.tokens_prefilled = self.tokens_kept = 0  # prompt tokens, summed over all turns
        limits = (session.engine.max_tokens, runner.longest)
        self.capacity = min((limit for limit in limits if limit is not None), default=None)
        self.episodes = runner.create_episodes(samples, session.sampling, self)
        self.total = len(self.episodes)
        self.running = EnvironmentBatch(runner.loop, runner.environments, self.episodes, min_groups)

    # ---- for the thread that steps

    @property
    def finished(self) -> int:
        return self.running.finished

    @property
    def done(self) -> bool:
        return self.running.done

    def wait(self, seconds: float) -> None:
        """Raises EnvironmentBlocked if an environment holds up the others."""
        self.running.wait(seconds)

    def stop(self) -> None:
        self.running.stop()

    def result(self) -> tuple[Batch, Stats]:
        """Return the samples of episodes that are done, and their statistics. Raises EpisodesFailed, with the
        environment's own exception as cause, if all failed."""
        calls, engine = self.running.calls, self.session.engine
        self.runner.report_failures(calls)
        prefill = {
            "episode/tokens_prefilled": Stat(self.tokens_prefilled, len(self.episodes)),
            "episode/tokens_kept": Stat(self.tokens_kept, len(self.episodes)),
        }
        out = _to_batch(self.samples, self.episodes)
        rows = [row for episode in self.episodes for row in episode.rows]
        if self.runner.reads_images:
            out = out.with_(images=[tuple(row.images) for row in rows])
        if engine.experts is not None:
            experts = [row.leaf and row.leaf.experts for row in rows]
            out = out.with_(routed_experts=stack_experts(experts, out.lengths.tolist(), engine.experts))
        stats = {**_merge_episode_stats(calls), **prefill}
        for key in filter(None, self.runner.environments):
            its_stats = _merge_episode_stats([call for call in calls if call.environment.key == key])
            stats |= {name.replace("episode/", f"episode/{key}/", 1): metric for name, metric in its_stats.items()}
        return out, stats

    # ---- for the episodes, on their event loop

    async def respond(
        self,
        tokens: list[int],
        *,
        group: int,
        index: int,
        prompt_length: int,
        limit: int,
        stop: tuple[str, ...] | None,
        stream: int,
        images: tuple[ImageSpan, ...],
    ) -> Response:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Response] = loop.create_future()

        def settle(response: Response) -> None:
            if not answer.done():
                answer.set_result(response)

        options: dict[str, Any] = {"limit": limit, "stop": stop, "images": images, "restarts": stream}
        request = Request(tokens, group, first=index, first_turn=prompt_length, **options)
        prompt = self.session.submit(request, lambda offset, response: loop.call_soon_threadsafe(settle, response))
        self.runner.loop.news.set()
        try:
            return await answer
        except asyncio.CancelledError:
            self.session.cut(prompt)
            raise
        finally:
            prefilled, kept = prompt.prompt_tokens
            self.tokens_prefilled += prefilled
            self.tokens_kept += kept

    def forget(self, group: int, index: int) -> None:
        self.session.forget(group, index)

    def decode(self, tokens: Sequence[int], *, special: bool) -> str:
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return cast(str, self.runner.tokenizer.decode(list(tokens), **options))


class EpisodeRunner:
    """Plays the environments of a policy.

    ``placeholders``: what images become, of a policy that sees. longest: the most tokens of a sample that later models
    can read.
    """

    def __init__(
        self,
        environments: Environments,
        tokenizer: PreTrainedTokenizerBase,
        context: Context,
        placeholders: Placeholders | None = None,
    ) -> None:
        self.environments = environments
        self.tokenizer = tokenizer
        self.seed = context.seed
        self.longest = context.sample_tokens
        self.reads_images = placeholders is not None
        settings = (context.chat_template, context.chat_template_kwargs, context.reasoning)
        self.rendering = Rendering(load_template(tokenizer, *settings, placeholders=placeholders))
        self.loop = EnvironmentLoop()
        self._shown: set[str] = set()  # reasons of failures whose traceback has been logged
        self._failed_batches: Counter[str] = Counter()  # in a row, in which every call of an environment failed

    def close(self) -> None:
        self.loop.close()

    def create_episodes(self, samples: Batch, sampling: SamplingConfig, policy: EpisodeBatch) -> list[Episode]:
        """Create the episodes of samples without a response. Raises ValueError for samples that have one."""
        if not torch.equal(samples.lengths, samples["prompt_length"].long()):
            names = ", ".join(environment.name for environment in self.environments.values())
            raise ValueError(
                f"rollout: '{names}' cannot continue samples of an earlier call: the state of their environment is "
                "gone; unset rollout.round_tokens"
            )
        caps = samples.get("max_new_tokens")
        limits = [sampling.max_new_tokens] * len(samples) if caps is None else caps.clamp(max=sampling.max_new_tokens)
        return [
            Episode(
                row=row.get("rows") or {},
                group=int(row["group"]),
                index=int(row["index"]),
                seed=self.seed,
                prompt=row["tokens"].tolist(),
                max_new_tokens=int(limit),
                policy=policy,
                rendering=self.rendering,
                images=row.get("images") or (),
            )
            for row, limit in zip(samples.rows(), limits, strict=True)
        ]

    def report_failures(self, calls: Sequence[EnvironmentCall]) -> None:
        """Log one traceback for each reason of failure; raise EpisodesFailed if every call failed.

        One of several environments may fail in all calls of a batch, but not of _MAX_FAILED_BATCHES in a row.
        """
        for key in {call.environment.key: call for call in calls}:
            made = [call for call in calls if call.environment.key == key]
            failed = [call for call in made if call.error is not None]
            self._failed_batches[key] = self._failed_batches[key] + 1 if len(failed) == len(made) else 0
            if not failed:
                continue
            first, name = failed[0], f"environment '{key}'" if key else "environment"
            counts, cause = f"{len(failed)} of {len(made)} calls", f"{first.reason}: {first.error}"
            message = f"the {name} failed in {counts}; first on group {first.group}: {cause}"
            if self._failed_batches[key] >= (_MAX_FAILED_BATCHES if key else 1):
                raise EpisodesFailed(message) from first.error
            fresh = [call for call in failed if call.reason not in self._shown]
            self._shown.update(call.reason for call in failed)
            log.warning(message, exc_info=fresh[0].error if fresh else None)


def _to_batch(samples: Batch, episodes: Sequence[Episode]) -> Batch:
    """Build the rows of all episodes; those of one are neighbours, numbered by the column ``branch``."""
    rows = [row for episode in episodes for row in episode.rows]
    token = {
        name: torch.tensor([value for row in rows for value in getattr(row, name)], dtype=TOKEN_COLUMNS[name])
        for name in ROW_COLUMNS
    }
    counts = torch.tensor([len(episode.rows) for episode in episodes])
    sequence: dict[str, Any] = {
        "status": torch.tensor([int(e.status) for e in episodes], dtype=torch.uint8),
        "messages": [e.messages for e in episodes],
        "rows": [e.row if e.tools is None else {**e.row, "tools": e.tools} for e in episodes],
    }
    owner = torch.arange(len(episodes)).repeat_interleave(counts)
    per_episode = Batch(torch.zeros(len(episodes)), {}, {**samples.sequence, **sequence}).select(owner)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    prompt_lengths = torch.tensor([row.prompt_length for row in rows], dtype=torch.int32)
    per_row = {"prompt_length": prompt_lengths, "branch": (torch.arange(len(rows)) - first).int()}
    lengths = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)
    return Batch(lengths, token, {**per_episode.sequence, **per_row})


def _merge_episode_stats(calls: Sequence[EnvironmentCall]) -> Stats:
    """Average over the episodes that did not fail, and count the failures of the others by reason."""
    many: list[Stats] = []
    names = {name for call in calls for episode in call.episodes for name in episode.counts}
    for call in calls:
        many.append({"episode/seconds": Stat(call.clock.used), "episode/seconds_max": Max(call.clock.used)})
        if call.error is not None:
            many.append({f"episode/failed/{call.reason}": Total(float(len(call.episodes)))})
            continue
        counts: list[Counter[str]] = [e.counts for e in call.episodes if e.status != Status.PARTIAL]
        many.extend({f"episode/{name}": Stat(float(count[name])) for name in names} for count in counts)
    return merge_stats(many)
