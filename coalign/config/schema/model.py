"""One model of a run: what it is, where it comes from, how it computes and learns, where it runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from coalign.config.errors import Conflict
from coalign.config.schema.base import Function, InputPath, LossConfig, OneOrMore, Probability, ResultNeutral, Section
from coalign.config.schema.rollout import NativeConfig, SamplingConfig

# The ways in which a model is cut over devices. Which of them there are is up to its module.
PARALLEL = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "dp_replicate")

# Parts of Megatron's layers whose activations need not be kept.
Recomputed = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class OptimizerConfig(Section):
    """An optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit", "adafactor", "muon"] = "adamw"
    """`adamw_8bit` keeps its moments in 8 bits (needs bitsandbytes; one process). `adafactor` keeps means of rows and
    columns; its `lr` is relative to the size of a parameter. `muon` takes the matrices of the layers, AdamW the rest;
    its steps are as large as AdamW's, so `lr` is, too. `betas` and `eps` are AdamW's."""
    lr: NonNegativeFloat = 1e-6
    betas: Annotated[tuple[Probability, Probability], Field(strict=False)] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    """Not applied to biases and norms (parameters of one dimension)."""
    clip_grad_norm: PositiveFloat | None = 1.0
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """`linear` and `cosine` fall to lr * min_lr_ratio over the run; `wsd` stays at lr and falls in the last `decay`."""
    unit: Literal["steps", "tokens"] = "steps"
    """What `warmup`, `decay` and the length of the run are counted in: optimizer steps, or tokens trained on (then
    `runtime.tokens` is the length)."""
    warmup: NonNegativeInt = 0
    decay: NonNegativeInt = 0
    """Of `wsd`: the linear fall at the end."""
    min_lr_ratio: Probability = 0.0

    @model_validator(mode="after")
    def _decay_belongs_to_wsd(self) -> Self:
        if self.decay and self.schedule != "wsd":
            raise Conflict(("decay",), f"has no effect with schedule `{self.schedule}`; use `wsd`")
        return self


class LoraConfig(Section):
    """Low-rank adapters (2106.09685) beside frozen weights. The head of a reward or value model is trained whole."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The product is scaled by alpha / rank."""
    dropout: Probability = 0.0
    target: OneOrMore[str] = ["all-linear"]
    """Names of linear layers, as patterns (`*.q_proj`, `model.layers.1?.*`); `all-linear`: every one but the head."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (2312.03732)."""
    dora: bool = False
    """Magnitude and direction apart (2402.09353)."""
    base_bits: Literal[4] | None = None
    """QLoRA (2305.14314): the frozen weights in 4-bit NF4 (needs bitsandbytes)."""
    load: Annotated[str, InputPath("directory")] | None = None
    """A directory with a trained adapter (adapter_config.json) to go on from."""


class EmaConfig(Section):
    """A moving average of the weights: average = decay * average + (1 - decay) * weights, after each update."""

    decay: Probability = 0.999


class DeepSpeedConfig(Section):
    """ZeRO, for the module `deepspeed`."""

    stage: Literal[1, 2, 3] = 2
    """What the processes of a model share out: the optimizer's state (1), gradients too (2), weights too (3)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in the host's memory, and step there."""
    offload_parameters: bool = False
    """Of stage 3: keep the shards of the weights in the host's memory."""
    zero: dict[str, Any] = {}
    """Further keys of DeepSpeed's section `zero_optimization` (bucket sizes, thresholds), by its names."""

    @model_validator(mode="after")
    def _shards_are_there_to_offload(self) -> Self:
        if self.offload_parameters and self.stage != 3:
            raise Conflict(("offload_parameters",), f"needs `stage: 3`; at stage {self.stage} there are no shards")
        return self


class MegatronCoreConfig(Section):
    """megatron-core, for the module `megatron`. How a model is cut is said beside this: `tensor_parallel` and so on."""

    transformer_engine: bool | None = None
    """Layers of Transformer Engine; None: on GPUs, if it is installed."""
    virtual_pipeline: PositiveInt = 1
    """Chunks of layers that each stage of `pipeline_parallel` has (interleaved 1F1B)."""
    first_stage_layers: PositiveInt | None = None
    """Layers of the first stage, if not as many as of the others; also `last_stage_layers`."""
    last_stage_layers: PositiveInt | None = None
    expert_tensor_parallel: PositiveInt | None = None
    """Processes that share each expert; None: `tensor_parallel`."""
    sequence_parallel: bool = True
    """Between layers, processes that share these out have parts of each row (2205.05198)."""
    distributed_optimizer: bool = True
    """Data-parallel processes share the optimizer's state out (ZeRO-1)."""
    recompute_num_layers: PositiveInt = 1
    """Of `activation_checkpointing: full`: between how many layers the activations are kept."""
    recompute_modules: list[Recomputed] = ["core_attn"]
    """Of `activation_checkpointing: selective`: what is computed again."""
    swiglu: bool | None = None
    """What the model has to be, as Megatron's arguments say it; None: as its config.json says. A run with another model
    is refused. Also the four below."""
    position_embedding_type: Literal["rope", "learned_absolute", "alibi"] | None = None
    untie_embeddings_and_output_weights: bool | None = None
    add_bias_linear: bool | None = None
    normalization: Literal["RMSNorm", "LayerNorm"] | None = None
    config: dict[str, Any] = {}
    """Further fields of megatron-core's TransformerConfig, by its names, as far as they say how it computes."""


