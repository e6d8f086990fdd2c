"""Decodes untrusted pictures in child processes that may hang, crash or fill their memory: they are replaced.

A file can make a decoder run for ever, or break it. In a separate process (`decoder_program.py`), with limits of time,
memory and pixels, only that picture is lost. A process decodes many pictures.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.processes.host import count_processors

if TYPE_CHECKING:
    from PIL.Image import Image

SECONDS = 20  # processor time for one file; large ones take about two
_BUSY_FACTOR = 6  # a busy machine may take so many times longer
_POOL_SIZE = min(4, count_processors())
_PROGRAM = Path(__file__).with_name("decoder_program.py")


class UnreadablePicture(ValueError):
    """A file holds no picture that can be decoded within the limits; the message names it."""


class _DecoderDied(UnreadablePicture):
    """A process ended over a file, or was ended by something else meanwhile."""


@dataclass(frozen=True, slots=True)
class DecodedPicture:
    """Sizes (width, height) of the frames of a file, one for a single picture, and their RGB bytes, end to end.

    ``rate``: frames a second, if the file says so. ``media_type``: such as `image/png`; None for a nameless one.
    """

    sizes: list[tuple[int, int]]
    rate: float | None
    media_type: str | None
    pixels: bytearray

    def images(self) -> Iterator[Image]:
        """Yield the frames, which were decoded with their pixels."""
        from PIL import Image as module

        start = 0
        for width, height in self.sizes:
            end = start + 3 * width * height
            yield module.frombytes("RGB", (width, height), self.pixels[start:end])
            start = end


def decode(
    content: bytes, name: str, max_pixels: int, *, is_video: bool = False, has_pixels: bool = True
) -> DecodedPicture:
    """Decode a file in full, as RGB and turned as its EXIF data says; all frames of one that ``is_video``.

    ``max_pixels`` is the limit of all frames together. Without ``has_pixels`` the file is decoded and checked, and
    its sizes are returned. Thread-safe. Raises UnreadablePicture, with the name, for a file that cannot be used.
    """
    request: dict[str, Any] = {"name": name, "max_pixels": max_pixels, "is_video": is_video, "has_pixels": has_pixels}
    request["seconds"] = SECONDS
    pool = _start_pool(os.getpid())
    process = pool.get()
    try:
        try:
            header, pixels = process.ask(request, content)
        except _DecoderDied:  # perhaps memory was short; a file that does it again is to blame
            header, pixels = process.ask(request, content)
    finally:
        pool.put(process)
    if "problem" in header:
        raise UnreadablePicture(header["problem"])
    return DecodedPicture([(w, h) for w, h in header["sizes"]], header["rate"], header["media_type"], pixels)


@cache
def _start_pool(pid: int) -> queue.LifoQueue[_DecodingProcess]:
    """The decoders of a process, started when needed; a fork of it has its own. The one used last comes first."""
    pool: queue.LifoQueue[_DecodingProcess] = queue.LifoQueue()
    for _ in range(_POOL_SIZE):
        pool.put(_DecodingProcess())
    return pool


class _DecodingProcess:
    """The parent's end of one process: started for the first picture, and again after it was killed or died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._deadline = 0.0

    def ask(self, request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytearray]:
        """Return the header and the pixels of an answer. Raises UnreadablePicture if the process dies meanwhile."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._deadline = time.monotonic() + _BUSY_FACTOR * request["seconds"]
        head = json.dumps(request | {"bytes": len(content)}).encode()
        try:
            self._send(len(head).to_bytes(8) + head)
            self._send(content)
            header = json.loads(self._receive(int.from_bytes(self._receive(8))))
            return header, self._receive(header["bytes"])
        except (OSError, EOFError) as error:
            how, timed_out = self._end(error)
            if timed_out:
                how = f"cannot be decoded within {request['seconds']} seconds"
            raise (UnreadablePicture if timed_out else _DecoderDied)(f"the image {request['name']} {how}") from error
        except BaseException:  # half an answer would be taken for the next one
            self._end(None)
            raise

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(_PROGRAM), str(theirs.fileno())]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment,
            )

    def _send(self, data: bytes) -> None:
        assert self._socket is not None
        self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
        self._socket.sendall(data)

    def _receive(self, size: int) -> bytearray:
        assert self._socket is not None
        data, filled = bytearray(size), 0
        view = memoryview(data)
        while filled < size:
            self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
            if not (count := self._socket.recv_into(view[filled:])):
                raise EOFError
            filled += count
        view.release()
        return data

    def _end(self, error: BaseException | None) -> tuple[str, bool]:
        """End the process; say how it ended, and whether its time was over."""
        assert self._process is not None and self._socket is not None
        self._socket.close()
        if not isinstance(error, EOFError):  # it has not ended by itself
            self._process.kill()
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._process = None
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return f"ends its decoder {how}", isinstance(error, TimeoutError) or code == -signal.SIGXCPU
