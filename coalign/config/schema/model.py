"""One model of a run: what every model reads, and what only models read that learn, sample or score."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from coalign.config.errors import Conflict
from coalign.config.functions import is_code_refused
from coalign.config.schema.generator import GeneratorSettings, NativeConfig, SamplingConfig, TransformersConfig
from coalign.config.schema.section import (
    Continuable,
    Function,
    InputPath,
    OneOrMore,
    OutputPath,
    Probability,
    ResultNeutral,
    Section,
)
from coalign.config.schema.trainer import TrainerSettings

# Settings of parallelism; each backend supports some of them.
PARALLEL = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "dp_replicate")

# Modules of Megatron's layers that backward can recompute.
Recomputed = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class LoraConfig(Section):
    """Low-rank adapters (2106.09685) on frozen weights. The head of a reward or value model is trained in full."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The product is scaled by alpha / rank."""
    dropout: Probability = 0.0
    target: OneOrMore[str] = ["all-linear"]
    """Last names of linear layers (`q_proj`), patterns of full names (`model.layers.1?.*`), and of stacked experts
    (`*.experts.gate_up_proj`, `*.experts.*`); `all-linear`: all linear layers but the head, and no experts."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (2312.03732)."""
    dora: bool = False
    """Train magnitude and direction separately (2402.09353)."""
    base_bits: Literal[4] | None = None
    """QLoRA (2305.14314): keep the frozen weights in 4-bit NF4 (needs bitsandbytes)."""
    load: Annotated[str, InputPath("model")] | None = None
    """A trained adapter (adapter_config.json) to continue: a directory, or a name of the hub."""

    @field_validator("target")
    @classmethod
    def _refuse_joined(cls, target: list[str]) -> list[str]:
        if joined := next((name for name in target if "," in name), None):
            names = ", ".join(name.strip() for name in joined.split(","))
            raise ValueError(f"is '{joined}'; several layers are a list: [{names}]")
        return target


def matches_layer(name: str, pattern: str) -> bool:
    """Whether ``pattern`` (of `LoraConfig.target`) is the last name of the layer ``name``, or matches its full name."""
    return fnmatchcase(name, pattern) or name.endswith(f".{pattern}")


class VisionConfig(Section):
    """The components of a vision-language model that learn, in a run that reads images (`data.images`)."""

    tower: Literal["train", "freeze"] = "train"
    projector: Literal["train", "freeze"] = "train"
    """The layers that map the tower's features to embeddings."""
    language: Literal["train", "freeze"] = "train"
    tower_lr_scale: NonNegativeFloat = 1.0
    """Learning rate of the tower, as a multiple of `optimizer.lr`; likewise of the projector."""
    projector_lr_scale: NonNegativeFloat = 1.0
    cache_mib: PositiveInt = 512
    """Host memory of each process for the pixels that it used last."""

    def check(self) -> None:
        if self.tower == self.projector == self.language == "freeze":
            raise Conflict(("language",), "is `freeze`, like all other parts: nothing would learn")


class DeepSpeedConfig(Section):
    """ZeRO, for the module `deepspeed`."""

    stage: Literal[1, 2, 3] = 2
    """What is sharded over processes: the optimizer's state (1), gradients too (2), weights too (3)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory and step on the CPU."""
    offload_parameters: bool = False
    """For stage 3: keep the shards of the weights in host memory."""
    zero: dict[str, Any] = {}
    """Further keys of DeepSpeed's section `zero_optimization` (bucket sizes, thresholds), by its names."""

    def check(self) -> None:
        if self.offload_parameters and self.stage != 3:
            raise Conflict(("offload_parameters",), f"needs `stage: 3`; at stage {self.stage} there are no shards")


class MegatronCoreConfig(Section):
    """megatron-core, for the module `megatron`. Parallelism is set in the model: `tensor_parallel` and so on."""

    transformer_engine: bool | None = None
    """Use layers of Transformer Engine; None: on GPUs, if it is installed."""
    virtual_pipeline: PositiveInt = 1
    """Chunks of layers per stage of `pipeline_parallel` (interleaved 1F1B)."""
    first_stage_layers: PositiveInt | None = None
    """Layers of the first stage, if they differ from the others; likewise `last_stage_layers`."""
    last_stage_layers: PositiveInt | None = None
    expert_tensor_parallel: PositiveInt | None = None
    """Processes that share each expert; None: `tensor_parallel`."""
    sequence_parallel: bool = True
    """Split the activations between tensor-parallel layers along the sequence (2205.05198)."""
    distributed_optimizer: bool = True
    """Shard the optimizer's state over data-parallel processes (ZeRO-1)."""
    recompute_num_layers: PositiveInt = 1
    """For `activation_checkpointing: full`: keep the activations of every n-th layer."""
    recompute_modules: list[Recomputed] = ["core_attn"]
    """For `activation_checkpointing: selective`: what is recomputed."""
    swiglu: bool | None = None
    """Required property of the model, in terms of Megatron's arguments; None: any. A run with another model is refused.
    Likewise the four below."""
    position_embedding_type: Literal["rope", "learned_absolute", "alibi"] | None = None
    untie_embeddings_and_output_weights: bool | None = None
    add_bias_linear: bool | None = None
    normalization: Literal["RMSNorm", "LayerNorm"] | None = None
    config: dict[str, Any] = {}
    """Further fields of megatron-core's TransformerConfig that decide how it computes."""


