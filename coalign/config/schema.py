"""The typed schema of a run. Every default lives here or in a recipe's ``defaults``, and nowhere else.

Unknown keys are refused (``extra="forbid"``) except where a section configures a function: there (``Function``) the
function's keyword-only arguments are the schema, checked by coalign.config.functions. Imports no torch.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    field_validator,
    model_validator,
)

from coalign.config.errors import Conflict, near
from coalign.config.places import Places

Item = TypeVar("Item")
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Several = Annotated[list[Item], BeforeValidator(lambda value: [value] if isinstance(value, str | dict) else value)]
"""A list; a single item may stand without the brackets."""


@dataclass(frozen=True)
class Input:
    """Marks a text as the path of something that must exist before a run."""

    kind: Literal["file", "directory"]


class Section(BaseModel):
    """A mapping of known keys. ``shorthand`` names the key that a plain text in place of the mapping stands for."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, use_attribute_docstrings=True
    )
    shorthand: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand and isinstance(value, str) else value


class Function(Section):
    """A function by short name or dotted path (``my.pkg:fn``); every other key is one of its keyword-only arguments."""

    model_config = ConfigDict(extra="allow")
    shorthand = "fn"

    fn: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the function."""
        return dict(self.model_extra or {})


class LossConfig(Function):
    """A loss and how its per-token values become one number."""

    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """Denominator, always global over the optimizer step: tokens; sequences of token means; sequences of token sums;
    or sequences x `constant_length` (Dr.GRPO)."""
    constant_length: PositiveInt | None = None
    """Tokens that a sequence counts for under `constant`."""

    @model_validator(mode="after")
    def _constant_has_a_length(self) -> Self:
        if self.aggregation == "constant" and self.constant_length is None:
            raise Conflict(("constant_length",), "missing: aggregation `constant` needs it (usually max_new_tokens)")
        if self.aggregation != "constant" and self.constant_length is not None:
            raise Conflict(("constant_length",), f"has no effect with aggregation `{self.aggregation}`; use `constant`")
        return self


class RewardConfig(Function):
    """One reward function."""

    name: str | None = None
    """Of its column, `reward/<name>`; None: the function's."""
    weight: float = 1.0
    """0: the function is only logged."""
    timeout: PositiveFloat = 30.0
    """Seconds one call may take before it counts as failed."""
    retries: NonNegativeInt = 2


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule (in optimizer steps)."""

    lr: NonNegativeFloat = 1e-6
    betas: Annotated[tuple[Probability, Probability], Field(strict=False)] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    """Not applied to biases and norms (parameters of one dimension)."""
    clip_grad_norm: PositiveFloat | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    min_lr_ratio: Probability = 0.0


class SamplingConfig(Section):
    """How a policy chooses tokens. Log-probs are those of the distribution that was sampled from (after temperature,
    before top-k / top-p / min-p truncation)."""

    max_new_tokens: PositiveInt = 256
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_k: NonNegativeInt = 0
    """0 keeps the whole vocabulary."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Probability = 0.0
    repetition_penalty: PositiveFloat = 1.0
    stop: list[str] = []
    """Strings that end a response; the string stays part of it."""


class EvalSamplingConfig(Section):
    """How the policy samples in evaluation; None: as in training."""

    max_new_tokens: PositiveInt | None = None
    temperature: NonNegativeFloat | None = 0.0
    top_k: NonNegativeInt | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    min_p: Probability | None = None
    repetition_penalty: PositiveFloat | None = None


class NativeConfig(Section):
    """The embedded generation engine."""

    max_sequences: PositiveInt = 256
    """Sequences decoded at once."""
    kv_tokens: PositiveInt | None = None
    """Tokens the KV cache holds over all sequences; None: as many as max_sequences of the longest need."""
    prefill_tokens: PositiveInt = 4096
    """Prompt tokens computed in one forward."""


