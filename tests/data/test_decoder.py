"""Pictures of strangers: formats that start programs, decoders that hang or crash, and what they may cost."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from coalign.data.images import decoder
from coalign.data.images.decoder import UnreadablePicture, _DecodingProcess, decode
from coalign.data.images.image_files import ImageFiles, open_frames, open_image, write_data_url
from coalign.data.images.videos import VideoFiles
from coalign.data.sources import BadRow

MOST = 10**6


def encode(name: str, size: tuple[int, int] = (24, 16), **more) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(out, name, **more)
    return out.getvalue()


def write_eps(witness: os.PathLike[str]) -> bytes:
    """A picture whose program writes a file."""
    program = f"({witness}) (w) file closefile showpage"
    return f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 24 16\n%%EndComments\n{program}\n%%EOF\n".encode()


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"])
def test_rasters_are_decoded_as_pillow_does(name):
    content = encode(name)
    image = open_image(content, "a", MOST)
    assert image.tobytes() == Image.open(io.BytesIO(content)).convert("RGB").tobytes() and image.size == (24, 16)


@pytest.mark.parametrize("lines", ["", "\r", "\xc5\xd0\xd3\xc6"])
def test_the_program_of_an_eps_is_never_run(lines, tmp_path, monkeypatch):
    folder, witness = tmp_path / "bin", tmp_path / "witness"
    folder.mkdir()
    (folder / "gs").write_text(f"#!/bin/sh\ntouch {witness}\n")
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    content = lines.encode("latin-1") + write_eps(witness)
    (tmp_path / "a.png").write_bytes(content)
    files = ImageFiles(tmp_path, MOST, tmp_path / "kept")
    for value in ("a.png", content, {"bytes": content}):
        with pytest.raises(BadRow, match=r"is no image that Pillow can read \(PNG, JPEG, .*"):
            files.find(files.store(value))
        with pytest.raises(BadRow, match="is no image"):
            videos = VideoFiles(files)
            videos.find(videos.store(value))
    with pytest.raises(BadRow, match="is no image"):
        write_data_url(str(tmp_path / "a.png"))
    assert not witness.exists()


@pytest.mark.parametrize("name", ["EPS", "PDF", "ICNS", "TGA", "PCX", "MSP", "SGI", "IM", "SPIDER"])
def test_other_formats_are_refused(name):
    out = io.BytesIO()
    Image.new("1" if name == "MSP" else "F" if name == "SPIDER" else "RGB", (32, 32)).save(out, name)
    with pytest.raises(BadRow, match="is no image that Pillow can read"):
        open_image(out.getvalue(), "a", MOST)


def start_program(monkeypatch, tmp_path, body: str) -> None:
    """Let decoders run another program, which answers pictures of the name `good` and does ``body`` with others."""
    program = tmp_path / "program.py"
    source = decoder._PROGRAM.read_text().replace(
        "    image = Image.open(", f"    if request['name'] != 'good':\n        {body}\n    image = Image.open("
    )
    program.write_text(source)
    monkeypatch.setattr(decoder, "_PROGRAM", program)
    decoder._start_pool.cache_clear()


@pytest.fixture(autouse=True)
def fresh_pool():
    yield
    decoder._start_pool.cache_clear()


FAULTS = {
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", "the image bad ends its decoder by SIGSEGV"),
    "exit": ("os._exit(3)", "the image bad ends its decoder with code 3"),
    "memory": ("bytearray(2**34)", "needs more memory than the decoder may use"),
    "bug": ("{}['key']", "the image bad is damaged: 'key'"),
    "loop": ("exec('while True: pass')", "cannot be decoded within 1 seconds"),
    "wait": ("time.sleep(60)", "cannot be decoded within 1 seconds"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_decoder_that_fails_costs_one_picture(fault, tmp_path, monkeypatch):
    body, message = FAULTS[fault]
    if fault in ("loop", "wait"):  # the others end by themselves, on a busy machine later
        monkeypatch.setattr(decoder, "SECONDS", 1)
        monkeypatch.setattr(decoder, "_BUSY_FACTOR", 2)
    start_program(monkeypatch, tmp_path, body)
    with pytest.raises(UnreadablePicture, match=message):
        decode(encode("PNG"), "bad", MOST)
    assert decode(encode("PNG"), "good", MOST).sizes == [(24, 16)]


def test_a_picture_that_hangs_holds_up_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(decoder, "SECONDS", 2)
    monkeypatch.setattr(decoder, "_POOL_SIZE", 2)
    start_program(monkeypatch, tmp_path, "exec('while True: pass')")
    with ThreadPoolExecutor(2) as threads:
        hangs = threads.submit(decode, encode("PNG"), "bad", MOST)
        for _ in range(3):
            decode(encode("PNG"), "good", MOST)
        assert not hangs.done()
        assert isinstance(hangs.exception(), UnreadablePicture)


def test_a_process_that_was_killed_between_pictures_is_replaced():
    process = _DecodingProcess()
    request = {"name": "a", "max_pixels": MOST, "is_video": False, "has_pixels": False, "seconds": 5}
    first = process.ask(request, encode("PNG"))
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    assert process.ask(request, encode("PNG")) == first


def test_a_picture_is_decoded_again_if_its_process_was_killed(monkeypatch, tmp_path):
    mark = tmp_path / "mark"
    mark.mkdir()
    start_program(monkeypatch, tmp_path, f"os.path.isdir({str(mark)!r}) and (os.rmdir({str(mark)!r}), os._exit(1))")
    assert decode(encode("PNG"), "bad", MOST).sizes == [(24, 16)] and not mark.exists()


def test_frames_and_their_rate():
    out, frames = io.BytesIO(), [Image.new("RGB", (8, 6), color) for color in ("red", "blue", "green")]
    frames[0].save(out, "WEBP", save_all=True, append_images=frames[1:], duration=250, lossless=True)
    images, rate = open_frames(out.getvalue(), "a", MOST)
    assert rate == 4.0 and [image.getpixel((0, 0)) for image in images] == [(255, 0, 0), (0, 0, 255), (0, 128, 0)]
    with pytest.raises(BadRow, match=r"the 3 frames of a have 144 pixels; data\.images\.max_file_pixels is 100"):
        open_frames(out.getvalue(), "a", 100)


def test_files_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.png"))
    files = ImageFiles(tmp_path, MOST)
    for name, why in {
        "fifo.png": "is no regular file",
        "zero.png": "is no regular file",
        "socket.png": "is no regular file",
        "folder.png": "is a directory",
        "loop.png": "cannot be read: Too many levels",
        "x" * 5000 + ".png": "cannot be read: File name too long",
        "a/" * 5000: "cannot be read: File name too long",
        "a\0b": "does not exist",
        "\ud800.png": "does not exist",
        "http://[::1": "is no URL",
        "file://[/a": "is no URL",
    }.items():
        with pytest.raises(BadRow, match=why):
            files.store(name)
        with pytest.raises(BadRow) as refusal:
            VideoFiles(files).store(name)
        assert len(str(refusal.value)) < 1000
    with pytest.raises(BadRow, match="no bytes or path"):
        files.store({"bytes": {"bytes": {"path": "a.png"}}})


def test_a_fork_has_decoders_of_its_own():
    decode(encode("PNG"), "a", MOST)
    done: list[int] = []
    pid = os.fork()
    if not pid:
        os._exit(decode(encode("PNG", (5, 5)), "a", MOST).sizes != [(5, 5)])
    watcher = threading.Thread(target=lambda: done.append(os.waitpid(pid, 0)[1]))
    watcher.start()
    for _ in range(20):
        assert decode(encode("PNG"), "a", MOST).sizes == [(24, 16)]
    watcher.join(20)
    assert done == [0]
