"""Python's tracebacks in logs, also where the lines of several processes are mixed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from coalign_diagnose.logs import LineOrigin, LogFile, split_tags

# Ray's tracebacks begin with the task.
BEGIN = re.compile(
    r"Traceback \(most recent call last\)|RayTaskError(?:\(\w+\))?: ray::"
    r"|Unhandled error \(suppress with .{1,60}\): ray::"
)
_LONGEST = 400  # lines
_NOISE = 12  # lines of others inside of a traceback without tags
_FRAME = re.compile(r'\s*File ["“](?P<file>[^"”]+)["”], line (?P<line>\d+)(?:, in (?P<function>.+))?')
# IPython's `File ~/x.py:7, in f(a)` and `Cell In[3], line 9`; and those in the boxes of rich.
_NOTEBOOK_FRAME = re.compile(
    r"File (?P<file>[^\"“].*?):(?P<line>\d+)(?:, in (?P<function>[\w.<>]+))?"
    r"|(?P<cell>Cell In ?\[\d+\]), line (?P<number>\d+)"
)
_BOX_FRAME = re.compile(r"│ (?P<file>[~/\w][^│❱]*?):(?P<line>\d+) in (?P<function>[\w<>]+)\s*│?$")
_MARKED = re.compile(r"-+> ?\d|[│╭╰]")  # source lines of such tracebacks
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:\[[^\]]*\])?(?:\([\w.]+\))?(?:: |:?$)")
_LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib/python\d|\\lib\\|^<(?!stdin|ipython)|/python\d\.\d+/"
    r"|/(?:conda|anaconda|miniconda)\w*/bin/"
    r"|/bin/(?:torchrun|accelerate|deepspeed|ray|vllm|python)"
    r"|(?:^|/)(?:verl/(?!utils/reward_score)|trl/trl/|trl/(?:trainer|scripts)|transformers/|vllm/|sglang/|openrlhf/"
    r"|deepspeed/|megatron/|accelerate/|peft/|torch/|ray/|llamafactory/|swift/(?:llm|trainers)|coalign/(?!.*examples)|slime/|areal/|axolotl/|unsloth)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class StackFrame:
    """A frame of a traceback."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f", in {self.function}" if self.function else "")

    @property
    def is_own(self) -> bool:
        """Whether the file is neither Python's nor an installed package's nor a well-known framework's."""
        return not _LIBRARY.search(self.file)


@dataclass(frozen=True)
class LogTraceback:
    """A traceback: its first and last line in the file, its exception as text, its frames, outermost first."""

    first: int
    last: int
    exception: str
    frames: tuple[StackFrame, ...]
    origin: LineOrigin

    @property
    def own_frame(self) -> StackFrame | None:
        """The innermost frame of people's own code."""
        return next((frame for frame in reversed(self.frames) if frame.is_own), None)


def read_traceback(log: LogFile, first: int) -> LogTraceback | None:
    """Read the traceback that begins at a line; None if no exception ends it. Lines of other processes are skipped."""
    origin, _ = split_tags(log.text(first))
    frames: list[StackFrame] = []
    noise = 0
    for line in range(first + 1, min(first + _LONGEST, len(log))):
        who, text = split_tags(log.text(line))
        if who != origin and (origin.pid or origin.rank is not None):
            continue
        frame = _read_frame(text)
        if frame:
            frames.append(frame)
        elif BEGIN.search(text):
            return None
        elif text and not text[0].isspace() and not _MARKED.match(text) and frames:
            if _EXCEPTION.match(text):
                return LogTraceback(first, line, text.strip(), tuple(frames), origin.fill(log.origin))
            noise += 1
            if noise > _NOISE:
                return None
    return None


def _read_frame(text: str) -> StackFrame | None:
    if match := _FRAME.match(text) or _BOX_FRAME.match(text):
        return StackFrame(match["file"], int(match["line"]), match["function"] or "")
    if match := _NOTEBOOK_FRAME.match(text):
        return StackFrame(
            match["file"] or match["cell"], int(match["line"] or match["number"]), match["function"] or ""
        )
    return None


def read_block(log: LogFile, line: int, lines_back: int = 250, lines_forward: int = 25) -> str:
    """Return the traceback that a line ends or stands in, and some lines after it, of the same process.

    Without a traceback: the lines around.
    """
    origin, _ = split_tags(log.text(line))
    mixed = origin.pid is not None or origin.rank is not None
    lines: list[str] = []
    for number in range(line, max(line - lines_back, -1), -1):
        who, text = split_tags(log.text(number))
        if mixed and who != origin:
            continue
        lines.append(text)
        if BEGIN.search(text) and number < line:
            break
    else:
        lines = lines[:40]
    block = lines[::-1]
    for number in range(line + 1, min(line + lines_forward, len(log))):
        who, text = split_tags(log.text(number))
        if not mixed or who == origin:
            if BEGIN.search(text):
                break
            block.append(text)
    return "\n".join(block)


def is_source(log: LogFile, line: int) -> bool:
    """Whether a line is the source line of a frame, which a traceback shows below it."""
    who, text = split_tags(log.text(line))
    if not text[:1].isspace() or _FRAME.match(text):
        return False
    for number in range(line - 1, max(line - 8, -1), -1):
        above_origin, above = split_tags(log.text(number))
        if above_origin == who:
            return _FRAME.match(above) is not None
    return False
