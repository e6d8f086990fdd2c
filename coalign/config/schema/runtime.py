"""Length of a run, size of a step, evaluation, checkpoints, logging, profiling, and synchronisation of weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from coalign.config.errors import Conflict
from coalign.config.schema.rollout import GuardsConfig
from coalign.config.schema.section import Continuable, OneOrMore, OutputPath, Probability, ResultNeutral, Section


class ProfileConfig(Section):
    """Traces some steps in all processes of some models, to `profile/step_N/` of the run folder."""

    steps: list[PositiveInt]
    """Steps to trace, counted from 1. A trace of one step may take a hundred MB."""
    models: list[str] = []
    """Models to trace; empty: all."""
    tool: Literal["torch", "nsys"] = "torch"
    """`torch`: a Perfetto file per process. `nsys`: NVTX ranges between cudaProfilerStart and cudaProfilerStop, for
    runs under `nsys profile --capture-range=cudaProfilerApi`."""
    memory: bool = False
    """Also record memory allocations."""
    stacks: bool = False
    """Also record the Python line of each operation (slow)."""
    shapes: bool = False
    """Also record the shapes of inputs."""


class SyncConfig(Section):
    """How weights are copied from trained models to those that use them."""

    shorthand = "transport"

    transport: ResultNeutral[Literal["auto", "shared_memory", "cuda_ipc", "broadcast", "object_store", "disk"]] = "auto"
    """`auto` chooses by placement: the live tensors within one process; GPU memory (`cuda_ipc`) or host memory
    (`shared_memory`) on one host; torch.distributed groups between hosts (`broadcast`); Ray's object store if the two
    models share their devices in turn. `disk`: files in `directory`."""
    adapters: Literal["merged", "apart"] = "merged"
    """For a trainer with `lora`. `merged`: weights are sent with the adapters merged in. `apart`: after the first sync
    only the adapters are sent, and the policy's generator (`vllm`) applies them beside its weights."""
    verify: ResultNeutral[Literal["all", "rotating"]] = "rotating"
    """Checksums of tensors in memory that processes of one host share: over `all` bytes or, after the first sync, over
    another eighth each time. Tensors sent by other ways are always verified completely."""
    every: PositiveInt = 1
    """Training steps between syncs; more than 1 requires `runtime.max_staleness` of at least `every` - 1."""
    timeout: ResultNeutral[PositiveFloat] = 600.0
    """Seconds without progress before a sync fails; the error names the awaited rank and tensor."""
    bucket_mib: ResultNeutral[PositiveInt] = 64
    """MiB sent at once by `broadcast`, `object_store` and `disk`; a larger tensor is sent on its own."""
    directory: ResultNeutral[Annotated[str, OutputPath()] | None] = None
    """For `disk`: a directory that all hosts can access; None: `sync` in the run folder."""


class EvalSamplingConfig(Section):
    """How the policy samples during evaluation; None: as in training."""

    max_new_tokens: PositiveInt | None = None
    temperature: NonNegativeFloat | None = 0.0
    top_k: NonNegativeInt | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    min_p: Probability | None = None
    repetition_penalty: PositiveFloat | None = None


class EarlyStopConfig(Section):
    """Ends the run when an evaluation metric no longer improves."""

    shorthand = "metric"

    metric: str
    """For example `eval/loss/value`."""
    mode: Literal["min", "max"] = "min"
    patience: PositiveInt = 3
    """Consecutive evaluations without improvement."""
    min_delta: NonNegativeFloat = 0.0
    """Smaller changes do not count as improvement."""


class TrackerConfig(Section):
    """An experiment tracker. Its keys and passwords are read from the environment, as its client's manual says."""

    shorthand = "name"

    name: Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]
    """Needs the extra of that name: `pip install 'coalign[mlflow]'`."""
    project: str = "coalign"
    """Project of the run, for `mlflow` the experiment; not for `tensorboard`, whose files are in the run folder."""
    run: str | None = None
    """Name of the run; None: that of the run folder."""
    url: str | None = None
    """The server, for `trackio` a server or a Space; None: what the client takes by default."""
    offline: bool = False
    """Send nothing: `wandb`, `mlflow` and `swanlab` write into the run folder, `trackio` into its own."""

    def check(self) -> None:
        if self.offline and self.url:
            raise Conflict(("url",), f"is {self.url!r}, and `offline` sends nothing; leave one of them out")


