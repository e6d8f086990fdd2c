"""Trains models of transformers with DeepSpeed's ZeRO (1910.02054). The only file that imports deepspeed.

The ranks shard the optimizer's state (stage 1), gradients too (2), weights too (3). The optimizer is torch's, so
DeepSpeed compiles nothing. It steps on flat float32 partitions of the parameters; with a ``compute_dtype`` of bfloat16
these are the master weights, and those of the model are copies.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel

from coalign.backends import optim, refuse_owned, refuse_unknown, require_package
from coalign.backends.base import Outputs
from coalign.backends.hf.fsdp import HuggingFaceModule
from coalign.backends.lora import adapts_experts, get_weights
from coalign.backends.packing import Layout
from coalign.backends.process_group import join_process_group
from coalign.config.schema import ModelConfig
from coalign.devices import is_accelerator

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

SUPPORTED = "0.19.*"
LARGEST_BUCKET = 500_000_000  # elements of gradients that are reduced together: DeepSpeed's own default
TAG, LAYOUT = "engine", "layout.json"  # in a checkpoint: DeepSpeed's folder, and what must agree with it
# key of zero_optimization that Coalign sets -> why
OWNED = {
    "stage": "it is `deepspeed.stage`",
    "offload_optimizer": "it is `deepspeed.offload_optimizer`",
    "offload_param": "it is `deepspeed.offload_parameters`",
    "compute_grad_norm": "updates that are not finite are found by it",
    "load_from_fp32_weights": "a run is continued bit for bit",
    "elastic_checkpoint": "a run is continued bit for bit",
    "gather_16bit_weights_on_model_save": "Coalign writes the weights",
    "stage3_gather_16bit_weights_on_model_save": "Coalign writes the weights",
}


class DeepSpeedModule(HuggingFaceModule):
    """A causal LM, value model or reward model under ZeRO; a frozen one is sharded at stage 3 only."""

    reads_images = True
    engine: DeepSpeedEngine = cast("DeepSpeedEngine", None)  # None for a frozen model that each process holds whole
    engines: ClassVar[int] = 0  # open in this process
    owns_group: ClassVar[bool] = False  # whether this class made the default process group

    @classmethod
    def one_group(cls, config: ModelConfig) -> bool:
        return not config.frozen or config.deepspeed.stage == 3

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        super().check_settings(config, name, device)
        if cls.one_group(config):
            for key, reason in _problems(config):
                raise ValueError(f"models.{name}.{key}{reason}")
            refuse_owned(config.deepspeed.zero, OWNED, f"models.{name}.deepspeed.zero")

    @classmethod
    def check_model(cls, model: PreTrainedModel, config: ModelConfig, name: str) -> None:
        super().check_model(model, config, name)
        if config.deepspeed.stage == 3 and adapts_experts(model):
            raise ValueError(
                f"models.{name}.deepspeed.stage is 3: adapters of stacked experts (lora.target) need whole stacks, "
                "which are not there; use stage 2, or `module: fsdp`"
            )

    @classmethod
    def check_machine(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        """Raises ImportError without a supported DeepSpeed, and ValueError for an option that it does not have."""
        if cls.one_group(config):
            require_package("deepspeed", "DeepSpeed", SUPPORTED, "deepspeed", "deepspeed")
            if zero := config.deepspeed.zero:
                _import_deepspeed(device)
                from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

                keys = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
                title = "key of DeepSpeed's zero_optimization"
                refuse_unknown(zero, keys, OWNED, f"models.{name}.deepspeed.zero", title)

    def setup(self) -> None:
        """Join the other ranks and load the model. Raises what the checks of Module and pretrained.load raise."""
        self.check_before_setup()
        if not self.one_group(self.config):
            self.model = self._read(self.device)
            return
        deepspeed = _import_deepspeed(self.device)
        if not dist.is_initialized():  # by another model of this process
            if self.context.world_size > 1:
                join_process_group(self.context)
            else:  # DeepSpeed expects one
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage] (documented as public)
            DeepSpeedModule.owns_group = True
        self.model = self._read(torch.device("cpu"))
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if trained:
            self.optimizer = optim.build_adamw(
                list(trained.values()), self.config.optimizer, scales=self._scale_learning_rates()
            )
            self.optimizer.state.clear()  # DeepSpeed fills it, for its flat partitions
        # DeepSpeed rounds weights before it copies them to float32.
        exact = {name: p.detach().clone() for name, p in trained.items()} if self.compute_dtype else {}
        self.engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=self._settings(), dist_init_required=False
        )
        DeepSpeedModule.engines += 1
        for name, value in exact.items():
            deepspeed.utils.safe_set_full_fp32_param(trained[name], value.to(self.device))

    def close(self) -> None:
        self._close_writer()
        if self.engine is not None:
            self.engine.destroy()
            DeepSpeedModule.engines -= 1
        # Also of a module that has joined the group, and then could not load its model.
        if DeepSpeedModule.engines == 0 and DeepSpeedModule.owns_group:
            import deepspeed

            deepspeed.comm.destroy_process_group()  # which also clears what it keeps about the group
            DeepSpeedModule.owns_group = False

    # ---- methods of TrainableModule

    def _forward(self, layout: Layout, needs: Sequence[str]) -> Outputs:
        if self.engine is None:
            return super()._forward(layout, needs)
        return self.engine(layout.to(self.device), needs=needs)

    def _backward(self, loss: Tensor) -> None:
        self.engine.backward(self.context.world_size * loss)  # DeepSpeed averages over ranks

    def optimizer_step(self) -> float:
        self._set_learning_rate()
        self.engine.step()  # clears the gradient; one that is not finite is not applied
        self.arena.reserve(self.context.model, "gradients", 0)
        return float(cast(float, self.engine.get_global_grad_norm()))

    def save(self, dir: str | Path) -> None:
        """Write DeepSpeed's own format, which only the same number of ranks can read."""
        files, engine = dict[str, Any](), cast(Any, self.engine.checkpoint_engine)
        save = engine.save
        engine.save = lambda state_dict, path: files.update({path: state_dict})  # it makes the folder as well
        try:
            self.engine.save_checkpoint(str(dir), tag=TAG, client_state={"progress": self.progress}, save_latest=False)
        finally:
            del engine.save
        values, structure = tree_flatten(files)

        def write(copies: Mapping[str, Any]) -> None:
            for path, state in tree_unflatten([*copies.values()], structure).items():
                save(state, path)

        self._write_together(dir, {str(number): value for number, value in enumerate(values)}, write)
        if self.context.rank == 0:
            (Path(dir) / LAYOUT).write_text(json.dumps(self._layout, indent=1))

    def load(self, dir: str | Path) -> None:
        path = Path(dir) / LAYOUT
        if not path.is_file():
            raise FileNotFoundError(f"{dir} holds no checkpoint of a DeepSpeed engine (no {LAYOUT} there)")
        there, here = json.loads(path.read_text()), self._layout
        there, here = ({**layout, **layout["weights"], "weights": None} for layout in (there, here))
        names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        wrong = [f"{name} is {there.get(name)} there and {here.get(name)} here" for name in names[:3]]
        if wrong:
            more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
            raise ValueError(
                f"checkpoint {dir} is of another model or layout: {'; '.join(wrong)}{more}. DeepSpeed reads one "
                "with the stage and the number of processes that wrote it; weights alone go on from its `hf` directory"
            )
        _read_weights_only(self.engine)
        _, client = self.engine.load_checkpoint(str(dir), tag=TAG)
        self.restore_progress(cast(Any, client)["progress"])

    def tensors(self, component: str) -> Iterable[Tensor]:
        if self.engine is None or component not in ("weights", "optimizer"):
            return super().tensors(component)
        if component == "weights":  # small parameters are kept whole, beside their shards
            parameters: list[Any] = list(self.model.parameters())
            return [*(p for p in parameters if p.numel()), *(p.ds_tensor for p in parameters if _is_sharded(p))]
        state = self.optimizer.state if self.optimizer else {}
        entries = (value for entries in state.values() for value in entries.values())
        return [*state, *(value for value in entries if isinstance(value, Tensor))]

    @property
    def _gradient_size(self) -> int:
        """Bytes on this rank: gradients are summed in float32."""
        elements = sum(getattr(p, "ds_numel", p.numel()) for p in self.model.parameters() if p.requires_grad)
        return 4 * elements // (self.context.world_size if self.config.deepspeed.stage > 1 else 1)

    def _gather(self, tensor: Tensor) -> Tensor:
        if self.engine is None:
            return super()._gather(tensor)
        import deepspeed

        if self.compute_dtype is not None and tensor.requires_grad:
            return cast(Tensor, deepspeed.utils.safe_get_full_fp32_param(tensor))
        if not _is_sharded(tensor):
            return tensor
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()

    # ---- building

    def _settings(self) -> dict[str, Any]:
        """DeepSpeed's configuration. An update ends where `step` is called."""
        config, section = self.config, self.config.deepspeed
        host = {"device": "cpu", "pin_memory": is_accelerator(self.device)}
        # DeepSpeed allocates a whole bucket, whatever the size of the model.
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        zero = {"stage": section.stage, "reduce_bucket_size": min(max(trained, 1), LARGEST_BUCKET), **section.zero}
        zero |= {"offload_optimizer": host} if section.offload_optimizer else {}
        zero |= {"offload_param": host} if section.offload_parameters else {}
        low = (config.compute_dtype or config.dtype) == "bfloat16"
        return {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": config.optimizer.clip_grad_norm or 0.0,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
            "bf16": {"enabled": low, "check_grad_overflow": True},
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
        }

    @property
    def _layout(self) -> dict[str, Any]:
        weights = get_weights(self.model).items()
        return {
            "deepspeed.stage": self.config.deepspeed.stage,
            "processes": self.context.world_size,
            "compute_dtype": self.config.compute_dtype or self.config.dtype,
            "weights": {name: list(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in weights},
        }


def _problems(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of the settings that ZeRO does not support."""
    if not config.frozen and config.optimizer.name != "adamw":
        yield (
            "optimizer.name",
            f" is `{config.optimizer.name}`: ZeRO gives the optimizer flat partitions of several parameters, and this "
            "one needs whole ones; use `adamw`, or `module: fsdp`",
        )
    for key, value, reason in (
        ("cpu_offload", config.cpu_offload, "ZeRO has its own: `deepspeed.offload_optimizer`, `offload_parameters`"),
        ("compile", config.compile, "not supported under ZeRO; use `module: fsdp`"),
        ("fp8", config.fp8, "not supported under ZeRO; use `module: fsdp`"),
        ("ema", config.ema, "no average is kept beside ZeRO's partitions; use `module: fsdp`"),
        ("lora.base_bits", config.lora and config.lora.base_bits, "ZeRO shards no 4-bit weights; use `module: fsdp`"),
    ):
        if value:
            yield key, f": {reason}"
    if config.dtype != "float32" and not config.frozen:
        yield (
            "dtype",
            f" is {config.dtype}: ZeRO steps on weights in float32; use `dtype: float32` with "
            f"`compute_dtype: {config.dtype}`",
        )


def _import_deepspeed(device: torch.device) -> Any:
    """Import the package for ``device``. ValueError where this process uses it on another type of device already."""
    os.environ["LOCAL_RANK"] = "0"  # a process sees only its own device
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if (current := cast(Any, deepspeed.get_accelerator()).device_name()) != device.type:
        raise ValueError(f"DeepSpeed computes on {current} in this process already, and a model asks for {device.type}")
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for minutes; gloo does its work
    return deepspeed


def _read_weights_only(engine: DeepSpeedEngine) -> None:
    """Let DeepSpeed load its files without running code from them."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals([LossScaler, ZeroStageEnum, fragment_address])
    cast(Any, engine.checkpoint_engine).load = partial(torch.load, weights_only=True)


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "ds_tensor")
