"""A server's limits that no client of it may lift."""

import asyncio

from coalign.http_server import build_application
from coalign_serve.serving.listener import serve_within

LARGE = 2**26


def test_an_answer_that_is_not_taken_is_cut():
    async def answer(_):
        return {"x": "x" * LARGE}

    async def ask() -> int:
        application = build_application({("GET", "/"): answer}, lambda _path, _status, message: {"error": message})
        async with serve_within(application, timeout=0.3, connections=4) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(2)
            received = 0
            try:
                while piece := await reader.read(2**20):
                    received += len(piece)
            except ConnectionError:
                pass
            return received

    assert 0 < asyncio.run(asyncio.wait_for(ask(), 60)) < LARGE


def test_an_error_of_a_handler_is_answered_and_the_end_cuts_what_is_open():
    async def fail(_):
        raise KeyError("x\ud800")  # half a surrogate pair, which UTF-8 does not have

    async def ask() -> tuple[bytes, bytes]:
        application = build_application({("GET", "/"): fail}, lambda _, status, message: {"is": [status, message]})
        async with serve_within(application, timeout=60, connections=4) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            idle, _ = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
        try:
            return answer, await idle.read()
        except ConnectionError:
            return answer, b""

    answer, idle = asyncio.run(asyncio.wait_for(ask(), 60))
    assert answer.startswith(b"HTTP/1.1 500") and b"KeyError" in answer and idle == b""
