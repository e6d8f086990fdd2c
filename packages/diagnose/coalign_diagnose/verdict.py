"""Puts what was found into the order of cause and effect, and says what came first, where, and how sure that is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from coalign_diagnose.collectives import compare_collectives, find_last_deed
from coalign_diagnose.findings import Finding, find_all, mark_survival, name_refusal
from coalign_diagnose.hangs import find_hang, find_standstill
from coalign_diagnose.logs import NOBODY, LineOrigin, LogFile
from coalign_diagnose.rules import LEVELS, SECONDARY
from coalign_diagnose.sources import check_training, read_sources
from coalign_diagnose.stragglers import find_straggler

_WRAPPER = re.compile(
    r"RayTaskError|ChildFailedError|CalledProcessError|Process\w*Exception|Caught \w+ in|Broken|Connection"
)
_DONE = re.compile(r"(?i)\b(?:finished|done|completed?|saved|succeeded|success(?:fully)?|results?|all)\b")
_LAST_LINES = 4  # say how a log ends
_CHAIN = 80  # lines between exceptions of one chain
_WORK = 12  # lines without a word of trouble, by which an exception was caught
_TROUBLE = re.compile(r"(?i)error|exception|traceback|fail|abort|kill|frame #|File \"|NCCL|warn|\bexit|timeout|shut")
_MAX_CANDIDATES = 4


@dataclass(frozen=True)
class RunDiagnosis:
    """Why a run ended badly. ``cause`` is None if nothing failed; its rule is None if the cause is unknown.

    ``evidence`` are (place, text); ``reasons`` say why it is this ``sure``; ``candidates`` are other possible causes.
    """

    cause: Finding | None
    origin: LineOrigin = NOBODY
    sure: str = "possible"
    reasons: tuple[str, ...] = ()
    evidence: tuple[tuple[str, str], ...] = ()
    candidates: tuple[Finding, ...] = ()
    passed: int = 0  # errors that the run went on after


def judge_paths(paths: Iterable[str]) -> tuple[RunDiagnosis, list[LogFile]]:
    """Read and judge what `coalign diagnose` is given. ValueError or OSError for what is no log of a training run."""
    logs = read_sources(paths)
    verdict = judge(logs)
    if verdict.cause is None:
        check_training(logs)
    return verdict, logs


def judge(logs: Sequence[LogFile]) -> RunDiagnosis:
    """Read logs of one run, of any number of processes, and name the first error in causal order."""
    findings = [finding for log in logs for finding in find_all(log)]
    findings += [finding for finding in (find_hang(logs), find_straggler(logs), find_standstill(logs)) if finding]
    primary = [finding for finding in findings if finding.rule is None or finding.rule.order < SECONDARY]
    lasting = [finding for finding in primary if not finding.survived and finding.counts]
    if not lasting and any(finding.tier >= SECONDARY and finding.rule for finding in findings if _ends(finding)):
        lasting = [finding for finding in primary if not finding.survived]
    if not lasting:
        lasting = _find_unnamed(findings)
    if not lasting:
        return RunDiagnosis(None, passed=len(primary))
    lasting = [finding for finding in lasting if not _is_caught(finding, lasting)]
    effects_alone = all(finding.tier >= 40 for finding in lasting)
    ranked = _sort([finding for finding in primary if finding.counts] if effects_alone else lasting)
    return _describe(ranked, findings, logs)


def _is_caught(finding: Finding, findings: list[Finding]) -> bool:
    """Whether the process of an exception went on with ordinary work, and ended by a later one of the same weight."""
    if finding.traceback is None or finding.tier < 20:
        return False
    later = [
        later_finding.traceback.first
        for later_finding in findings
        if later_finding.log is finding.log
        and later_finding.tier <= finding.tier
        and later_finding.traceback
        and later_finding.origin == finding.origin
    ]
    end = max(later, default=0)
    work = (finding.log.text(line) for line in range(finding.line + 1, min(end, finding.line + _CHAIN)))
    return sum(1 for text in work if text[:1].strip() and not _TROUBLE.search(text)) >= _WORK


def _find_unnamed(findings: list[Finding]) -> list[Finding]:
    """Return, as unknown causes, exceptions without a traceback; else what wrapped an error that the logs lack."""
    ends = [finding for finding in findings if finding.tier >= SECONDARY and _ends(finding)]
    bare = [finding for finding in ends if finding.rule and finding.rule.id == "bare-exception"]
    bare = [finding for finding in bare if not _WRAPPER.search(finding.text)]
    unnamed = []
    for finding in bare or ends:
        rule, fields = name_refusal(finding.text) or (None, {})
        unnamed.append(replace(finding, rule=rule, fields=fields))
    return [finding for finding in map(mark_survival, unnamed) if not (finding.survived or _ends_well(finding.log))]


def _ends_well(log: LogFile) -> bool:
    """Whether the last lines of a log say that the work is done."""
    return any(_DONE.search(log.text(line)) for line in range(max(len(log) - _LAST_LINES, 0), len(log)))


def _ends(finding: Finding) -> bool:
    """Whether a secondary message shows that the run ended by an error, which no other message names."""
    return not finding.is_warning and (
        "Error" in finding.text or "Exception" in finding.text or "failed" in finding.text
    )


def _sort(findings: list[Finding]) -> list[Finding]:
    """Sort by tier, and within one by time, which counts if all have one; else by file and line."""
    ordered = []
    for survived in (False, True):
        subset = [finding for finding in findings if finding.survived is survived]
        for tier in sorted({finding.tier for finding in subset}):
            alike = [finding for finding in subset if finding.tier == tier]
            several = len({id(finding.log) for finding in alike}) > 1
            timed = several and all(finding.time is not None for finding in alike)
            ordered += sorted(alike, key=lambda f: f.time or 0.0) if timed else alike
    if ordered and ordered[0].tier >= 40:  # only effects last: what the run seemed to survive may still be their cause
        causes = [finding for finding in ordered if finding.survived and finding.tier < 30]
        ordered = [*(finding for finding in ordered if not finding.survived), *causes]
    return ordered


def _describe(ranked: list[Finding], findings: list[Finding], logs: Sequence[LogFile]) -> RunDiagnosis:
    cause = ranked[0] = _follow_chain(ranked[0], findings)
    candidates: dict[str, Finding] = {}
    for finding in ranked[1:]:
        name = finding.rule.id if finding.rule else finding.text
        if name != (cause.rule.id if cause.rule else cause.text):
            candidates.setdefault(name, finding)
    sure, reasons = _weigh(cause, ranked, logs)
    origin, evidence = cause.origin, [(cause.place, cause.text[:400])]
    if cause.traceback and (frame := cause.traceback.own_frame):
        evidence.append((f"{frame.file}:{frame.line}", f"in {frame.function}" if frame.function else "here"))
    if cause.rule and cause.rule.id in ("nccl-timeout", "gloo-timeout", "nccl-heartbeat"):
        lagging = compare_collectives(findings, logs)
        if lagging is not None:
            origin = lagging.origin or origin
            reasons.append(lagging.text)
            evidence += lagging.evidence
            rank = None if lagging.origin is None else lagging.origin.rank
            if rank is not None and (deed := find_last_deed(cause, rank, logs)):
                evidence.append(deed)
    same = {finding.place for finding in ranked if finding.rule is cause.rule and finding.tier < 90} - {cause.place}
    if same:
        reasons.append(f"{len(same)} more lines say the same")
    rest = tuple(candidates.values())[:_MAX_CANDIDATES]
    return RunDiagnosis(cause, origin, sure, tuple(reasons), tuple(evidence), rest)


def _follow_chain(cause: Finding, findings: list[Finding]) -> Finding:
    """Return what the tracebacks that follow from an exception say more exactly, or the same as an error.

    A library turns `401 Client Error` into `GatedRepoError`; a warning is repeated by the exception that it led to.
    """
    if cause.rule is None or cause.tier >= 40:
        return cause
    for later in findings:
        if later.log is not cause.log or later.rule is None or not 0 < later.line - cause.line <= _CHAIN:
            continue
        if later.rule is cause.rule and later.traceback and cause.is_warning:
            return later
        if later.line - cause.line <= 3 and "validation error" in cause.text and later.text.startswith("Value error"):
            return later  # pydantic's message
        if later.traceback and cause.traceback and later.tier == cause.tier and later.rule.order < cause.rule.order:
            between = "".join(later.log.text(line) for line in range(cause.line, later.traceback.first + 1))
            if "above exception" in between:
                return later
    return cause


def _weigh(cause: Finding, ranked: list[Finding], logs: Sequence[LogFile]) -> tuple[str, list[str]]:
    """Return how sure it is, and why."""
    if cause.rule is None:
        return "possible", ["no rule knows this exception; it is the first that nothing explains"]
    sure, reasons = cause.rule.sure, []
    if cause.tier >= 40:
        reasons.append("this is an effect of something else, and the logs given do not show of what")
    elif sure == "certain":
        reasons.append("the message names the cause itself")
    else:
        reasons.append("the message has this cause most of the time")
    rivals = {
        rival.rule.id: rival
        for rival in ranked[1:]
        if rival.rule and rival.tier == cause.tier and rival.rule != cause.rule
    }
    if rivals:
        first = next(iter(rivals.values()))
        gap = f", {first.time - cause.time:.1f} s before the next" if cause.time and first.time else ""
        several = len({id(finding.log) for finding in (cause, *rivals.values())}) > 1
        timed = cause.time is not None and all(rival.time is not None for rival in rivals.values())
        reasons.append(f"it comes first of {len(rivals) + 1} different errors{gap}")
        if several and not timed:
            sure = LEVELS[max(LEVELS.index(sure), 1)]
            reasons.append("lines without a time of several files cannot be compared")
    if cause.survived:
        sure = "possible"
        reasons.append("but the run went on for some steps after it")
    return sure, reasons
