"""How long a run is, what a step holds, when it evaluates and saves.

What a run tells of itself besides metrics.

How weights travel from the models that learn to those that generate.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from coalign.config.errors import Conflict
from coalign.config.schema.base import Probability, ResultNeutral, Section
from coalign.config.schema.rollout import GuardsConfig


class ProfileConfig(Section):
    """Traces of some steps, by every process of some models, in `profile/step_N/` of the run folder."""

    steps: list[PositiveInt]
    """Those to trace, counted from 1. A trace of one step may have a hundred MB."""
    models: list[str] = []
    """None: all of them."""
    tool: Literal["torch", "nsys"] = "torch"
    """`torch`: a file for Perfetto from each process. `nsys`: NVTX ranges, between cudaProfilerStart and -Stop, for
    runs under `nsys profile --capture-range=cudaProfilerApi`."""
    memory: bool = False
    """Also every allocation."""
    stacks: bool = False
    """Also the Python line that each operation comes from (slow)."""
    shapes: bool = False
    """Also the shapes of what operations get."""


class SyncConfig(Section):
    """How weights travel from a model that learns to those that compute with them."""

    shorthand = "transport"

    transport: ResultNeutral[Literal["auto", "shared_memory", "cuda_ipc", "broadcast", "object_store", "disk"]] = "auto"
    """`auto` takes what the placement allows: the live tensors within one process, the GPUs' own memory (`cuda_ipc`) or
    the host's (`shared_memory`) on one host, groups of torch.distributed between hosts (`broadcast`), Ray's object
    store where the two models take turns on their devices. `disk`: files in `directory`."""
    adapters: Literal["merged", "apart"] = "merged"
    """Of a trainer with `lora`: `merged` into the weights; `apart`: after the first sync the adapters alone travel, and
    the policy's engine (`vllm`) adds what they compute to what its weights do."""
    verify: ResultNeutral[Literal["all", "rotating"]] = "rotating"
    """What is looked at, on both sides, of every tensor in memory that processes of one host share: `all` bytes, or,
    after the first time, another eighth of it each time. What leaves such memory is always verified whole."""
    every: PositiveInt = 1
    """Training steps from one sync to the next; more than one needs `runtime.max_staleness` of `every` - 1 at least."""
    timeout: ResultNeutral[PositiveFloat] = 600.0
    """Seconds without any progress after which a sync fails, with the rank and the tensor that it waited for."""
    bucket_mib: ResultNeutral[PositiveInt] = 64
    """MiB that travel at once by `broadcast`, `object_store` and `disk` (a larger tensor travels on its own)."""
    directory: ResultNeutral[str | None] = None
    """Of `disk`: a directory that all hosts see; None: `sync` in the run folder."""


class EvalSamplingConfig(Section):
    """How the policy samples in evaluation; None: as in training."""

    max_new_tokens: PositiveInt | None = None
    temperature: NonNegativeFloat | None = 0.0
    top_k: NonNegativeInt | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    min_p: Probability | None = None
    repetition_penalty: PositiveFloat | None = None


class EarlyStopConfig(Section):
    """Ends the run when evaluation no longer improves."""

    shorthand = "metric"

    metric: str
    """For example `eval/loss/value`."""
    mode: Literal["min", "max"] = "min"
    patience: PositiveInt = 3
    """Evaluations in a row without improvement."""
    min_delta: NonNegativeFloat = 0.0
    """Changes up to this much are no improvement."""


