"""Matches the lines of a log with the rules: what was found, where, by whom and when."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from coalign_diagnose.logs import NOBODY, LineOrigin, LogFile, split_tags
from coalign_diagnose.rules import SECONDARY, CauseRule, LinePattern, build_filter, find_rule, load_rules
from coalign_diagnose.tracebacks import BEGIN, LogTraceback, is_source, read_block, read_traceback

MOST_ALIKE = 40  # lines that differ in digits alone
_MAX_LINES = 6_000  # lines of a log that are compared with the rules
_DIGITS = b"0123456789"
_WARNING = re.compile(
    r"^.{0,60}?(?<!NCCL )\b(?:WARN(?:ING)?|INFO|DEBUG|warning|info)\b(?!.{0,3}(?:ERROR))"
    r"|^\W{0,3}[WI]\d{3,4} \d\d:|^\[rank\d+\]:\[[WI]\d|(?:User|Future|Deprecation|Runtime|Resource)Warning\b"
)
_WORKER = re.compile(r"Worker(?:Error|Lost): \S+ failed in ([^:]{1,80}): ")
_RAY_TASK = re.compile(r"ray::([\w.<>]+)(?:\(\))? \(pid=(\d+)(?:, ip=([\w.]+))?")
_RANK = re.compile(r"\b[Rr]ank[ =:]{0,3}(\d+)\b")
# What a run prints while it trains: an error before several of these has not ended it.
_PROGRESS = re.compile(
    r"^.{0,120}?(?:\{'?\"?(?:train_)?loss'?\"?: |"
    r"\b(?:step|iter(?:ation)?|epoch|global_step)s?\b\W{0,3}\d+\b.{0,160}?\b(?:loss|reward|lr|grad_norm|kl)\b)",
    re.IGNORECASE | re.MULTILINE,
)
# What a framework says when a run has reached its end, and what a line says of an error that was got round.
_FINISHED = re.compile(
    r"train_runtime'?\"?[:=]|Job '[\w-]+' succeeded|(?i:\btraining (?:is )?(?:complete|finished)[d!.]*\s*$)", re.M
)
_GOT_ROUND = re.compile(
    r"(?i)\bfall(?:s|ing)? back (?:to|on)\b|\b(?:is|are|was|were) skipped\b|\bgets? (?:a )?reward 0|not errors\b"
)
_RETRIED = re.compile(r"will be retried|retries remaining")  # Ray's words
_RETRY_REACH = 12  # lines
_ORDINARY = re.compile(
    r"^(?:\w+\.)*(?:Key|Value|Type|Index|Attribute|ZeroDivision|Name|Assertion|Unicode\w*|JSONDecode|Runtime|Syntax|"
    r"UnboundLocal|Lookup|Arithmetic|Overflow|NotImplemented|Recursion|Timeout)Error\b|^\w*Exception\b"
)
_REFUSAL = re.compile(r"(?:\w+\.)*(?:Value|NotImplemented|Assertion)Error: (?P<message>.+)")
_DATA_LIKE = ("data", "versions", "user code", "frameworks")  # categories that a failing reward function may look like


@dataclass(frozen=True)
class Finding:
    """A rule that a line of a log matches, or an exception that no rule knows (``rule`` is None).

    ``line`` counts the file's lines from 0; ``time`` is in seconds; ``survived``: the run went on after it;
    ``is_warning``: it says itself that it is no error.
    """

    rule: CauseRule | None
    log: LogFile
    line: int
    text: str
    fields: Mapping[str, str] = field(default_factory=dict)
    origin: LineOrigin = NOBODY
    time: float | None = None
    survived: bool = False
    is_warning: bool = False
    traceback: LogTraceback | None = None

    @property
    def tier(self) -> int:
        return 35 if self.rule is None else self.rule.tier

    @property
    def counts(self) -> bool:
        """Whether it may be a cause: no warning, or one of those that are."""
        return not self.is_warning or self.rule is None or self.rule.takes_warnings or self.rule.is_lasting

    @property
    def place(self) -> str:
        return f"{self.log.name}:{self.log.number(self.line)}"

    @property
    def title(self) -> str:
        if self.rule:
            return self.rule.describe(self.fields)
        frame = self.traceback and (self.traceback.own_frame or self.traceback.frames[-1])
        raised_at = f", raised at {frame}" if frame else ""
        return f"{self.text[:200]}{raised_at} (the first exception; no rule knows it)"


@cache
def _index_patterns() -> dict[str, list[tuple[int, CauseRule, LinePattern]]]:
    """The patterns of all rules by each of their words, with the number of the rule."""
    index: dict[str, list[tuple[int, CauseRule, LinePattern]]] = {}
    for number, rule in enumerate(load_rules()):
        for pattern in rule.patterns:
            for word in pattern.words:
                index.setdefault(word, []).append((number, rule, pattern))
    return index


def find_all(log: LogFile) -> list[Finding]:
    """Return what the rules find in a log, in its order; and exceptions that they do not know."""
    findings: dict[int, Finding] = {}
    tracebacks: list[LogTraceback] = []
    for line in _list_candidates(log):
        text = log.text(line)
        if BEGIN.search(text) and (trace := read_traceback(log, line)):
            tracebacks.append(trace)
        if not is_source(log, line) and (finding := _match(log, line, text)):
            findings[line] = finding
    for trace in tracebacks:
        finding = findings.get(trace.last)
        if trace.exception == "AssertionError" and finding is None:  # what was asserted stands in the line before
            finding = _match(log, trace.last - 1, log.text(trace.last - 1))
        if named := _judge_exception(log, trace, finding):
            findings[trace.last] = named
    return [mark_survival(findings[line]) for line in sorted(findings)]


def _list_candidates(log: LogFile) -> list[int]:
    """Return the lines that a rule may match; where lines differ in digits alone, the first ones.

    A log in which more than _MAX_LINES lines look like errors is read at both ends.
    """
    alike: Counter[bytes] = Counter()
    chosen = []
    for line in log.find(build_filter(), ignore_case=True):
        raw = log.read(line)
        skeleton = raw.translate(None, _DIGITS)
        alike[skeleton] += 1
        if alike[skeleton] <= MOST_ALIKE or (b"atchdog" in raw and alike[skeleton] <= _MAX_LINES):
            chosen.append(line)
    return chosen if len(chosen) <= _MAX_LINES else [*chosen[: _MAX_LINES // 3], *chosen[-2 * _MAX_LINES // 3 :]]


def _match(log: LogFile, line: int, text: str) -> Finding | None:
    """Return the first rule of the file that a line matches."""
    lower = text.lower()
    hits = {}
    for word, patterns in _index_patterns().items():
        if word in lower:
            for number, rule, pattern in patterns:
                hits.setdefault(number, (rule, []))[1].append(pattern)
    if not hits:
        return None
    origin, bare = split_tags(text)
    is_warning = _WARNING.match(text) is not None or "Warning: " in text
    block: str | None = None
    for number in sorted(hits):
        rule, patterns = hits[number]
        hit = next((match for pattern in patterns if (match := pattern.expression.search(bare))), None)
        following = range(line + 1, min(line + 4, len(log)))
        if rule.order < 40 and "WorkerError: " in bare and any(BEGIN.search(log.text(n)) for n in following):
            continue  # it only repeats the first line of the traceback that follows
        if hit is None or any(pattern.search(bare) for pattern in rule.unless):
            continue
        if (rule.all or rule.none or rule.fields) and block is None:
            block = read_block(log, line)
        if not all(pattern.search(block or "") for pattern in rule.all) or any(
            pattern.search(block or "") for pattern in rule.none
        ):
            continue
        fields = {name: value for name, value in hit.groupdict().items() if value}
        for pattern in rule.fields:
            more = pattern.search(bare) or pattern.search(block or "")
            fields |= {name: value for name, value in more.groupdict().items() if value} if more else {}
        if origin.rank is None and (rank := fields.get("rank") or _find_rank(bare)):
            origin = replace(origin, rank=int(rank))
        if origin.pid is None and rule.order < SECONDARY and (task := _find_ray_task(block or read_block(log, line))):
            origin = origin.fill(task)
        who = origin.fill(log.origin)
        return Finding(rule, log, line, bare.strip(), fields, who, log.time(line), is_warning=is_warning)
    return None


def _find_rank(text: str) -> str | None:
    rank = _RANK.search(text)
    return rank[1] if rank else None


def _find_ray_task(block: str) -> LineOrigin | None:
    """Return the last task of Ray that a traceback names: the one in which the error was raised."""
    tasks = _RAY_TASK.findall(block)
    return LineOrigin(None, tasks[-1][2] or None, tasks[-1][0], tasks[-1][1]) if tasks else None


def _judge_exception(log: LogFile, trace: LogTraceback, finding: Finding | None) -> Finding | None:
    """Return what an exception is: a reward's, another one of the run's own code, a known or an unknown one."""
    frame, innermost = trace.own_frame, trace.frames[-1]
    reward, user = find_rule("reward-function"), find_rule("user-code")
    rule = finding.rule if finding and finding.rule and finding.rule.id != "bare-exception" else None
    if finding and rule and rule.order >= SECONDARY:
        return None
    in_reward = frame and reward.frames is not None and reward.frames.search(f"{frame.file} {frame.function}")
    if in_reward and _ORDINARY.match(trace.exception) and (rule is None or rule.category in _DATA_LIKE):
        rule = reward
    elif rule is None:
        rule = user if innermost.is_own else None
    refusal = None if rule else name_refusal(trace.exception)
    text = finding.text if finding else trace.exception
    if text == "AssertionError" and (asserted := split_tags(log.text(trace.last - 1))[1].strip()):
        text = f"AssertionError: {asserted}"
    origin = (finding.origin if finding else trace.origin).fill(_find_worker(log, trace.first))
    fields = dict(finding.fields) if finding else {}
    if refusal:
        rule, fields = refusal
    elif rule in (reward, user):
        fields["exception"] = text[:160]
    return Finding(rule, log, trace.last, text, fields, origin, log.time(trace.last), traceback=trace)


def _find_worker(log: LogFile, first: int) -> LineOrigin:
    """Return the worker that Coalign's error before a traceback names, if it does."""
    for line in range(first - 1, max(first - 4, -1), -1):
        if match := _WORKER.search(log.text(line)):
            rank = _find_rank(match[1])
            return LineOrigin(int(rank) if rank else None, actor=match[1])
    return NOBODY


