"""The settings that only models read which score: rewards, judges, teachers and references."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from coalign.config.schema.section import Function, OutputPath, Section

ScoreAt = Literal["last_trained", "end_of_text"]


class QuestionsConfig(Function):
    """What a language model that scores is asked about responses, and how its answers become scores."""

    home = "coalign.rewards.judge_questions"

    show_images: bool = True
    """Show it the images of prompts (`data.images`); false for a judge that reads text alone."""


class ScorerSettings(Section):
    """What only a model reads that scores."""

    chat_template: str | None = None
    """For a model that only scores: render the conversation with this template and tokenise it with the model's own
    tokenizer. `auto` (its tokenizer's template), `none`, a Jinja template or a file that holds one. None: a reward
    model takes `auto` if its tokenizer differs from the policy's, else the policy's tokens, as a teacher does."""
    chat_template_kwargs: Annotated[dict[str, Any], Field(examples=[{"enable_thinking": False}])] = {}
    """Arguments of this model's chat template, where it reads text; the policy's are in `data`."""
    score_at: ScoreAt | None = None
    """For a reward model that reads text: the token whose score counts. `last_trained`: the end of the assistant's last
    turn, as Coalign trains reward models. `end_of_text`: the last token that its template writes, as the cards of many
    models have it. None: what `score_at` in its config.json says, else `last_trained`."""
    judge: Annotated[QuestionsConfig | None, Field(examples=[{"fn": "pairwise"}])] = None
    """For a language model that scores responses (module `judge` or `preference`): a class of
    coalign.rewards.judge_questions, which asks about responses and converts answers to scores."""
    cache: Annotated[str, OutputPath()] | None = None
    """Frozen models only: a directory that keeps log-probs by content. They are computed before training, then the
    model is unloaded."""
    candidates: NonNegativeInt = 64
    """Teachers only: number of most likely tokens per position whose log-probs are returned; 0: all tokens."""
