"""Python programs in boxes, with the interface of Sandbox: for the code reward."""

from __future__ import annotations

import json
from pathlib import Path

from coalign_graders.boxes import SandboxConfig, open_sandbox
from coalign_graders.sandbox import sandbox

_JOB = Path(sandbox.__file__).with_name("job.py")
_READY = "ready\n"  # written before the code begins
# A box limits what `landlock`, `rights` and `seccomp` do. Answers leave by the stream of errors, which nobody reads.
_PROGRAM = r"""
import json, os, sys, types
task = json.load(sys.stdin.buffer)
job, *_ = (sys.modules.setdefault(name, types.ModuleType(name)) for name in ("job", "landlock", "rights", "seccomp"))
exec(task["job"], job.__dict__)
stdin = os.memfd_create("stdin")
with open(stdin, "wb", closefd=False) as file:
    file.write(task["stdin"].encode(errors="replace"))
os.lseek(stdin, 0, os.SEEK_SET)
for source, target in ((stdin, 0), (2, job.ANSWER), (os.open(os.devnull, os.O_WRONLY), 2)):
    os.dup2(source, target)
sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)
os.write(job.ANSWER, b"ready\n")
del sys.modules["job"]
job.run_code(task, [])
"""


class PythonBox:
    """Runs each program in a box of its own, which its like cannot have changed before."""

    def __init__(self, config: SandboxConfig, limits: sandbox.SandboxLimits, *, packages: bool) -> None:
        self.config, self.limits = config, limits
        self._argv = ["python3", "-s", *(() if packages else ("-S",)), "-X", "utf8", "-c", _PROGRAM]

    async def run(self, code: str, *, stdin: str = "", test: str = "", token: str = "") -> sandbox.SandboxResult:
        """Like ``Sandbox.run``, within the box's limits of memory, processes and files."""
        task = {"job": _JOB.read_text(), "code": code, "stdin": stdin, "test": test, "token": token}
        async with open_sandbox(self.config) as box:
            result = await box.run(
                self._argv,
                seconds=self.limits.seconds,
                stdin=json.dumps(task).encode(),
                env=sandbox.list_variables("/tmp"),
            )
        if not result.err.startswith(_READY):
            raise sandbox.SandboxError(f"the box runs no Python: {result.err or 'no answer'}")
        ended = "seconds" if result.code is None else f"exit {result.code}"
        if max(len(result.out.encode()), len(result.err.encode())) > self.limits.output_kb << 10:
            ended = "output"
        return sandbox.SandboxResult(ended, result.out, result.err.removeprefix(_READY))
