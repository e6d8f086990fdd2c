"""`coalign serve`: a model behind the interface of OpenAI's completions and chat completions.

Requests that arrive while others are computed join them: see engine_loop.py. docs/serving.md shows clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from coalign.backends import pretrained
from coalign.config.functions import resolve
from coalign.data.templates import PlainText, Template, load_template
from coalign.http_server import EventStream, HttpRefusal, Request, Server, read_body
from coalign.report.display import Display
from coalign_serve.config.serving import CompletionServerConfig
from coalign_serve.run_model import choose_template, find_model
from coalign_serve.serving.completion_answer import AnswerWriter, ChatWriter, GrowingAnswer, TextWriter
from coalign_serve.serving.completion_records import Parser, describe_error
from coalign_serve.serving.completion_request import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingRequest,
    TokenizedPrompt,
    read_request,
)
from coalign_serve.serving.engine_loop import ChosenToken, CompletionEngine, GenerationJob, JobEvent, JobFailure
from coalign_serve.serving.engine_process import build_model_config, start_engine, start_replicas
from coalign_serve.serving.listener import ApiKey, build_limited_server, open_guarded_listener, read_key
from coalign_serve.serving.request_images import RequestImages

_DECODING = 2  # requests whose images are decoded at once: they wait in threads that others need, too


def serve(config: CompletionServerConfig, display: Display) -> None:
    """Serve until SIGINT or SIGTERM; requests under way then get ``config.grace`` seconds to finish.

    Raises ValueError for a directory that holds no model, for a template that cannot be used, and for an address that
    other machines reach without a key; OSError if the port is taken.
    """
    key = read_key(config)
    listener, address = open_guarded_listener(config, config.port, key)  # before a model loads: the port may be taken
    name, config = config.model, config.model_copy(update={"model": find_model(config.model)})
    model = build_model_config(config)
    text = load_text_tools(config)
    display.note(f"loading {config.model}")
    if config.replicas > 1:
        source: CompletionEngine = start_replicas(model, config)
    else:
        source = start_engine(model, config.device, config.seed, config.images)
    listener.listen()
    display.note(f"serving {name} at {address}/v1 (engine {config.engine}, {model.dtype}, replicas: {config.replicas})")
    build_completion_server(source, text, config, name, key).run(sockets=[listener])


@dataclass(frozen=True)
class TextTools:
    """What turns messages into tokens: a template, the plain text of completions, and a parser of tool calls."""

    plain: PlainText
    template: Template | None  # None if the tokenizer has none, and chat is refused with ``problem``
    problem: str
    parser: Parser | None

    @property
    def tokenizer(self) -> Any:
        return self.plain.tokenizer


def load_text_tools(config: CompletionServerConfig) -> TextTools:
    """Load tokenizer, template and parser. Raises ValueError for a template or a parser that cannot be used."""
    model = build_model_config(config)
    tokenizer, placeholders = pretrained.read_tokenizer(model), pretrained.read_placeholders(model, config.images)
    parser = resolve(config.tool_parser, "coalign_serve.formats") if config.tool_parser else None
    template, problem = None, ""
    chosen = choose_template(config.model, config.chat_template, config.chat_template_kwargs)
    settings = (chosen.chat_template, chosen.chat_template_kwargs, chosen.reasoning)
    try:
        template = load_template(tokenizer, *settings, placeholders=placeholders)
    except ValueError as error:
        if chosen.chat_template != "auto":
            raise
        problem = str(error)
    return TextTools(PlainText(tokenizer, keep_special_tokens=True), template, problem, parser)


def build_completion_server(
    source: CompletionEngine, text: TextTools, config: CompletionServerConfig, name: str, key: str | None = None
) -> Server:
    """Return the server of /v1/chat/completions, /v1/completions, /v1/models and /health. It closes the source."""
    endpoint = CompletionEndpoint(source, text, config, name, key)
    handlers = {
        ("POST", "/v1/chat/completions"): endpoint.chat,
        ("POST", "/v1/completions"): endpoint.complete,
        ("GET", "/v1/models"): endpoint.list_models,
        ("GET", "/health"): endpoint.report_health,
    }
    return build_limited_server(handlers, describe_error, config, source.close)


class CompletionEndpoint:
    """Answers requests with the tokens of a source. ``name`` is that of its model, as clients must call it."""

    def __init__(
        self, source: CompletionEngine, text: TextTools, config: CompletionServerConfig, name: str, key: str | None
    ) -> None:
        self._source, self._text, self._config, self._name = source, text, config, name
        self._key = ApiKey(key)
        self._reading = asyncio.Lock()  # one at a time tokenises: the tokenizer's state is shared
        self._decoding = asyncio.Semaphore(_DECODING)
        self._started_at = int(time.time())
        self._computing = 0  # answers
        self._done = 0

    async def chat(self, request: Request) -> dict[str, Any] | EventStream:
        """Answer POST /v1/chat/completions."""
        body = await self._read(request, ChatCompletionRequest)
        template, parser = self._text.template, self._text.parser
        if template is None:
            raise HttpRefusal(400, f"{self._text.problem} (`coalign serve --chat-template`), or use /v1/completions")
        if body.offers_tools and parser is None:
            raise HttpRefusal(400, "tools: the server was started without `--tool-parser`, so it reads no tool calls")
        images = None if self._config.images is None else RequestImages(self._config.images)
        with ExitStack() as stack:
            if images is not None:
                stack.callback(images.close)
                async with self._decoding:
                    await asyncio.to_thread(body.decode_images, template, images)
            prompts = [await self._tokenize(lambda: body.tokenize(template, images))]
            parser = parser if body.offers_tools else None
            writer = ChatWriter(self._name, len(prompts[0].tokens), body.wants_logprobs, parser)
            return await self._answer(request, body, prompts, writer, stack)

    async def complete(self, request: Request) -> dict[str, Any] | EventStream:
        """Answer POST /v1/completions."""
        body = await self._read(request, CompletionRequest)
        prompts = await self._tokenize(lambda: body.tokenize(self._text.plain))
        writer = TextWriter(self._name, sum(len(prompt.tokens) for prompt in prompts), body.wants_logprobs)
        return await self._answer(request, body, prompts, writer, ExitStack())

    async def list_models(self, request: Request) -> dict[str, Any]:
        """Answer GET /v1/models."""
        self._key.check(request)
        model = {"id": self._name, "object": "model", "created": self._started_at, "owned_by": "coalign"}
        return {"object": "list", "data": [model]}

    async def report_health(self, _: Request) -> dict[str, Any]:
        """Answer GET /health: answers that are being computed or wait, and those that are done. 503 without engine."""
        if self._source.failure:
            raise HttpRefusal(503, self._source.failure)
        return {"status": "ok", "computing": self._computing, "done": self._done}

    async def _read(self, request: Request, body_type: type[Any]) -> Any:
        self._key.check(request)
        body = read_request(await read_body(request, self._config.max_bytes), body_type)
        if body.model != self._name:
            raise HttpRefusal(404, f"there is no model '{body.model}'; this server has '{self._name}'")
        return body

    async def _tokenize(self, work: Callable[[], Any]) -> Any:
        async with self._reading:
            return await asyncio.to_thread(work)  # so that other requests go on meanwhile

    async def _answer(
        self,
        request: Request,
        body: SamplingRequest,
        prompts: Sequence[TokenizedPrompt],
        writer: AnswerWriter,
        held: ExitStack,
    ) -> dict[str, Any] | EventStream:
        """``held``: what the jobs need until they end."""
        jobs = body.plan(prompts, self._config.max_new_tokens)
        self._admit(len(jobs) * body.answers)
        answers = [GrowingAnswer(self._text.tokenizer, body.stops) for _ in range(len(jobs) * body.answers)]
        events = self._compute(jobs, answers)
        if not body.stream:
            await self._collect(request, events)
            return writer.write_whole(answers)
        first = await anext(events)  # a prompt that is refused has a status of its own
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(_write_pieces(first, events, answers, writer, has_usage, held.pop_all()))

    def _admit(self, count: int) -> None:
        limit = self._config.queue
        if count > limit:
            raise HttpRefusal(413, f"{count} answers in a request, and queue={limit}; ask for fewer")
        if self._computing + count > limit:
            raise HttpRefusal(429, f"{self._computing} answers are being computed already", {"Retry-After": "1"})

    async def _collect(self, request: Request, events: AsyncGenerator[tuple[int, str], None]) -> None:
        """Wait for the ends of all answers, or cut them when the client leaves."""

        async def drain() -> None:
            async for _ in events:
                pass

        working, leaving = asyncio.ensure_future(drain()), asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise HttpRefusal(499, "the client has left")
            await working
        finally:
            for task in (working, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _compute(
        self, jobs: Sequence[GenerationJob], answers: Sequence[GrowingAnswer]
    ) -> AsyncGenerator[tuple[int, str], None]:
        """Compute jobs; yield the number of an answer and its new text whenever it has grown, or has ended.

        Raises HttpRefusal for a job that is refused or fails. What is unfinished when the generator ends is cut.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Queue[tuple[int, JobEvent]]()

        def listen(job: int) -> Callable[[JobEvent], None]:
            def hear(event: JobEvent) -> None:
                with suppress(RuntimeError):  # the event loop has ended
                    loop.call_soon_threadsafe(news.put_nowait, (job, event))

            return hear

        self._computing += len(answers)
        cuts = [self._source.submit(job, listen(number)) for number, job in enumerate(jobs)]
        missing = len(answers)
        try:
            while missing:
                number, event = await news.get()
                if isinstance(event, JobFailure):
                    raise HttpRefusal(400 if event.is_refused else 500, event.problem)
                index = number * jobs[number].samples + event.index
                if isinstance(event, ChosenToken):
                    yield index, answers[index].add(event)
                else:
                    missing -= 1
                    yield index, answers[index].end(event.status)
        finally:
            self._computing -= len(answers)
            self._done += len(answers) - missing
            if missing:
                for cut in cuts:
                    cut()


async def _write_pieces(
    first: tuple[int, str],
    events: AsyncGenerator[tuple[int, str], None],
    answers: Sequence[GrowingAnswer],
    writer: AnswerWriter,
    has_usage: bool,
    held: ExitStack,
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the records of a streamed answer. What fails on the way is the last of them."""
    try:
        for index in range(len(answers)):
            for piece in writer.begin(index):
                yield piece
        news: tuple[int, str] | None = first
        while news is not None:
            index, text = news
            answer = answers[index]
            for piece in writer.add(index, answer, text):
                yield piece
            if answer.status is not None:
                for piece in writer.end(index, answer):
                    yield piece
            news = await anext(events, None)
        if has_usage:
            yield writer.write_usage(answers)
    except HttpRefusal as error:
        yield describe_error(error.status, str(error))
    finally:
        await events.aclose()
        held.close()


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client, whose body has been read, has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