class RuntimeConfig(Section):
    cluster: ResultNeutral[Literal["local", "ray", "auto"]] = "auto"
    """`auto`: Ray when an address is given or a model needs more than one process; else this process."""
    ray_address: ResultNeutral[str | None] = None
    """None: start Ray here, on demand."""
    accelerator: str = "GPU"
    """Ray's name of the resource that `num_gpu` counts: `GPU`, `NPU`, `HPU`, … Any other name stands for devices on a
    machine that has none: models take turns on them, and compute on the CPU."""
    wait_for_devices: ResultNeutral[NonNegativeFloat] = 0.0
    """Seconds to wait for devices that other jobs hold or that nodes still bring, before the run is refused."""
    steps: PositiveInt | None = None
    """Training steps; None: as many as `epochs` give."""
    epochs: PositiveInt = 1
    tokens: PositiveInt | None = None
    """Tokens to train on before the run ends (if `steps` or `epochs` do not end it first)."""
    prompts_per_step: PositiveInt = 8
    """Rows of one step: prompts (RL), conversations (SFT), comparisons (DPO, reward models)."""
    tokens_per_step: PositiveInt | None = None
    """Tokens of one step instead: rows are drawn until they hold this many. What the last one is over counts for the
    next step, so this is the mean."""
    samples_per_prompt: PositiveInt = 1
    max_staleness: NonNegativeInt = 0
    """How many weight versions a batch may lag behind the trainer; 0 is synchronous."""
    colocation: list[list[str]] = []
    """Groups of models that share their devices in turn."""
    device_memory: ResultNeutral[PositiveFloat | None] = None
    """GiB of a device that its models may use. Then they leave it (`offload`) only if there is no room for all, and
    what is called next comes early; None: they take turns. A CPU that stands for a device counts weights, gradients,
    optimizer and KV cache, and refuses more."""
    threads: ResultNeutral[PositiveInt | None] = None
    """CPU threads of each process; None: all cores of its machine."""
    resume: ResultNeutral[str] = "auto"
    """`auto`: the newest good checkpoint of the run folder; `never`: the run starts at step 0, and moves the
    checkpoints and metrics of an earlier run aside; or a checkpoint directory."""
    save_every: ResultNeutral[NonNegativeInt] = 0
    """Steps between checkpoints; 0: only at the end."""
    keep: ResultNeutral[PositiveInt] = 2
    """Newest checkpoints kept (the best one besides)."""
    best: str | None = None
    """Metric whose best checkpoint is kept, e.g. `eval/mean`."""
    best_mode: Literal["max", "min"] = "max"
    early_stop: EarlyStopConfig | None = None
    guards: GuardsConfig = GuardsConfig()
    eval_every: NonNegativeInt = 0
    eval_at_start: bool = True
    eval_prompts: PositiveInt | None = None
    """None: the whole evaluation set."""
    eval_samples: PositiveInt = 1
    """n for mean@n and pass@k."""
    eval_sampling: EvalSamplingConfig = EvalSamplingConfig()
    log_samples: ResultNeutral[NonNegativeInt] = 4
    """Samples written to samples.jsonl each step."""
    plots: ResultNeutral[bool] = True
    """Draw the metrics as plots/*.png when the run ends."""
    tensorboard: ResultNeutral[bool] = True
    wandb: ResultNeutral[str | None] = None
    """Project name; needs the extra [wandb]."""
    call_timeout: ResultNeutral[PositiveFloat] = 3600.0
    """Seconds any one call to a model may take before the run stops with its name."""
    stall: ResultNeutral[PositiveFloat | None] = 900.0
    """Seconds after which a call is reported, with the Python stacks of every process in `stalls/`; None: never."""
    timeline_every: ResultNeutral[NonNegativeInt] = 0
    """Steps between timelines (`timeline/step_N.json`: who computed what, when, and who waited); 0: none."""
    profile: ResultNeutral[Annotated[ProfileConfig | None, Field(examples=[{"steps": [3]}])]] = None

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
    def _stopping_early_needs_evaluations(self) -> Self:
        if self.early_stop and not self.eval_every:
            raise Conflict(("early_stop",), "watches evaluations, and there are none: set runtime.eval_every")
        return self

    @model_validator(mode="after")
    def _rolling_back_needs_checkpoints(self) -> Self:
        if self.guards.action == "rollback" and not self.save_every:
            raise Conflict(("guards", "action"), "is `rollback`, to the last checkpoint: set runtime.save_every")
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
