"""What the embedded engine keeps of a request on its way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coalign.generation.request import Answer, Prompt


@dataclass(slots=True, eq=False)
class Queued(Prompt):
    """``started`` of its samples have been given a slot."""

    started: int = 0
    # What the prefill gave, by the weights of ``version``; kept while samples wait for a slot.
    version: int | None = None
    logits: Tensor | None = None  # f32[1, V] after the prompt
    prefix: list[Tensor] | None = None  # keys and values

    @property
    def sample(self) -> tuple[int, int]:
        """Group and index of the first."""
        return self.request.group, self.request.first

    @property
    def waiting(self) -> int:
        """Samples without a slot."""
        return self.request.samples - self.started


@dataclass(slots=True, eq=False)
class Active(Answer):
    """One sample in ``slot`` of the KV cache, being decoded or kept."""

    prompt: Queued
    slot: int = -1

    @property
    def length(self) -> int:
        """Tokens in the KV cache or about to be."""
        return len(self.prompt.request.prompt) + len(self.tokens)

    def leads_to(self, prompt: Queued) -> bool:
        """Whether ``prompt`` goes on with this sample from where it is."""
        if self.prompt.sample != prompt.sample or self.prompt.request.opening != prompt.request.opening:
            return False
        return [*self.prompt.request.prompt, *self.tokens] == prompt.request.prompt[: self.length]