# Settings that belong to the weights in `load`: a model with other weights does not take them by `like`.
KEYS_OF_WEIGHTS = (
    *("tokenizer", "init", "head_init", "pickled_weights", "trust_remote_code"),
    *("chat_template", "chat_template_kwargs", "score_at"),
)


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


class BatchSettings(Section):
    """What only a model reads that computes given sequences: one that learns, or that scores."""

    context_parallel: Continuable[PositiveInt] = 1
    """Processes, or tensor-parallel groups, that split each sequence (Ulysses)."""
    expert_parallel: Continuable[PositiveInt] = 1
    """Neighbouring processes that divide the experts of each layer; tokens are sent to them."""
    dp_replicate: Continuable[PositiveInt] = 1
    """Copies of the sharded model (HSDP). Weights are gathered within a copy; gradients are summed over
    all copies."""
    max_tokens_per_micro: Continuable[PositiveInt | None] = 16384
    """Token limit of one forward / backward pass, which bounds activation memory."""
    max_patches_per_micro: Continuable[PositiveInt | None] = 16384
    """Patches of images in one forward / backward pass, which bound the memory of the tower."""
    rows: Literal["auto", "packed", "padded", "single"] = "auto"
    """How the sequences of a micro-batch are computed: end to end in one row; below each other, padded on the right; or
    those of equal length together. `packed` is the fastest and needs layers that mix tokens by attention alone; `auto`
    takes it where the architecture can, else `padded`. For the modules `fsdp` and `deepspeed`."""
    attention: Continuable[Literal["auto", "blocks", "flex", "varlen"]] = "auto"
    """How attention over a packed row is computed, by the modules `fsdp` and `deepspeed`. `varlen`: flash attention
    (CUDA, 16-bit floats). `flex`: flex attention, compiled (CUDA). `blocks`: scaled_dot_product_attention, a call for
    each block of spans. `auto`: on CUDA `varlen` where it can, else `flex`; on other devices `blocks`."""
    compile: bool = False
    """Compile the layers with torch.compile, once for all lengths (needs a C++ compiler; on GPUs Triton)."""
    fp8: bool = False
    """Multiply the matrices of the layers in 8-bit floats (compute capability 8.9 or above): `fsdp` uses torchao,
    `megatron` Transformer Engine's hybrid recipe."""
    cpu_offload: bool = False
    """Keep the shards of weights, gradients and optimizer in host memory and step there; layers are copied to the
    device one by one (several processes only). To offload only between calls: `offload`."""


