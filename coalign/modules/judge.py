"""A language model that writes what it thinks of responses (2306.05685), as a model of a run that scores."""

from __future__ import annotations

from typing import Any

from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.data.texts import read_samples
from coalign.modules.examining import Examiner, JudgeReply, judging
from coalign.modules.native import NativeModule
from coalign.roles import Context


class JudgeModule(NativeModule):
    """Generates an answer to each question of ``config.judge`` about a group of responses, as ``config.sampling`` says.

    ``forward_step`` gives rewards; ``generate`` stays what it is.
    """

    @classmethod
    def columns(cls, config: ModelConfig, context: Context) -> tuple[str, ...]:
        judging(config, context.model)
        return ("reward", "status")

    def setup(self) -> None:
        """Raises what NativeModule and Examiner raise."""
        self.examiner = Examiner(self.config, self.context, reserved=self.config.sampling.max_new_tokens)
        super().setup()

    def forward_step(self, batch: Batch, *, into: str | None = None) -> dict[str, Any]:
        """See Examiner.score; ``into`` is another name for `reward`."""
        return self.examiner.score(batch, self._answers, into or "reward")

    def _answers(self, questions: Batch) -> list[JudgeReply]:
        said = read_samples(self.generate(questions, samples=1), self.examiner.tokenizer)
        texts = [sample.response for sample in said]
        return [JudgeReply(self.examiner.judging.verdict(text), text=text) for text in texts]