class ModelConfig(Section):
    """One model of the run: what it is, where it comes from, how it computes, where it runs."""

    module: str = "fsdp"
    """Backend: `fsdp`, `native`, `reward`, … or a dotted path to a Module subclass."""
    like: str | None = None
    """Take every key that is not given here from this model."""
    load: Annotated[str, Input("directory")] | None = None
    """A Hugging Face model directory."""
    init: Literal["load", "random"] = "load"
    """`random` takes only config and tokenizer from the directory and draws the weights from the seed."""
    tokenizer: Annotated[str, Input("directory")] | None = None
    """A tokenizer directory, when it is not in `load`."""
    head: Literal["lm", "value", "reward"] = "lm"
    """Language-model head; a scalar per token; a scalar per sequence (at its last token)."""
    head_init: Literal["load", "zero"] = "load"
    """`load` refuses a checkpoint without the head; `zero` starts a new one."""
    frozen: bool = False
    trust_remote_code: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the stored parameters (a trainer's master weights)."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Of matrix products; None: `dtype`."""
    num_gpu: NonNegativeInt = 0
    """Devices of the whole model; 0: it runs on CPU."""
    num_process: PositiveInt | None = None
    """Processes of the whole model; None: one per GPU, one on CPU."""
    tensor_parallel: PositiveInt = 1
    threads: PositiveInt | None = None
    """CPU threads of each process; None: `runtime.threads`."""
    max_tokens_per_micro: PositiveInt | None = 16384
    """Token budget of one forward / backward: bounds activation memory."""
    gradient_checkpointing: bool = False
    share_prefix: bool = True
    """Compute the prompt of a group once for all of its samples (exact; needs attention-only mixing of tokens)."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps a batch is cut into (PPO mini-batches)."""
    epochs_per_batch: PositiveInt = 1
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig | None = None
    """This model's own loss; None: the run's."""
    sampling: SamplingConfig = SamplingConfig()
    native: NativeConfig = NativeConfig()
    vllm: dict[str, Any] = {}
    """Passed through to the engine."""

    @model_validator(mode="after")
    def _processes_divide(self) -> Self:
        processes = self.num_process or max(1, self.num_gpu)
        if processes % self.tensor_parallel:
            given = "num_process" if self.num_process else "num_gpu"
            raise Conflict(
                ("tensor_parallel",), f"is {self.tensor_parallel}, which does not divide {given} ({processes})"
            )
        return self


class SourceConfig(Section):
    """One file, directory or data set of prompts or conversations."""

    shorthand = "path"

    path: Annotated[str, Input("file")]
    """JSONL, JSON, parquet, or a directory written by `datasets.save_to_disk`."""
    weight: NonNegativeFloat = 1.0
    """Probability of drawing from this source, relative to the others'."""
    prompt_key: str | None = None
    """None: the run's `data.prompt_key`; likewise below."""
    answer_key: str | None = None
    max_samples: PositiveInt | None = None


class DataConfig(Section):
    train: Annotated[Several[SourceConfig], Field(examples=["train.jsonl"])] = []
    """A path, a list of paths, or a list of {path, weight, …}."""
    eval: Annotated[Several[SourceConfig], Field(examples=["eval.jsonl"])] = []
    """Likewise, for evaluation."""
    prompt_key: str = "prompt"
    """A string, or a list of {role, content} messages."""
    answer_key: str = "answer"
    """For SFT: the response to learn, unless the prompt's messages hold it. Rewards see the whole row."""
    messages_key: str = "messages"
    """A whole conversation; where a row has it, it is used instead of prompt and answer."""
    system: str | None = None
    """System message put before each prompt."""
    chat_template: str = "auto"
    """`auto`: the tokenizer's; `none`: prompt text as it is; or a Jinja template, or a file that holds one."""
    prompt_format: str = "{prompt}"
    """Python format string applied to a string prompt, with the row's keys, before the template."""
    max_prompt_tokens: PositiveInt = 1024
    max_tokens: PositiveInt | None = None
    """Of prompt and response together (SFT)."""
    on_empty: Literal["drop", "error"] = "drop"
    """What to do with a row without a prompt; drops are counted and reported, here and below."""
    on_missing_key: Literal["drop", "error"] = "error"
    """… with a row that lacks the prompt's or answer's key."""
    on_long: Literal["drop", "truncate_left", "error"] = "drop"
    """… with a prompt or conversation of too many tokens."""
    shuffle: bool = True

    @field_validator("prompt_format")
    @classmethod
    def _is_a_format(cls, value: str) -> str:
        try:
            list(string.Formatter().parse(value))
        except ValueError as error:
            raise ValueError(f"is no Python format string: {error}; a brace that is text is written twice") from error
        return value

    @field_validator("train", "eval")
    @classmethod
    def _something_to_draw(cls, sources: list[SourceConfig]) -> list[SourceConfig]:
        if sources and not any(source.weight for source in sources):
            raise ValueError("every source has weight 0, so there is none to draw from")
        return sources


class RuntimeConfig(Section):
    cluster: Literal["local", "ray", "auto"] = "auto"
    """`auto`: Ray when an address is given or a model needs more than one process; else this process."""
    ray_address: str | None = None
    """None: start Ray here, on demand."""
    steps: PositiveInt | None = None
    """Training steps; None: as many as `epochs` give."""
    epochs: PositiveInt = 1
    prompts_per_step: PositiveInt = 8
    """Prompts (RL) or conversations (SFT) of one step."""
    samples_per_prompt: PositiveInt = 1
    max_staleness: NonNegativeInt = 0
    """How many weight versions a batch may lag behind the trainer; 0 is synchronous."""
    colocation: list[list[str]] = []
    """Groups of models that share their devices in turn."""
    threads: PositiveInt | None = None
    """CPU threads of each process; None: all cores of its machine."""
    resume: str = "auto"
    """`auto`: the newest good checkpoint of the run folder; `never`; or a checkpoint directory."""
    save_every: NonNegativeInt = 0
    """Steps between checkpoints; 0: only at the end."""
    keep: PositiveInt = 2
    """Newest checkpoints kept (the best one besides)."""
    best: str | None = None
    """Metric (higher is better) whose best checkpoint is kept, e.g. `eval/mean`."""
    eval_every: NonNegativeInt = 0
    eval_at_start: bool = True
    eval_prompts: PositiveInt | None = None
    """None: the whole evaluation set."""
    eval_samples: PositiveInt = 1
    """n for mean@n and pass@k."""
    eval_sampling: EvalSamplingConfig = EvalSamplingConfig()
    log_samples: NonNegativeInt = 4
    """Samples written to samples.jsonl each step."""
    tensorboard: bool = True
    wandb: str | None = None
    """Project name; needs the extra [wandb]."""
    call_timeout: PositiveFloat = 3600.0
    """Seconds any one call to a model may take before the run stops with its name."""

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.eval_samples > 1 and self.eval_sampling.temperature == 0.0:
            raise Conflict(
                ("eval_samples",),
                f"is {self.eval_samples}, and runtime.eval_sampling.temperature is 0 (greedy), so a prompt's samples "
                "would all be the same; set a temperature above 0",
            )
        return self

    @model_validator(mode="after")
    def _each_model_in_one_group(self) -> Self:
        first: dict[str, int] = {}
        for index, group in enumerate(self.colocation):
            for name in group:
                if name in first:
                    where = "twice in one group" if first[name] == index else f"in groups {first[name]} and {index}"
                    raise Conflict(("colocation", index), f"'{name}' is {where}; a model belongs to one group")
                first[name] = index
        return self


class RunConfig(Section):
    """A whole run, as one YAML file."""

    algorithm: str
    """A recipe (`sft`, `grpo`, `ppo`) or a dotted path to an Engine subclass."""
    seed: NonNegativeInt = 0
    output: str = "runs/run"
    """The run folder."""
    runtime: RuntimeConfig = RuntimeConfig()
    data: DataConfig = DataConfig()
    reward: Annotated[Several[RewardConfig], Field(examples=[{"fn": "math"}])] = []
    """Reward functions, summed by weight."""
    advantage: Function | None = None
    loss: LossConfig | None = None
    kl: Function | None = None
    """Where the penalty on divergence from the reference enters, for recipes that put it into the reward."""
    models: dict[str, ModelConfig] = {}

    _places: Places = PrivateAttr(default_factory=lambda: Places({}))

    @property
    def places(self) -> Places:
        """Where each key was written; empty for a configuration that was not loaded from YAML."""
        return self._places

    @model_validator(mode="after")
    def _colocated_models_exist(self) -> Self:
        known = [*self.models, *(["reward"] if self.reward else [])]
        for index, group in enumerate(self.runtime.colocation):
            for name in group:
                if name not in known:
                    raise Conflict(("runtime", "colocation", index), f"there is no model '{name}'{near(name, known)}")
        return self

    @model_validator(mode="after")
    def _evaluation_has_data(self) -> Self:
        if self.runtime.eval_every and not self.data.eval:
            raise Conflict(("runtime", "eval_every"), f"is {self.runtime.eval_every}, and there is no data.eval")
        return self
