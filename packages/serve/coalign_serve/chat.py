"""`coalign chat`: a conversation with a model in the terminal, with streamed answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.pretrained import read_placeholders
from coalign.config.schema import ImagesConfig, ModelConfig, SamplingConfig, VisionConfig
from coalign.data.batch import Batch
from coalign.data.images.placeholders import show_images
from coalign.data.messages import Message
from coalign.data.templates import load_template, locate_images
from coalign.report.display import Display
from coalign.roles import Context
from coalign_serve.judges import choose_device
from coalign_serve.run_model import choose_template, fetch_in_dtype, find_model
from coalign_serve.serving.text_stream import TextStream, decode_answer

HELP = "/reset: start over   /save FILE: append it as JSONL   /quit (or Ctrl-D): leave   Ctrl-C: stop the answer"
IMAGES = "   /image FILE (or FILE alone): show it with the next message"


@dataclass(frozen=True)
class ChatSettings:
    """The model to talk to, and how it answers."""

    model: Path
    sampling: SamplingConfig
    system: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    images: bool = False


def chat(settings: ChatSettings, lines: Iterable[str], display: Display) -> None:
    """Answer each line until they end or one is /quit.

    Raises ValueError for a directory that is no model, and for a tokenizer without a chat template.
    """
    conversation = ChatSession(settings)
    display.note(f"{settings.model}, {conversation.dtype}   {HELP}{IMAGES if settings.images else ''}")
    for line in lines:
        text = line.strip()
        if text == "/quit":
            return
        try:
            if settings.images and os.path.isfile(os.path.expanduser(text)):
                display.note(conversation.show(text))
            elif text.startswith("/"):
                display.note(run_command(conversation, text))
            elif text:
                conversation.answer(text, display.write)
                display.write("\n")
        except (ValueError, OSError) as problem:  # too long, refused by the template, no such folder: ask again
            display.note(f"error: {problem}")


def run_command(conversation: ChatSession, text: str) -> str:
    """Run a line that begins with a slash; return the reply."""
    name, _, argument = text.partition(" ")
    if name == "/reset":
        conversation.reset()
        return "(forgotten)"
    if name == "/image" and argument.strip():
        return conversation.show(argument.strip())
    if name == "/save" and argument.strip():
        path = Path(argument.strip()).expanduser()
        with open(path, "a", encoding="utf-8") as out:
            out.write(json.dumps({"messages": conversation.messages}, ensure_ascii=False) + "\n")
        return f"(saved as a line of {path})"
    return f"{text}: no such command. {HELP}"


class ChatSession:
    """The messages so far, and the model that answers."""

    def __init__(self, settings: ChatSettings) -> None:
        device = choose_device(settings.device)
        self.settings = settings
        images = ImagesConfig() if settings.images else None
        config = ModelConfig(
            module="native",
            load=find_model(str(settings.model)),
            sampling=settings.sampling,
            vision=None if images is None else VisionConfig(),
        )
        config = fetch_in_dtype(config, settings.dtype, device)
        self.dtype = config.dtype
        self._module = NativeModule(config, Context(seed=settings.seed, device=device, images=images, tokens_only=True))
        self._module.setup()
        chosen = choose_template(str(settings.model), settings.chat_template, settings.chat_template_kwargs)
        self._template = load_template(
            self._module.tokenizer,
            chosen.chat_template,
            chosen.chat_template_kwargs,
            chosen.reasoning,
            placeholders=read_placeholders(config, images),
        )
        self._turns = 0
        self.reset()

    def reset(self) -> None:
        """Remove all messages but the system message."""
        system = self.settings.system
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._shown: list[str] = []  # images of the next message

    def show(self, name: str) -> str:
        """Show an image with the next message; return a remark.

        Raises ValueError for a file that is no image, and for a model that was loaded to read text alone.
        """
        if self._template.placeholders is None:
            raise ValueError("the model was loaded to read text alone; start with `coalign chat MODEL --images`")
        files = self._template.placeholders.files
        image = files.find(files.store(os.path.expanduser(name)))
        self._shown.append(image.path)
        return f"({image.path}: {image.size[0]} x {image.size[1]} pixels, with the next message)"

    def answer(self, text: str, write: Callable[[str], Any]) -> str:
        """Answer ``text``; ``write`` gets the pieces as they come, and Ctrl-C stops the answer there.

        Raises ValueError, and leaves the conversation as it was, if it is too long or the template refuses it.
        """
        messages = [*self.messages, *show_images([{"role": "user", "content": text}], self._shown)]
        stream = TextStream(partial(decode_answer, self._module.tokenizer), write)
        prompt = self._prompt(messages)
        with suppress(KeyboardInterrupt):
            self._module.generate(prompt, samples=1, on_token=lambda group, index, token, logprob: stream.push(token))
        answer = stream.end()
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self._shown = []
        return answer

    def _prompt(self, messages: list[Message]) -> Batch:
        tokens = self._template.prompt(messages)
        self._turns += 1  # gives each turn its own random numbers
        images = [locate_images(self._template, tokens, messages)]
        columns = {"group": torch.tensor([self._turns]), "images": images}
        return Batch(torch.tensor([len(tokens)]), {"tokens": torch.tensor(tokens, dtype=torch.int32)}, columns)


def read_typed_lines(prompt: str) -> Iterator[str]:
    """Yield the lines that a person types after ``prompt``, until Ctrl-D. Ctrl-C discards the line."""
    import readline  # noqa: F401 (gives `input` its editing and its history)

    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