def name_refusal(exception: str) -> tuple[CauseRule, dict[str, str]] | None:
    """Return the rule for an exception by which libraries refuse settings and inputs, with its message."""
    match = _REFUSAL.match(exception)
    return (find_rule("refused"), {"message": match["message"][:160]}) if match else None


def mark_survival(finding: Finding) -> Finding:
    """Say of a finding whether the log shows training steps after it."""
    rule = finding.rule
    if rule is not None and rule.order >= SECONDARY:
        return finding
    if rule is not None and rule.is_lasting:
        steps = list(_PROGRESS.finditer(finding.log.rest(max(len(finding.log) - 400, finding.line) - 1)))
        text = finding.log.rest(max(len(finding.log) - 400, finding.line) - 1)
        end = text.find("\n", steps[-1].start()) if steps else -1
        last = text[steps[-1].start() : end if end > 0 else None] if steps else finding.text
        return replace(finding, survived=not any(pattern.expression.search(last) for pattern in rule.patterns))
    preceding = (finding.log.text(line) for line in range(max(finding.line - _RETRY_REACH, 0), finding.line + 1))
    if any(_RETRIED.search(text) for text in preceding):
        return replace(finding, survived=True)
    rest = finding.log.rest(finding.line)
    if _FINISHED.search(rest) or (finding.traceback is None and _GOT_ROUND.search(finding.text)):
        return replace(finding, survived=True)
    steps = _PROGRESS.finditer(rest)
    return replace(finding, survived=sum(1 for _, _ in zip(steps, range(3), strict=False)) >= 3)
