"""`coalign serve`: a model behind OpenAI's completions, chat completions and Responses, and Anthropic's Messages.

Requests that arrive while others are computed join them: see engine_loop.py. docs/serving.md shows clients.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from coalign.backends import pretrained
from coalign.data.templates import PlainText, Template, load_template
from coalign.http_server import EventStream, Request, Response, Server, read_body, respond
from coalign.http_types import Event, HttpRefusal
from coalign.report.display import Display
from coalign_serve.config.serving import CompletionServerConfig
from coalign_serve.dialects import DIALECTS, Answer, Dialect, Messages, describe_error, describe_model
from coalign_serve.dialects.answer import PROMPT_END
from coalign_serve.dialects.question import parse_body
from coalign_serve.dialects.text import TextCompletions
from coalign_serve.formats import AnswerFormat, find_format
from coalign_serve.run_model import choose_template, find_model
from coalign_serve.serving.completion_answer import GrowingAnswer
from coalign_serve.serving.completion_request import (
    CompletionRequest,
    decode_images,
    read_settings,
    tokenize,
)
from coalign_serve.serving.engine_loop import ChosenToken, CompletionEngine, GenerationJob, JobEvent, JobFailure
from coalign_serve.serving.engine_process import build_model_config, start_engine, start_replicas
from coalign_serve.serving.listener import (
    ApiKey,
    build_limited_server,
    open_guarded_listener,
    read_key,
    wait_for_disconnect,
)
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
    """What turns messages into tokens, and answers into tool calls: templates, and the format of answers."""

    plain: PlainText
    template: Template | None  # None if the tokenizer has none, and chat is refused with ``problem``
    problem: str
    format: AnswerFormat | None  # None: no answer is read as a tool call

    @property
    def tokenizer(self) -> Any:
        return self.plain.tokenizer


def load_text_tools(config: CompletionServerConfig) -> TextTools:
    """Load tokenizer, template and format. Raises ValueError for a template or a format that cannot be used."""
    model = build_model_config(config)
    tokenizer, placeholders = pretrained.read_tokenizer(model), pretrained.read_placeholders(model, config.images)
    answer_format = find_format(config.tool_parser, tokenizer) if config.tool_parser else None
    template, problem = None, ""
    chosen = choose_template(config.model, config.chat_template, config.chat_template_kwargs)
    settings = (chosen.chat_template, chosen.chat_template_kwargs, chosen.reasoning)
    try:
        template = load_template(tokenizer, *settings, placeholders=placeholders)
    except ValueError as error:
        if chosen.chat_template != "auto":
            raise
        problem = str(error)
    return TextTools(PlainText(tokenizer, keep_special_tokens=True), template, problem, answer_format)


def build_completion_server(
    source: CompletionEngine, text: TextTools, config: CompletionServerConfig, name: str, key: str | None = None
) -> Server:
    """Return the server of all dialects, /v1/completions, /v1/models and /health. It closes the source."""
    endpoint = CompletionEndpoint(source, text, config, name, key)
    handlers = {("POST", f"/v1{dialect.path}"): partial(endpoint.chat, dialect) for dialect in DIALECTS}
    handlers |= {
        ("POST", f"/v1{Messages.path}/count_tokens"): endpoint.count_tokens,
        ("POST", f"/v1{TextCompletions.path}"): endpoint.complete,
        ("GET", "/v1/models"): endpoint.list_models,
        ("GET", "/v1/models/{name:path}"): endpoint.describe_model,
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

    async def chat(self, dialect: type[Dialect], request: Request) -> Response | EventStream:
        """Answer a question in messages."""
        question = dialect.read(await self._read(request))
        self._check_model(question.model)
        settings, ignored = read_settings(question)
        if question.offers_tools and self._text.format is None:
            raise HttpRefusal(400, "tools: the server was started without `--tool-parser`, so it reads no tool calls")
        images = None if self._config.images is None else RequestImages(self._config.images)
        with ExitStack() as stack:
            if images is not None:
                stack.callback(images.close)
                async with self._decoding:
                    await asyncio.to_thread(decode_images, question.messages, self._template, images)
            prompts = [await self._tokenize(lambda: tokenize(question, self._template, images))]
            jobs = settings.plan(prompts, question, self._config.max_new_tokens)
            reply = dialect(question, secrets.token_hex(12))
            reads = self._text.format if question.offers_tools else None
            return await self._answer(request, jobs, reply, reads, stack, ignored)

    async def complete(self, request: Request) -> Response | EventStream:
        """Answer POST /v1/completions."""
        body = parse_body(await self._read(request), CompletionRequest)
        self._check_model(body.model)
        prompts, question = await self._tokenize(lambda: body.tokenize(self._text.plain)), body.question
        jobs = body.plan(prompts, question, self._config.max_new_tokens)
        reply = TextCompletions(question, secrets.token_hex(12))
        return await self._answer(request, jobs, reply, None, ExitStack(), [])

    async def count_tokens(self, request: Request) -> dict[str, Any]:
        """Answer POST /v1/messages/count_tokens."""
        question = Messages.read(await self._read(request))
        prompt = await self._tokenize(lambda: tokenize(question, self._template))
        return {"input_tokens": len(prompt.tokens)}

    async def list_models(self, request: Request) -> dict[str, Any]:
        """Answer GET /v1/models."""
        self._key.check(request)
        return {"object": "list", "data": [self._describe()], "has_more": False}

    async def describe_model(self, request: Request) -> dict[str, Any]:
        """Answer GET /v1/models/NAME."""
        self._key.check(request)
        self._check_model(request.path_params["name"])
        return self._describe()

    async def report_health(self, _: Request) -> dict[str, Any]:
        """Answer GET /health: answers that are being computed or wait, and those that are done. 503 without engine."""
        if self._source.failure:
            raise HttpRefusal(503, self._source.failure)
        return {"status": "ok", "computing": self._computing, "done": self._done}

    @property
    def _template(self) -> Template:
        if self._text.template is None:
            raise HttpRefusal(400, f"{self._text.problem} (`coalign serve --chat-template`), or use /v1/completions")
        return self._text.template

    def _describe(self) -> dict[str, Any]:
        return describe_model(self._name, self._started_at)

    async def _read(self, request: Request) -> bytes:
        self._key.check(request)
        return await read_body(request, self._config.max_bytes)

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise HttpRefusal(404, f"there is no model '{name}'; this server has '{self._name}'")

    async def _tokenize(self, work: Callable[[], Any]) -> Any:
        async with self._reading:
            return await asyncio.to_thread(work)  # so that other requests go on meanwhile

    async def _answer(
        self,
        request: Request,
        jobs: Sequence[GenerationJob],
        reply: Dialect,
        reads: AnswerFormat | None,
        held: ExitStack,
        ignored: Sequence[str],
    ) -> Response | EventStream:
        """``reads``: the format of tool calls, if they are offered. ``held``: what the jobs need until they end.
        ``ignored``: wishes that are not granted."""
        self._admit(sum(job.samples for job in jobs))
        reply.prompt_tokens = sum(len(job.prompt) for job in jobs)
        tokenizer, question = self._text.tokenizer, reply.question
        answers = [GrowingAnswer(tokenizer, job.stop) for job in jobs for _ in range(job.samples)]
        prompt_end = str(tokenizer.decode(jobs[0].prompt[-PROMPT_END:])) if reads is not None else ""

        def finish(index: int) -> Answer:
            return answers[index].read(question, reads, prompt_end, f"{reply.identity}/{index}")

        events, headers = self._compute(jobs, answers), {"x-coalign-ignored": ", ".join(ignored)} if ignored else {}
        if not question.stream:
            await self._collect(request, events)
            return respond(reply.write([finish(index) for index in range(len(answers))]), headers=headers)
        first = await anext(events)  # a prompt that is refused has a status of its own
        pieces = _write_events(first, events, answers, reply, finish, reads is not None, held.pop_all())
        return EventStream(pieces, headers)

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

        working, leaving = asyncio.ensure_future(drain()), asyncio.ensure_future(wait_for_disconnect(request))
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


async def _write_events(
    first: tuple[int, str],
    events: AsyncGenerator[tuple[int, str], None],
    answers: Sequence[GrowingAnswer],
    reply: Dialect,
    finish: Callable[[int], Answer],
    is_whole: bool,
    held: ExitStack,
) -> AsyncGenerator[Event, None]:
    """Yield the events of a streamed answer. What fails on the way is the last of them.

    ``is_whole``: an answer that may hold tool calls is sent in one piece, since only its end tells what it is.
    """
    done: dict[int, Answer] = {}
    try:
        for event in reply.begin():
            yield event
        news: tuple[int, str] | None = first
        while news is not None:
            index, text = news
            answer = answers[index]
            if not is_whole and (text or answer.status is not None):
                logprobs = answer.take_logprobs() if reply.question.wants_logprobs else []
                if text or logprobs:
                    for event in reply.add(index, text, logprobs):
                        yield event
            if answer.status is not None:
                done[index] = finish(index)
                for event in reply.end(index, done[index]):
                    yield event
            news = await anext(events, None)
        for event in reply.close([done[index] for index in range(len(answers))]):
            yield event
    except HttpRefusal as error:
        yield reply.fail(error.status, str(error))
    finally:
        await events.aclose()
        held.close()
