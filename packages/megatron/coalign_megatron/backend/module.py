"""megatron-core (1909.08053, 2104.04473, 2205.05198) over packed rows: tensor, pipeline, context and expert parallel.

This file owns the order of events and imports megatron-core only when a model is set up. Weights are read from Hugging
Face tensors, sharded and named as Megatron's, and exported back to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from coalign.backends import lora, pretrained, process_group, require_package, vision_language
from coalign.backends.base import IDLE, Measure, Outputs, TrainableModule
from coalign.backends.hf import linear_layers
from coalign.backends.process_group import all_reduce_values
from coalign.backends.routers import RouterCoefficients
from coalign.backends.trainer_state import BackgroundSaves
from coalign.config.schema import ImagesConfig, ModelConfig
from coalign.data.batch import Batch
from coalign.data.images.processor import ImageProcessor
from coalign.files import read_model_config
from coalign.roles import Context
from coalign.types import Stats
from coalign_megatron.backend.partition import (
    OWNED,
    SCORE,
    HuggingFaceExport,
    WeightPartition,
    collect_tensors,
    partition_weights,
    read_sizes,
)
from coalign_megatron.backend.vision import find_problems

if TYPE_CHECKING:
    from coalign_megatron.backend.training import MegatronPipeline, PipelineOptimizer

SUPPORTED = "0.16.1"


class MegatronModule(BackgroundSaves, TrainableModule):
    """A causal LM, value model or reward model, frozen or trained."""

    parallel = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    adapters = True
    reads_images = True
    pipeline: MegatronPipeline
    weights: WeightPartition
    optimizer: PipelineOptimizer | None = None

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        super().check_settings(config, name, device)
        for key, reason in (*find_problems(config), *_find_problems(config, device)):
            raise ValueError(f"models.{name}.{key}{reason}")
        if config.fp8:
            linear_layers.check_float8_device_type(device, f"models.{name}.fp8")

    @classmethod
    def check_architecture(cls, config: ModelConfig, name: str) -> None:
        try:
            model = partition_weights(config, config.processes).layout.config
        except ValueError as problem:
            raise ValueError(f"models.{name}: {problem}") from problem
        if config.vision is not None:
            ImageProcessor(pretrained.get_directory(config), pretrained.read_tokenizer(config), ImagesConfig())
        sizes = read_sizes(config)
        if model.num_moe_experts and not config.frozen and sizes.expert == 1 and sizes.expert_tensor != sizes.tensor:
            raise ValueError(
                f"models.{name}.megatron.expert_tensor_parallel is {sizes.expert_tensor}: without `expert_parallel` "
                f"megatron-core sums gradients of experts as those of other layers, which takes {sizes.tensor}, as "
                "`tensor_parallel`"
            )
        wanted = [key for key in ("router_aux_loss_coef", "router_z_loss_coef") if getattr(config, key)]
        if wanted and not config.frozen and not model.num_moe_experts:
            raise ValueError(f"models.{name}.{wanted[0]} is {getattr(config, wanted[0])}: the model has no experts")
        if pretrained.has_adapters(config):
            _check_targets(config, name, config.processes)

    @classmethod
    def check_routing_replay(cls, config: ModelConfig, name: str) -> None:
        if not partition_weights(config, config.processes).layout.config.num_moe_experts:
            raise ValueError(f"rollout.routing_replay is true, and models.{name} has no experts; leave it out")

    @classmethod
    def check_machine(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        require_package("megatron", "megatron-core", SUPPORTED, "megatron", "megatron-core")
        from coalign_megatron.backend import build

        try:
            build.check_machine(config, device)
        except ValueError as problem:
            raise ValueError(f"models.{name}: {problem}") from problem

    def __init__(self, config: ModelConfig, context: Context) -> None:
        super().__init__(config, context)
        self.device = torch.device(context.device)
        if config.deterministic:
            process_group.enforce_determinism(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0")

    def setup(self) -> None:
        """Join the other ranks and read this rank's shards of the weights.

        Raises what the checks of Module raise, and ValueError, naming the model, for weights that do not fit.
        """
        self.check_before_setup()
        from coalign_megatron.backend import build
        from coalign_megatron.backend import build as ranks
        from coalign_megatron.backend.lora import build_carrier

        config, context, carrier = self.config, self.context, None
        if pretrained.has_adapters(config):
            _check_targets(config, context.model, context.world_size)
            carrier = build_carrier(config, context)
        with self._here():
            try:
                te = build.uses_transformer_engine(config, self.device)
                self.weights = partition_weights(config, context.world_size, te=te)
                ranks.join_ranks(read_sizes(config), context)
                try:
                    self._build(carrier, te=te)
                except BaseException:
                    ranks.leave_ranks()
                    raise
            except ValueError as problem:
                raise ValueError(f"models.{context.model}: {problem}") from problem

    def _build(self, carrier: PreTrainedModel | None, *, te: bool) -> None:
        from coalign_megatron.backend import build
        from coalign_megatron.backend.training import PipelineOptimizer

        config, adam = self.config, self.config.optimizer
        pipeline = build.build_pipeline(config, self.context, self.weights, carrier, te=te)
        exact = self._read_weights(pipeline)
        if config.head != "lm" and config.lora and config.lora.load and pretrained.has_adapters(config):
            build.load_head(pipeline.models, config.lora.load)
        if not config.frozen:
            settings = {
                "lr": adam.lr,
                "weight_decay": adam.weight_decay,
                "adam_beta1": adam.betas[0],
                "adam_beta2": adam.betas[1],
                "adam_eps": adam.eps,
            }
            distributed = config.megatron.distributed_optimizer
            self.optimizer = PipelineOptimizer(pipeline, settings, clip=adam.clip_grad_norm, distributed=distributed)
            if exact:
                self.optimizer.start_from(exact)
        self.pipeline = pipeline

    def _read_weights(self, pipeline: MegatronPipeline) -> dict[str, Tensor]:
        """Read the weights; return them unrounded if the model trains with a rounded copy."""
        from coalign_megatron.backend import build

        unfilled, exact = collect_tensors(pipeline.models), {}
        rounded = self._rounded and not self.config.frozen and not pretrained.has_adapters(self.config)
        with torch.no_grad():
            for name, tensor in build.read_weights(self.config, self.context, self.weights):
                unfilled.pop(name).copy_(tensor)
                if rounded:
                    exact[name] = tensor.float()
        if left := [name for name, _ in pipeline.named() if name in unfilled and lora.INFIX not in name]:
            raise RuntimeError(f"model '{self.context.model}': the checkpoint has no tensor for {left}")
        return exact

    @property
    def _rounded(self) -> bool:
        """Whether the model computes with a rounded copy of its weights."""
        return self.config.compute_dtype not in (None, self.config.dtype)

    @property
    def _trained(self) -> PipelineOptimizer:
        assert self.optimizer is not None, "a frozen model has no optimizer"
        return self.optimizer

    def close(self) -> None:
        from coalign_megatron.backend import build as ranks

        self._close_writer()
        if hasattr(self, "pipeline"):
            ranks.leave_ranks()

    # ---- verbs of TrainableModule

    def run(self, micros: Sequence[Batch], loss: Measure | None = None, *, needs: Sequence[str] = ()) -> list[Outputs]:
        settings = {"needs": needs, "share_prefix": self.config.share_prefix, "idle": IDLE}
        routers, config = self.pipeline.routers, self.config
        with self._here():
            if loss is None or not routers.shape[0]:
                return self.pipeline.run(micros, loss, **settings)
            (tokens,) = self.all_reduce([float(sum(micro.tokens_total for micro in micros if micro is not IDLE))])
            if config.router_aux_loss_coef:  # the tokens of each expert in the whole update, before the first backward
                routers.counts.zero_()
                self.pipeline.run(micros, None, **settings)
                routers.global_counts = routers.add_up(routers.counts)
            routers.counts.zero_()
            coefficients = config.router_aux_loss_coef, config.router_z_loss_coef
            factors = RouterCoefficients(*coefficients, routers.shape[0], tokens)
            with routers.learning(factors):
                results = self.pipeline.run(micros, loss, **settings)
            routers.totals.add_counts(routers.counts.clone())
            return results

    def describe_routing(self) -> Stats:
        return self.pipeline.routers.totals.describe(self.pipeline.routers.add_up)

    def optimizer_step(self) -> float:
        with self._here():
            return self._trained.step(self.learning_rate)

    def all_reduce(self, values: Sequence[float], op: str = "sum") -> list[float]:
        from coalign_megatron.backend import build as ranks

        return all_reduce_values(values, op, self.device, ranks.get_data_group())

    @property
    def exports(self) -> bool:
        return True  # each rank exports some of the weights

    def export_weights(self, *, changing: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield weights in ``compute_dtype``, as the model computes with them; `save_hf` writes the exact ones."""
        from coalign_megatron.backend.lora import export_separate

        tensors, separate = collect_tensors(self.pipeline.models), self.context.adapter_rank is not None
        if separate:
            yield from export_separate(self.pipeline.models, self.weights, self.context.rank)
        export = self._export_changing if changing else self._export
        for name, tensor in export.tensors(tensors if separate else self._merge(tensors)):
            yield name, tensor.detach()

    @cached_property
    def _export_changing(self) -> HuggingFaceExport:
        """With adapters: exports all weights in the modules that have adapted ones, because engines fuse some of
        them."""
        if not self.pipeline.adapted:
            return self._export
        merged = self.pipeline.adapted if self.context.adapter_rank is None else []
        blocks = {lora.find_block(name) for name in (*merged, *([] if self.config.head == "lm" else [SCORE]))}
        return HuggingFaceExport(self.weights, self.context.rank, in_memory=True, blocks=blocks)

    def _merge(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        from coalign_megatron.backend.lora import MergedTensors

        return MergedTensors(tensors, self.pipeline.models) if pretrained.has_adapters(self.config) else tensors

    @cached_property
    def _export(self) -> HuggingFaceExport:
        return HuggingFaceExport(self.weights, self.context.rank, in_memory=True)

    def save(self, dir: str | Path) -> None:
        """Save in Megatron's format `torch_dist`, which any layout of ranks can read."""
        from coalign_megatron.backend import training

        with self._here():
            training.save_checkpoint(dir, self.pipeline, self._trained, self.progress, self._background)

    def load(self, dir: str | Path) -> None:
        from coalign_megatron.backend import training

        with self._here():
            self.restore_progress(training.load_checkpoint(dir, self.pipeline, self._trained))

    def save_hf(self, dir: str | Path, *, average: bool = False) -> None:
        """Write the weights: each rank writes a file of those that it exports."""
        if average:
            raise ValueError(f"model '{self.context.model}' keeps no average of its weights (ema)")
        dtype = getattr(torch, self.config.dtype)
        export = HuggingFaceExport(self.weights, self.context.rank, in_memory=self.config.export_experts == "stacked")
        held = collect_tensors(self.pipeline.models)
        with self._here():
            if self._rounded and pretrained.has_adapters(self.config):  # frozen weights are what they were
                from coalign_megatron.backend import build

                exact = build.read_weights(self.config, self.context, self.weights)
                held |= {name: tensor.to(self.device) for name, tensor in exact}
            if self.optimizer:
                held |= self.optimizer.collect_exact()
        exported = {name: t.detach().to(dtype).contiguous() for name, t in export.tensors(self._merge(held))}
        shares: list[dict[str, int]] = [{}] * self.context.world_size
        dist.all_gather_object(shares, {name: tensor.nbytes for name, tensor in exported.items()})
        filled = [rank for rank, share in enumerate(shares) if share]
        files = {rank: f"model-{i:05d}-of-{len(filled):05d}.safetensors" for i, rank in enumerate(filled, 1)}

        def write(tensors: Mapping[str, Tensor]) -> None:
            Path(dir).mkdir(parents=True, exist_ok=True)
            if tensors:
                save_file(dict(tensors), Path(dir) / files[self.context.rank], {"format": "pt"})
            if self.context.rank == 0:
                index = {
                    "metadata": {"total_size": sum(sum(share.values()) for share in shares)},
                    "weight_map": {name: files[rank] for rank in filled for name in shares[rank]},
                }
                (Path(dir) / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
                _save_config(self.config, self.context, dir)

        self._write_together(dir, exported, write)

    def save_adapter(self, dir: str | Path) -> None:
        from coalign_megatron.backend import lora as adapters

        with self._here():
            adapters.save(self.pipeline.models, self.weights, self.config, self.context, dir)
        self._write(dir, {}, lambda _: None)  # they are small, and written at once

    def base_weights(self) -> AbstractContextManager[None]:
        if not pretrained.has_adapters(self.config):
            return super().base_weights()
        return lora.disable_adapters(nn.ModuleList(self.pipeline.models))

    # ---- memory

    def tensors(self, component: str) -> Iterable[Tensor]:
        if component == "weights":
            return [parameter for _, parameter in self.pipeline.named()]
        if component == "gradients" and self.optimizer:
            return [cast(Any, parameter).main_grad for _, parameter in self.pipeline.trained()]
        if component == "optimizer" and self.optimizer:
            return list(self.optimizer.state())
        return ()

    def _here(self) -> AbstractContextManager[None]:
        """Let megatron-core compute on this model's device."""
        if self.device.type != "cpu":
            return nullcontext()
        from coalign_megatron.backend.cpu import on_cpu

        return on_cpu()


def _find_problems(config: ModelConfig, device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong with it) for settings that megatron-core cannot follow."""
    megatron = config.megatron
    if not config.frozen and config.optimizer.name != "adamw":
        yield (
            "optimizer.name",
            f" is `{config.optimizer.name}`: Megatron's optimizer is `adamw`; for this one use `module: fsdp`",
        )
    unsupported = {
        "ema": "no average is kept beside its optimizer",
        "cpu_offload": "its shards stay on their device",
        "compile": "its layers have kernels of their own",
    }
    for key, reason in unsupported.items():
        if getattr(config, key):
            yield key, f": {reason}; use `module: fsdp`"
    if config.attention != "auto":
        yield "attention", f" is {config.attention}: here the device decides; leave it out"
    if pretrained.has_adapters(config):
        yield from _find_adapter_problems(config)
    if config.dp_replicate > 1:
        yield "dp_replicate", ": weights are not sharded over data-parallel processes here"
    if megatron.transformer_engine and device.type == "cpu":
        yield "megatron.transformer_engine", " is true: it computes on GPUs only"
    for field in megatron.config:
        if field in OWNED:
            yield f"megatron.config.{field}", f": {OWNED[field]}"


def _find_adapter_problems(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong with it) for adapters that Megatron's layers cannot have."""
    settings = config.lora
    assert settings is not None
    unsupported = {
        "dropout": "ranks see parts of an input, whose dropout they cannot draw alike",
        "dora": "the norms of whole rows are on no rank",
        "base_bits": "Megatron's layers do not compute with 4-bit weights",
    }
    for key, reason in unsupported.items():
        if getattr(settings, key):
            yield f"lora.{key}", f" is {getattr(settings, key)}: {reason}; use `module: fsdp`"
    if config.megatron.transformer_engine:
        yield (
            "megatron.transformer_engine",
            " is true: its layers fuse a norm, and adapters need what that leaves; with `lora` it is false",
        )


def _check_targets(config: ModelConfig, name: str, count: int) -> None:
    """Raise ValueError, naming `lora.target`, for a layer that has no adapter here, and for stages of ``count`` ranks
    that lack some."""
    model_type = read_model_config(pretrained.get_directory(config)).get("model_type")
    if model_type not in CONFIG_MAPPING and not config.trust_remote_code:
        raise ValueError(
            f"models.{name}.lora: adapters are those of a class of transformers, which has none for the model type "
            f"`{model_type}` of {config.load}; without `lora` all weights are trained"
        )
    skeleton = pretrained.build_skeleton(config, name=name, packed=False)
    adapted = {weight.replace(lora.BASE, ""): None for weight in lora.find_adapted_weights(skeleton)}.keys()
    weights, key = partition_weights(config, count), f"models.{name}.lora.target"
    if (weight := weights.find_unfit_target(adapted)) is not None:
        raise ValueError(
            f"{key} matches '{weight.removesuffix('.weight')}', which Megatron computes outside of its linear layers; "
            "name the others (`*.self_attn.*`, `*_proj`), or use `module: fsdp`"
        )
    if not config.frozen and (stage := weights.find_bare_stage(adapted)) is not None:
        raise ValueError(
            f"{key} leaves stage {stage} of `pipeline_parallel` {config.pipeline_parallel} (from 0) without adapters "
            "that other stages have, in experts or outside of them: match layers of all stages, or use fewer stages"
        )


def _save_config(config: ModelConfig, context: Context, dir: str | Path) -> None:
    """Write config.json, tokenizer and processor, beside weights that something else writes."""
    hf = json.loads((pretrained.get_directory(config) / "config.json").read_text(encoding="utf-8"))
    hf |= {"dtype": config.dtype}
    if config.head == "reward" and not config.frozen:
        hf |= {"score_at": pretrained.TRAINED_AT}
    if config.head != "lm":
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

        architecture = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[hf["model_type"]]
        hf |= {"architectures": [architecture], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (Path(dir) / "config.json").write_text(json.dumps(hf, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    vision_language.copy_processor(pretrained.get_directory(config), Path(dir))
    pretrained.save_tokenizer(config, context, dir)