class _CommonSettings(Section):
    """What every model reads: backend, weights, precision, placement, adapters and sampling, and backends' sections."""

    module: str = "fsdp"
    """Backend: `fsdp`, `deepspeed`, `native`, `reward`, … or a dotted path to a Module subclass."""
    like: str | None = None
    """Take all keys that are not given here from this model. With another `load`, what belongs to that model's weights
    is not taken: `lora.load`, `tokenizer`, `init`, `head_init`, `chat_template` and its arguments, `score_at`, and what
    was allowed for them alone (`pickled_weights`, `trust_remote_code`)."""
    load: Annotated[str, InputPath("model")] | None = None
    """A Hugging Face model directory, a name of the hub (`org/name`, `org/name@revision`), or a GGUF file. A run that
    resumes keeps the commit that it began with."""
    pickled_weights: bool = False
    """Download weights that are pickles, from a repository that has no safetensors. They are read as tensors alone."""
    init: Literal["load", "random"] = "load"
    """`random` reads only config and tokenizer of the model and initialises the weights from the seed."""
    tokenizer: Annotated[str, InputPath("model")] | None = None
    """The directory or the hub's name of a tokenizer, if it is not in `load`."""
    head: Literal["lm", "value", "reward"] = "lm"
    """Language-model head; a scalar per token; a scalar per sequence (at its last token)."""
    head_init: Literal["load", "zero"] = "load"
    """`load` refuses a checkpoint without the head; `zero` creates a new head."""
    frozen: bool = False
    trust_remote_code: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the stored parameters (a trainer's master weights)."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of matrix products; None: `dtype`."""
    num_gpu: Continuable[NonNegativeInt | Literal["auto"]] = "auto"
    """Devices of the model, in all its processes; 0: CPU. A trained model has one process per device. A generator or a
    frozen model has num_gpu / (tensor_parallel × pipeline_parallel) replicas, one process each. `auto`: all devices for
    which no other model asks; models with `auto` share them in turn, unless `runtime.colocation` says otherwise.
    Without devices, for reward functions, and beside `num_process`: CPU."""
    num_process: Continuable[PositiveInt | None] = None
    """Processes of the model, over all replicas; None: one per device, or one on CPU."""
    tensor_parallel: Continuable[PositiveInt] = 1
    """Devices that split each layer; they must be on one node."""
    pipeline_parallel: Continuable[PositiveInt] = 1
    """Devices, or tensor-parallel groups, that divide the layers between them."""
    placement: ResultNeutral[Literal["pack", "spread"] | None] = None
    """`pack` the model on few nodes, or `spread` it over many, tensor-parallel groups excepted. None: pack devices,
    spread CPU processes."""
    offload: Continuable[Literal["auto"] | list[Literal["weights", "gradients", "optimizer", "kv"]]] = "auto"
    """Components that may be offloaded to host memory while other models of the `runtime.colocation` group compute.
    `auto`: all on devices, none on CPU."""
    shares_per_replica: PositiveInt = 1
    """Shards of a batch per replica, sent to replicas as they become free. More than 1 balances replicas of different
    speed, but a generator drains at the end of each shard."""
    threads: ResultNeutral[PositiveInt | None] = None
    """CPU threads of each process; None: `runtime.threads`."""
    deterministic: bool = False
    """Use only operations whose result does not depend on the order of threads; stop the run at any other."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights."""
    vision: VisionConfig | None = None
    """The components that learn in a run that reads images. None: all, or with `data.images: null` text alone."""
    share_prefix: bool = True
    """Compute the prompt of a group once for all its samples, and what rows of an episode begin with once (exact; needs
    layers that mix tokens by attention only). All samples of a group then go to one process. Without it they are dealt
    singly, unless the loss compares them, which balances better if responses are long and differ in length."""
    sampling: SamplingConfig = SamplingConfig()
    native: NativeConfig = NativeConfig()
    transformers: TransformersConfig = TransformersConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    megatron: MegatronCoreConfig = MegatronCoreConfig()
    vllm: dict[str, Any] = {}
    """Options passed to the vLLM engine."""


class ModelConfig(TrainerSettings, GeneratorSettings, ScorerSettings, BatchSettings, _CommonSettings):
    """One model of the run. A setting that no model with its role reads is refused when the run is planned."""

    def shares(self, ranks: int) -> list[int]:
        """Compute for a trainer the shard of a batch that each rank processes.

        Tensor-parallel ranks vary fastest, then context-parallel ones, shards, and pipeline stages.
        """
        stage = ranks // self.pipeline_parallel
        return [rank % stage // (self.tensor_parallel * self.context_parallel) for rank in range(ranks)]

    @property
    def devices(self) -> int:
        """Devices of the model; 0 until launch/devices.py has counted those that `auto` stands for."""
        return 0 if self.num_gpu == "auto" else self.num_gpu

    @property
    def processes(self) -> int:
        """Processes of the model: as configured, else one per GPU, or one on CPU."""
        return self.num_process or max(1, self.devices)

    def check(self) -> None:
        if self.trust_remote_code and is_code_refused():
            raise Conflict(("trust_remote_code",), "is true: with --no-code no code of a model is run")
        for key in PARALLEL:
            if self.devices % (ways := getattr(self, key)):
                raise Conflict((key,), f"is {ways}, which does not divide num_gpu ({self.num_gpu})")
        if self.devices % (self.tensor_parallel * self.pipeline_parallel):
            product = f"{self.pipeline_parallel}, which with tensor_parallel={self.tensor_parallel}"
            raise Conflict(("pipeline_parallel",), f"is {product} does not divide num_gpu ({self.num_gpu})")
        if self.parts_per_call > 1 and (self.shares_per_replica > 1 or self.spread_samples):
            raise Conflict(("parts_per_call",), "cannot be combined with `shares_per_replica` or `spread_samples`")
        if self.lora and self.lora.base_bits and self.init == "random":
            raise Conflict(("lora", "base_bits"), "needs weights to quantise: `init: load`")
        if self.lora and self.lora.base_bits and self.processes > 1:
            message = f"needs the whole model in one process (num_process: 1), not in {self.processes}"
            raise Conflict(("lora", "base_bits"), message)
        if self.fp8 and (dtype := self.compute_dtype or self.dtype) != "bfloat16":
            raise Conflict(("fp8",), f"needs `compute_dtype: bfloat16` around the products; it is {dtype}")
        if self.fp8 and self.lora is not None:
            raise Conflict(("fp8",), "is for training the weights; with `lora` most of them are frozen")
        if self.cpu_offload and self.processes == 1 and self.num_gpu != "auto":
            raise Conflict(("cpu_offload",), "needs a model that several processes share (num_process)")
        if self.optimizer.name == "adamw_8bit" and self.processes > 1 and not self.frozen:
            raise Conflict(
                ("optimizer", "name"),
                f"`adamw_8bit` cannot read parameters that {self.processes} processes share; use `adamw`, or "
                "num_process: 1",
            )