class ModelConfig(Section):
    """One model of the run: what it is, where it comes from, how it computes, where it runs."""

    module: str = "fsdp"
    """Backend: `fsdp`, `deepspeed`, `native`, `reward`, … or a dotted path to a Module subclass."""
    like: str | None = None
    """Take every key that is not given here from this model."""
    load: Annotated[str, InputPath("directory")] | None = None
    """A Hugging Face model directory."""
    init: Literal["load", "random"] = "load"
    """`random` takes only config and tokenizer from the directory and draws the weights from the seed."""
    tokenizer: Annotated[str, InputPath("directory")] | None = None
    """A tokenizer directory, when it is not in `load`."""
    chat_template: str | None = None
    """Of a model that only scores: it reads the conversation with its own tokenizer, as this template renders it:
    `auto` (its tokenizer's), `none`, a Jinja template or a file that holds one. None: `auto` if the policy's tokenizer
    is another one, else it reads the policy's tokens."""
    judge: Annotated[Function | None, Field(examples=[{"fn": "pairwise"}])] = None
    """Of a language model that scores responses (module `judge` or `preference`): what it is asked about them, and what
    its answers are worth: a class of coalign.rewards.judge_questions."""
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
    """Devices of the whole model; 0: it runs on CPU. A model that is trained has one process per device. A roll-out
    engine or a frozen model has num_gpu / (tensor_parallel × pipeline_parallel) replicas, one process each."""
    num_process: PositiveInt | None = None
    """Processes of the whole model, if not as many as `num_gpu` gives (on CPU: 1)."""
    tensor_parallel: PositiveInt = 1
    """Devices that share each layer; they are on one node."""
    pipeline_parallel: PositiveInt = 1
    """Devices, or tensor-parallel groups, that share the layers out."""
    context_parallel: PositiveInt = 1
    """Of a trainer: processes, or tensor-parallel groups, that share each row of tokens out (Ulysses)."""
    expert_parallel: PositiveInt = 1
    """Of a trainer: neighbouring processes that share the experts of each layer out; tokens travel to theirs."""
    dp_replicate: PositiveInt = 1
    """Of a trainer: copies of the sharded model (HSDP). The processes of one copy gather weights from each other alone;
    gradients are summed over all."""
    placement: ResultNeutral[Literal["pack", "spread"] | None] = None
    """`pack` the model on few nodes, or `spread` it over many (never a tensor-parallel group); None: pack devices,
    spread CPU processes."""
    offload: Literal["auto"] | list[Literal["weights", "gradients", "optimizer", "kv"]] = "auto"
    """What may leave the device for the host's memory while other models of its `runtime.colocation` group need room.
    `auto`: all of it on devices, nothing on CPU."""
    shares_per_replica: PositiveInt = 1
    """Of a model with several replicas: a batch is cut into this many shares for each, which are handed out as replicas
    become free. More than 1 evens out replicas that are not equally fast; a roll-out engine runs empty at the end of
    each share."""
    parts_per_call: PositiveInt = 1
    """Of a policy: each replica hands over its groups in so many parts, each as soon as it is complete, so that rewards
    and models with devices of their own score them while the rest is generated. They get smaller batches."""
    spread_samples: bool = False
    """Of a policy with several replicas: deal out single samples, not prompts with all of their samples. The load is
    more even; but every replica that has some of a prompt's samples computes the prompt."""
    threads: ResultNeutral[PositiveInt | None] = None
    """CPU threads of each process; None: `runtime.threads`."""
    max_tokens_per_micro: PositiveInt | None = 16384
    """Token budget of one forward / backward: bounds activation memory."""
    activation_checkpointing: Literal["full", "selective"] | None = None
    """What backward computes again, not to keep it: the layers in `full`, or `selective`: all but matrix products and
    attention."""
    compile: bool = False
    """Have torch.compile write kernels for the layers, once for all lengths (needs a C++ compiler; on GPUs Triton)."""
    fp8: bool = False
    """Multiply matrices of the layers in 8-bit floats (GPUs of compute capability 8.9 and above): `fsdp` by torchao,
    `megatron` by Transformer Engine's hybrid recipe."""
    deterministic: bool = False
    """Use operations alone whose result does not depend on the order of threads, and end the run at one that does."""
    cpu_offload: bool = False
    """Keep the shards of weights, gradients and optimizer in the host's memory, and step there; layers come to the
    device one by one for their computation (several processes; to leave between calls only: `offload`)."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights."""
    ema: EmaConfig | None = None
    """Keep an average of the weights, which checkpoints export beside them."""
    cache: str | None = None
    """Of a frozen model: a directory where its log-probs are kept by content. They are computed before training, then
    the model is unloaded."""
    candidates: NonNegativeInt = 64
    """Of a teacher: of how many of its likeliest tokens it tells the log-probs, per position; 0: all tokens."""
    share_prefix: bool = True
    """Compute the prompt of a group once for all of its samples (exact; needs attention-only mixing of tokens). So the
    samples of a group go to one process; without it they are dealt out one by one, unless the loss compares them:
    better where responses are much longer than prompts, and not alike."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps a batch is cut into (PPO mini-batches)."""
    epochs_per_batch: PositiveInt = 1
    learns_after: NonNegativeInt = 0
    """Steps of the run that this model sits out before it learns (a policy, while its value model warms up)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig | None = None
    """This model's own loss; None: the run's."""
    sampling: SamplingConfig = SamplingConfig()
    native: NativeConfig = NativeConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    megatron: MegatronCoreConfig = MegatronCoreConfig()
    vllm: dict[str, Any] = {}
    """Passed through to the engine."""

    def shares(self, ranks: int) -> list[int]:
        """Of a trainer: which share of a batch each of its ranks computes.

        Ranks count the parts of a layer first, then those of a row, the shares, and the stages of a pipeline last.
        """
        stage = ranks // self.pipeline_parallel
        return [rank % stage // (self.tensor_parallel * self.context_parallel) for rank in range(ranks)]

    @property
    def processes(self) -> int:
        """Of the whole model: as many as it names, else one per GPU, or one on CPU."""
        return self.num_process or max(1, self.num_gpu)

    @model_validator(mode="after")
    def _devices_divide(self) -> Self:
        for key in PARALLEL:
            if self.num_gpu % (parts := getattr(self, key)):
                raise Conflict((key,), f"is {parts}, which does not divide num_gpu ({self.num_gpu})")
        if self.num_gpu % (self.tensor_parallel * self.pipeline_parallel):
            product = f"{self.pipeline_parallel}, which with tensor_parallel={self.tensor_parallel}"
            raise Conflict(("pipeline_parallel",), f"is {product} does not divide num_gpu ({self.num_gpu})")
        return self

    @model_validator(mode="after")
    def _parts_are_those_of_whole_calls(self) -> Self:
        if self.parts_per_call > 1 and (self.shares_per_replica > 1 or self.spread_samples):
            raise Conflict(("parts_per_call",), "cannot be combined with `shares_per_replica` or `spread_samples`")
        return self

    @model_validator(mode="after")
    def _four_bits_need_weights_in_one_process(self) -> Self:
        if self.lora is None or self.lora.base_bits is None:
            return self
        key = ("lora", "base_bits")
        if self.init == "random":
            raise Conflict(key, "needs weights to quantise: `init: load`")
        if self.processes > 1:
            raise Conflict(key, f"needs the whole model in one process (num_process: 1), not in {self.processes}")
        return self

    @model_validator(mode="after")
    def _eight_bit_products_are_of_bfloat16(self) -> Self:
        if not self.fp8:
            return self
        if (found := self.compute_dtype or self.dtype) != "bfloat16":
            raise Conflict(("fp8",), f"needs `compute_dtype: bfloat16` around the products; it is {found}")
        if self.lora is not None:
            raise Conflict(("fp8",), "is for training the weights; with `lora` most of them are frozen")
        return self

    @model_validator(mode="after")
    def _whole_models_stay_on_their_device(self) -> Self:
        if self.cpu_offload and self.processes == 1:
            raise Conflict(("cpu_offload",), "needs a model that several processes share (num_process)")
        return self

    @model_validator(mode="after")
    def _eight_bits_need_whole_parameters(self) -> Self:
        if self.optimizer.name == "adamw_8bit" and self.processes > 1 and not self.frozen:
            raise Conflict(
                ("optimizer", "name"),
                f"`adamw_8bit` cannot read parameters that {self.processes} processes share; use `adamw`, or "
                "num_process: 1",
            )
        return self