class AutoscaleConfig(Section):
    """When a model that samples or scores gets one more process, or one fewer; decided after each step."""

    min: PositiveInt = 1
    """Minimum number of processes."""
    max: PositiveInt
    """Maximum number of processes."""
    waiting: Probability = 0.2
    """Share of a step. A process is added if the trainer waits for samples in this share or more, and..."""
    busy: Probability = 0.8
    """...the processes compute in this share of the step or more."""
    free: Probability = 0.5
    """Share of a step. A process is removed if the remaining ones would compute in this share or less."""
    steps: PositiveInt = 3
    """Consecutive steps since the last change that must agree before the number changes."""

    def check(self) -> None:
        if self.min > self.max:
            raise Conflict(("max",), f"is {self.max}, and min is {self.min}")
        if self.free >= self.busy:
            message = f"is {self.free}, and busy is {self.busy}: a process would come and go; set it lower"
            raise Conflict(("free",), message)


class RuntimeConfig(Section):
    cluster: ResultNeutral[Literal["local", "ray", "torchrun", "auto"]] = "auto"
    """`auto`: the processes of torchrun, if it started this one; Ray if an address is given or a model needs several
    processes; otherwise this process."""
    ray_address: ResultNeutral[str | None] = None
    """Address of a Ray cluster; None: start Ray locally if needed."""
    accelerator: Continuable[str] = "GPU"
    """Ray's name of the resource that `num_gpu` counts: `GPU`, `NPU`, `HPU`. Any other name simulates devices on a
    machine without any: models take turns on them and compute on the CPU."""
    wait_for_devices: ResultNeutral[NonNegativeFloat] = 0.0
    """Seconds to wait for devices that are in use or on nodes that are starting, before the run is refused."""
    steps: Continuable[PositiveInt | None] = None
    """Training steps; None: as many as `epochs` give."""
    epochs: Continuable[PositiveInt] = 1
    tokens: Continuable[PositiveInt | None] = None
    """Tokens after which training ends, unless `steps` or `epochs` end it first."""
    prompts_per_step: PositiveInt = 8
    """Rows of one step: prompts (RL), conversations (SFT), comparisons (DPO, reward models)."""
    tokens_per_step: PositiveInt | None = None
    """Tokens of one step, in place of rows: rows are drawn until they hold this many. The excess of the last row counts
    for the next step, so this is the mean."""
    samples_per_prompt: PositiveInt = 1
    max_staleness: NonNegativeInt = 0
    """Weight versions that a batch may lag behind the trainer; 0 is synchronous."""
    colocation: Continuable[list[list[str]]] = []
    """Groups of models that share their devices in turn."""
    device_memory: ResultNeutral[PositiveFloat | None] = None
    """GiB of a device that colocated models may use together. They are offloaded only if not all fit, and the next one
    is loaded ahead of its call. None: they take turns. A simulated device counts weights, gradients, optimizer and KV
    cache, and refuses more."""
    threads: ResultNeutral[PositiveInt | None] = None
    """CPU threads of each process; None: all cores of its machine."""
    resume: ResultNeutral[Annotated[str, OutputPath()]] = "auto"
    """`auto`: the newest good checkpoint of the run folder or of `save_copies_to`; `never`: start at step 0 and move
    the checkpoints and metrics of an earlier run aside; or a checkpoint, as a directory or as a URL (it is downloaded
    first), such as `s3://bucket/run/step_100`."""
    allow_changed: ResultNeutral[OneOrMore[Literal["settings", "models", "data"]]] = []
    """Changes since the checkpoint was made that are allowed; others are refused. `settings`: those that results depend
    on; without it a run goes on with other devices, evaluation and length (`steps`, `epochs`, `tokens`) only. `models`:
    contents of `load`, `lora.load` and `tokenizer`. `data`: of the training data."""
    save_every: ResultNeutral[NonNegativeInt] = 0
    """Steps between checkpoints; 0: by `save_minutes` alone. The end of a run, a signal and an error save, too."""
    save_minutes: ResultNeutral[NonNegativeFloat] = 10.0
    """Minutes between checkpoints; 0: by `save_every` alone."""
    save_in_memory_every: ResultNeutral[NonNegativeInt] = 0
    """Steps between checkpoints in the memory (/dev/shm) of the machines that train, 0: none. With 1 a run that loses a
    trainer, its driver or, on several nodes of Ray, a node repeats at most one step. They take up to three times the
    memory of a machine's share of the training state; on several nodes twice as much, as each holds another's share."""
    keep: ResultNeutral[PositiveInt] = 2
    """Number of newest checkpoints to keep, besides the best one."""
    save_copies_to: ResultNeutral[Annotated[str, OutputPath()] | None] = None
    """URL to which each checkpoint is copied while training goes on: `s3://bucket/my_run`, `gs://…`, any of fsspec. No
    other run may use it. Its package (`pip install s3fs`) reads credentials from the environment. None: no copy."""
    best: Continuable[str | None] = None
    """Metric whose best checkpoint is kept, e.g. `eval/mean`."""
    best_mode: Continuable[Literal["max", "min"]] = "max"
    early_stop: Continuable[EarlyStopConfig | None] = None
    guards: Continuable[GuardsConfig] = GuardsConfig()
    eval_every: Continuable[NonNegativeInt] = 0
    eval_at_start: Continuable[bool] = True
    eval_prompts: Continuable[PositiveInt | None] = None
    """Prompts that are evaluated, from each evaluation source; None: all."""
    eval_samples: Continuable[PositiveInt] = 1
    """Samples of each prompt in an evaluation: n for mean@n and pass@k."""
    eval_sampling: Continuable[EvalSamplingConfig] = EvalSamplingConfig()
    log_every: ResultNeutral[PositiveInt] = 1
    """Steps between two lines on the screen and in log.txt; metrics.jsonl has every step."""
    log_samples: ResultNeutral[NonNegativeInt] = 4
    """Samples per step to write to samples.jsonl: the first of a step, and some spread over the evaluation set."""
    keep_rollouts: ResultNeutral[NonNegativeInt] = 200
    """Newest steps whose samples in samples.jsonl keep their tokens, with log-probs and advantages, in `rollouts/`: at
    most 1 GiB. 0: none. Runs without rollouts write none."""
    journal: ResultNeutral[bool] = False
    """Write what became of each group of samples into journal.jsonl, for `coalign explain`, and finished rollouts
    beside it, which a run that goes on does not generate again; 3 ms of CPU a step, 8 bytes a token."""
    plots: ResultNeutral[bool] = True
    """Draw the metrics as plots/*.png when the run ends."""
    trackers: ResultNeutral[Annotated[OneOrMore[TrackerConfig], Field(examples=[["tensorboard"]])]] = []
    """Trackers that get metrics and samples besides the run folder: names, or {name, project, …}."""
    preemption_notice: ResultNeutral[PositiveFloat | None] = None
    """Seconds between SIGTERM and the end of a machine that can be taken away (a spot node). A step that waits for its
    samples is then given up, and the last one saved; one that trains ends first. None: every step ends first."""
    restarts: ResultNeutral[NonNegativeInt] = 10
    """How many lost processes are started again in a run (on Ray); the next one ends it."""
    autoscale: ResultNeutral[Annotated[dict[str, AutoscaleConfig], Field(examples=[{"policy": {"max": 4}}])]] = {}
    """Models that sample or score, and how many processes each may have on Ray (docs/faults.md). Empty: as many as
    `num_process` and `num_gpu` say, or `coalign scale`."""
    call_timeout: ResultNeutral[PositiveFloat | None] = None
    """Seconds that a call of a model may take before the run stops; the error names the call. Loading may take an hour.
    None: an hour, or ten times the longest call of the same method so far."""
    stall: ResultNeutral[PositiveFloat | None] = 900.0
    """Seconds after which a call is reported, with the Python stacks of all processes in `stalls/`; None: never."""
    timeline_every: ResultNeutral[NonNegativeInt] = 0
    """Steps between timelines of calls and waits (`timeline/step_N.json`); 0: none."""
    profile: ResultNeutral[Annotated[ProfileConfig | None, Field(examples=[{"steps": [3]}])]] = None

    @model_validator(mode="before")
    @classmethod
    def _name_new_keys(cls, value: Any) -> Any:
        for key in ("tensorboard", "wandb"):
            if isinstance(value, dict) and key in value:
                raise Conflict((key,), f"unknown key; trackers are listed in `runtime.trackers`, e.g. `[{key}]`")
        return value

    def check(self) -> None:
        names = [tracker.name for tracker in self.trackers]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise Conflict(("trackers", index), f"'{name}' is listed twice")
        if self.eval_samples > 1 and self.eval_sampling.temperature == 0.0:
            raise Conflict(
                ("eval_samples",),
                f"is {self.eval_samples}, and runtime.eval_sampling.temperature is 0 (greedy), so a prompt's samples "
                "would all be the same; set a temperature above 0",
            )
        if self.early_stop and not self.eval_every:
            raise Conflict(("early_stop",), "watches evaluations, and there are none: set runtime.eval_every")
        if self.guards.action == "rollback" and not self.save_every:
            raise Conflict(("guards", "action"), "is `rollback`, to the last checkpoint: set runtime.save_every")
        first: dict[str, int] = {}
        for index, group in enumerate(self.colocation):
            for name in group:
                if name in first:
                    groups = "twice in one group" if first[name] == index else f"in groups {first[name]} and {index}"
                    raise Conflict(("colocation", index), f"'{name}' is {groups}; a model belongs to one group")
                first[name] = index
