"""Samples for the page rollouts: steps, the groups of a step, samples, one sample whole, and its images.

The head of a run's page has the newest ones.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, pstdev
from threading import Lock
from typing import Any

from coalign.files import open_regular, read_bounded
from coalign.run_files.records import is_number, name_group, parse_record, read_end
from coalign.run_files.rollouts import list_rollout_steps
from coalign_board.catalog import find_within
from coalign_board.questions import find_question
from coalign_board.readers import read_choice, read_count
from coalign_board.readers.rollouts import read_row
from coalign_board.readers.sample_index import NAME, PHASES, SampleIndex, SampleSummary, is_sample, read_record

_MAX_RUNS = 16  # runs whose index is kept in memory
_MAX_ROWS = 200  # steps or samples in one answer
_EXCERPT = 160  # characters of a text in a list
_SORTS = ("file", "reward", "length")
_NEWEST_BYTES = 1 << 18  # read from the end of samples.jsonl, for the newest samples
_MAX_NEWEST = 50
_LONGEST = 2000  # characters of a prompt or response among the newest
_MAX_IMAGE_BYTES = 32 * 2**20
# Only formats that hold no program; SVG may.
_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}
_NO_GROUP = "none"  # in addresses


class SampleReader:
    """Reads samples.jsonl through indexes of the runs that were looked at last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, SampleIndex] = OrderedDict()
        self._lock = Lock()

    def list_summaries(self, folder: Path) -> list[SampleSummary]:
        """Return all samples of a run in the order of the file; none if there is no file."""
        return self._update(folder)[0]

    def _update(self, folder: Path) -> tuple[list[SampleSummary], int]:
        """Return all samples of a run, and how many lines of the file hold none."""
        with self._lock:
            index = self._kept.setdefault(folder, SampleIndex(find_within(folder, folder / NAME)))
            self._kept.move_to_end(folder)
            if len(self._kept) > _MAX_RUNS:
                self._kept.popitem(last=False)
            return list(index.update()), index.skipped

    def read_steps(self, folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
        """Return what was sampled at the steps `offset` to `offset + limit` (at most 200), the newest first.

        Each has counts, rewards, groups whose rewards are all the same (`flat`), and whether tokens are recorded.
        `skipped` counts the lines of the file that hold no sample.
        """
        offset, limit = read_count(params, "offset", 0), min(_MAX_ROWS, read_count(params, "limit", 100))
        steps: dict[tuple[int, str], list[SampleSummary]] = {}
        summaries, skipped = self._update(folder)
        for sample in summaries:
            steps.setdefault((sample.step, sample.phase), []).append(sample)
        page, recorded = [], set(list_rollout_steps(folder))
        for step, phase in sorted(steps, reverse=True)[offset : offset + limit]:
            groups = _split_groups(steps[step, phase])
            counts = {"groups": len(groups), "flat": sum(map(is_flat, groups)), "tokens_recorded": step in recorded}
            page.append({"step": step, "phase": phase, **counts, **_summarise(steps[step, phase])})
        return {"total": len(steps), "offset": offset, "steps": page, "skipped": skipped}

    def read_groups(self, folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
        """Return the groups of a `step` and a `phase` (train, eval), each with the user's last turn, as `question`.

        `rewards` has mean and standard deviation of each component of the reward.
        """
        step, phase = read_count(params, "step"), read_choice(params, "phase", PHASES)
        members = [sample for sample in self.list_summaries(folder) if sample.step == step and sample.phase == phase]
        if not members:
            raise FileNotFoundError(f"{NAME} has no samples of step {step} ({phase})")
        groups = []
        with open_regular(folder / NAME) as file:
            for samples in _split_groups(members):
                firsts = [sample for sample in samples if not sample.branch] or samples
                records = [read_record(file, sample) for sample in firsts]
                about = {"question": find_question(records[0])[:_EXCERPT], "rewards": _summarise_rewards(records)}
                groups.append({"group": samples[0].group, "flat": is_flat(samples), **about, **_summarise(samples)})
        return {"step": step, "phase": phase, "groups": groups}

    def read_page(self, folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
        """Return the samples `offset` to `offset + limit` (at most 200), with excerpts of their texts.

        `step`, `phase` and `group` choose samples. `search` is text, in whatever case, of prompt, response or messages.
        `sort` is file, reward or length, and `order` up or down; samples without a reward come last.
        """
        chosen = self.list_summaries(folder)
        if params.get("step"):
            step = read_count(params, "step")
            chosen = [sample for sample in chosen if sample.step == step]
        if params.get("group"):
            group = _read_group(params)
            chosen = [sample for sample in chosen if sample.group == group]
        if params.get("phase"):
            phase = read_choice(params, "phase", PHASES)
            chosen = [sample for sample in chosen if sample.phase == phase]
        offset, limit = read_count(params, "offset", 0), min(_MAX_ROWS, read_count(params, "limit", 100))
        sort, order = read_choice(params, "sort", _SORTS), read_choice(params, "order", ("up", "down"))
        needle = params.get("search", "").casefold()
        if not chosen:
            return {"total": 0, "offset": offset, "samples": []}
        with open_regular(folder / NAME) as file:
            if needle:
                chosen = [sample for sample in chosen if _find_text(read_record(file, sample), needle) is not None]
            chosen = _sort(chosen, sort, descending=order == "down")
            page = [_show(sample, read_record(file, sample), needle) for sample in chosen[offset : offset + limit]]
        return {"total": len(chosen), "offset": offset, "samples": page}

    def read_sample(self, folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
        """Return the sample of a `step`, `phase`, `group` and `index` whole; of an episode its row `branch`, from 0.

        `tokens` are its tokens and their values, null if the run has not recorded them. `members` are the index and
        branch of each row of its group. ValueError if the file of tokens is damaged, or is not of this sample.
        """
        summary, record = self._find(folder, params)
        tokens = read_row(folder, summary.step, summary.row)
        if tokens is not None and "weight_version" in tokens["measures"]:
            written = sum(version >= 0 for version in tokens["measures"]["weight_version"])
            if written != summary.tokens:
                raise ValueError(
                    f"rollouts of step {summary.step}: row {summary.row} has {written} generated tokens, "
                    f"and {NAME} says {summary.tokens}"
                )
        return {
            **record,
            "generated": summary.tokens,
            "tokens": tokens,
            "members": [
                [member.index, member.branch]
                for member in self.list_summaries(folder)
                if (member.step, member.phase, member.group) == (summary.step, summary.phase, summary.group)
            ],
        }

    def read_image(self, folder: Path, params: Mapping[str, str]) -> Path:
        """Return the file of the `image` (counted from 0) that a sample lists, which is named as in `read_sample`.

        FileNotFoundError if it lists no such image, or the file is gone; ValueError if the file is no image.
        """
        record = self._find(folder, params)[1]
        listed, number = record.get("images") or [], read_count(params, "image")
        if number >= len(listed):
            raise FileNotFoundError(f"the sample lists {len(listed)} images; there is no image {number}")
        path = folder / str(listed[number])  # an absolute path stays one
        read_image(path)
        return path

    def _find(self, folder: Path, params: Mapping[str, str]) -> tuple[SampleSummary, dict[str, Any]]:
        phase = read_choice(params, "phase", PHASES)
        step, index, branch = read_count(params, "step"), read_count(params, "index"), read_count(params, "branch", 0)
        wanted = (step, phase, _read_group(params), index, branch)
        for summary in self.list_summaries(folder):
            if (summary.step, summary.phase, summary.group, summary.index, summary.branch) == wanted:
                with open_regular(folder / NAME) as file:
                    return summary, read_record(file, summary)
        raise FileNotFoundError(f"{NAME} has no sample {index} of {name_group(wanted[2])} at step {step} ({phase})")


def read_newest_samples(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return the `last` samples (default 4), the newest first, their texts cut after 2,000 characters."""
    count = min(read_count(params, "last", 4), _MAX_NEWEST)
    records = []
    complete = read_end(find_within(folder, folder / NAME), _NEWEST_BYTES).split(b"\n")[:-1]
    for line in reversed(complete):
        if len(records) == count:
            break
        if (record := parse_record(line)) and is_sample(record):
            reward, rewards = record.get("reward"), record.get("rewards") or {}
            components = {name: value for name, value in rewards.items() if is_number(value)}
            shown = {key: str(record.get(key, ""))[:_LONGEST] for key in ("response", "phase", "status")}
            shown |= {"question": find_question(record)[:_LONGEST]}
            shown |= {key: record.get(key) for key in ("step", "group", "index")}
            records.append({**shown, "reward": reward if is_number(reward) else None, "rewards": components})
    return {"samples": records}


def is_flat(samples: Iterable[SampleSummary]) -> bool:
    """Whether a group has several rewards, all the same: it has no advantage, so nothing is learnt from it."""
    rewards = [sample.reward for sample in samples if sample.reward is not None and not sample.branch]
    return len(rewards) > 1 and min(rewards) == max(rewards)


def _split_groups(samples: Iterable[SampleSummary]) -> list[list[SampleSummary]]:
    """Return the samples of each group, those without a group last."""

    def order(sample: SampleSummary) -> tuple[bool, int]:
        return sample.group is None, sample.group or 0

    return [list(group) for _, group in groupby(sorted(samples, key=order), key=order)]


def _read_group(params: Mapping[str, str]) -> int | None:
    """Return the parameter `group`, below 0 in evaluations; None for `none`, the samples without one."""
    return None if params.get("group") == _NO_GROUP else read_count(params, "group", least=None)


def _summarise_rewards(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the mean and the standard deviation of each component of the reward, of the samples that have a value."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in (record.get("rewards") or {}).items():
            if is_number(value):
                values.setdefault(name, []).append(value)
    return {name: [fmean(some), pstdev(some)] for name, some in values.items()}


def _summarise(samples: Sequence[SampleSummary]) -> dict[str, Any]:
    """Return number, mean length, lowest and highest version, and mean and spread of rewards (null: none has one).

    An episode counts once, however many rows it has.
    """
    versions = [version for sample in samples for version in sample.versions or ()]
    rewards = [sample.reward for sample in samples if sample.reward is not None and not sample.branch]
    episodes = sum(not sample.branch for sample in samples) or len(samples)
    return {
        "samples": episodes,
        "reward": fmean(rewards) if rewards else None,
        "reward_std": pstdev(rewards) if rewards else None,
        "reward_range": [min(rewards), max(rewards)] if rewards else None,
        "tokens": sum(sample.tokens for sample in samples) / episodes,
        "versions": [min(versions), max(versions)] if versions else None,
    }


def _sort(samples: list[SampleSummary], key: str, *, descending: bool) -> list[SampleSummary]:
    if key == "file":
        return samples[::-1] if descending else samples
    if key == "length":
        return sorted(samples, key=lambda sample: sample.tokens, reverse=descending)
    scored = [sample for sample in samples if sample.reward is not None]
    rest = [sample for sample in samples if sample.reward is None]
    return [*sorted(scored, key=lambda sample: sample.reward or 0.0, reverse=descending), *rest]


def _list_texts(record: Mapping[str, Any]) -> Iterator[str]:
    for key in ("response", "prompt"):
        yield str(record.get(key, ""))
    for message in record.get("messages") or ():
        content = message.get("content") or ""
        yield content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        if calls := message.get("tool_calls"):
            yield json.dumps(calls, ensure_ascii=False)


def _find_text(record: Mapping[str, Any], needle: str) -> str | None:
    """Return the text around the first ``needle``, which is casefolded; None if no text has it."""
    for text in _list_texts(record):
        at = text.casefold().find(needle)  # folding may move a few characters, which an excerpt does not mind
        if at >= 0:
            start = max(0, at - _EXCERPT // 4)
            return text[start : start + _EXCERPT]
    return None


def _show(summary: SampleSummary, record: Mapping[str, Any], needle: str) -> dict[str, Any]:
    names = ("step", "phase", "group", "index", "branch", "reward", "status", "tokens", "versions", "turns", "images")
    shown = {name: getattr(summary, name) for name in names}
    shown["question"] = find_question(record)[:_EXCERPT]
    shown["response"] = str(record.get("response", ""))[:_EXCERPT]
    return shown | ({"found": _find_text(record, needle)} if needle else {})


def read_image(path: Path) -> tuple[bytes, str]:
    """Return the content and the media type of an image. OSError without a file, ValueError for one that is no image.

    samples.jsonl names files anywhere on the machine that trained. Whoever wrote it must not be able to have the board
    send other files. Names say nothing: images that were in a data file are kept by their hash.
    """
    try:
        content = read_bounded(path, _MAX_IMAGE_BYTES)
    except FileNotFoundError:
        raise FileNotFoundError(f"the image {path} is not on this machine") from None
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return content, "image/webp"
    for signature, media_type in _SIGNATURES.items():
        if content.startswith(signature):
            return content, media_type
    raise ValueError(f"{path} is no image of a kind that browsers show (PNG, JPEG, GIF, WebP, BMP)")
