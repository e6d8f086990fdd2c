"""DeepSpeed's ZeRO (1910.02054) beneath models of transformers: the ranks share the optimizer's state (stage 1),
gradients too (2), weights too (3). The only file that imports deepspeed.

The optimizer is torch's, handed in, so DeepSpeed compiles nothing. What it steps on are flat pieces of the parameters
in float32; with a ``compute_dtype`` of bfloat16 these are the weights that count, and those of the model are copies.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from coalign.backends import optim
from coalign.backends.base import Outputs
from coalign.backends.checkpoint import weights
from coalign.backends.hf.module import HuggingFaceModule
from coalign.backends.layout import Layout
from coalign.backends.process_group import join_process_group
from coalign.config.errors import suggest
from coalign.config.schema import ModelConfig
from coalign.roles import Context

SUPPORTED = "0.19"
TAG, LAYOUT = "engine", "layout.json"  # of a checkpoint: DeepSpeed's folder in it, and what it can be loaded into
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
    """A causal LM, value model or reward model under ZeRO; a frozen one is sharded at stage 3 and whole below it."""

    engine: Any = None  # None for a frozen model that each process has whole
    engines: ClassVar[int] = 0  # open in this process
    met: ClassVar[bool] = False  # whether their process group is ours to end

    @classmethod
    def one_group(cls, config: ModelConfig) -> bool:
        return not config.frozen or config.deepspeed.stage == 3

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        """Raises ValueError for what ZeRO cannot train."""
        if cls.one_group(config):
            for key, reason in _problems(config):
                raise ValueError(f"models.{name}.{key}{reason}")

    @classmethod
    def check_machine(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        """Raises ImportError without a DeepSpeed that Coalign knows, and ValueError for an option it does not have."""
        if cls.one_group(config):
            require_deepspeed()
            if config.deepspeed.zero:
                load(device)
                check_known(config.deepspeed.zero, name)

    def setup(self) -> None:
        """Load the model and hand it to DeepSpeed; with several ranks join the others first.

        Raises what the checks of Module and coalign.backends.pretrained raise.
        """
        self.check_before_setup()
        if not self.one_group(self.config):
            self.model = self._read(self.device)
            return
        deepspeed = load(self.device)
        if not dist.is_initialized():  # by another model of this process
            meet(self.context)
            DeepSpeedModule.met = True
        self.model = self._read(torch.device("cpu"))
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if trained:
            self.optimizer = optim.adamw(list(trained.values()), self.config.optimizer)
            self.optimizer.state.clear()  # it will be that of flat pieces
        # DeepSpeed rounds before it takes its copies in float32.
        exact = {name: p.detach().clone() for name, p in trained.items()} if self.compute_dtype else {}
        self.engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=self._settings(), dist_init_required=False
        )
        DeepSpeedModule.engines += 1
        for name, value in exact.items():
            deepspeed.utils.safe_set_full_fp32_param(trained[name], value.to(self.device))

    def close(self) -> None:
        if self.engine is None:
            return
        self.engine.destroy()
        DeepSpeedModule.engines -= 1
        if DeepSpeedModule.engines == 0 and DeepSpeedModule.met:
            import deepspeed

            deepspeed.comm.destroy_process_group()  # and forgets what it has made of it
            DeepSpeedModule.met = False

    # ---- verbs of TrainableModule

    def _forward(self, layout: Layout, needs: Sequence[str]) -> Outputs:
        if self.engine is None:
            return super()._forward(layout, needs)
        return self.engine(layout.to(self.device), needs=needs)

    def _backward(self, loss: Tensor) -> None:
        self.engine.backward(self.context.world_size * loss)  # DeepSpeed takes the mean over ranks

    def optimizer_step(self) -> float:
        self._set_learning_rate()
        self.engine.step()  # clears the gradient, and does nothing else with one that is not finite
        self.arena.reserve(self.context.model, "gradients", 0)
        return float(self.engine.get_global_grad_norm())

    def save(self, dir: str | Path) -> None:
        """In DeepSpeed's own format: the same number of ranks reads it."""
        self.engine.save_checkpoint(str(dir), tag=TAG, client_state={"progress": self.progress}, save_latest=False)
        if self.context.rank == 0:
            (Path(dir) / LAYOUT).write_text(json.dumps(self._layout, indent=1))

    def load(self, dir: str | Path) -> None:
        path = Path(dir) / LAYOUT
        if not path.is_file():
            raise FileNotFoundError(f"{dir} holds no checkpoint of a DeepSpeed engine (no {LAYOUT} there)")
        there, here = json.loads(path.read_text()), self._layout
        if wrong := [_difference(key, there.get(key), here[key]) for key in here if there.get(key) != here[key]]:
            raise ValueError(
                f"checkpoint {dir} is of another model or layout: {'; '.join(wrong)}. DeepSpeed reads a checkpoint "
                "with the stage and the number of processes that wrote it; weights alone go on from its `hf` directory"
            )
        _, client = self.engine.load_checkpoint(str(dir), tag=TAG)
        self.go_on_from(client["progress"])

    def tensors(self, part: str) -> Iterable[Tensor]:
        if self.engine is None or part not in ("weights", "optimizer"):
            return super().tensors(part)
        if part == "weights":  # a shard has its parameter beside it where that is small enough to be kept whole
            parameters = list(self.model.parameters())
            return [*(p for p in parameters if p.numel()), *(p.ds_tensor for p in parameters if _sharded(p))]
        state = self.optimizer.state if self.optimizer else {}
        return [
            *state,
            *(value for entries in state.values() for value in entries.values() if isinstance(value, Tensor)),
        ]

    @property
    def _gradient_size(self) -> int:
        """Bytes, on this rank: they are added up in float32."""
        elements = sum(getattr(p, "ds_numel", p.numel()) for p in self.model.parameters() if p.requires_grad)
        return 4 * elements // (self.context.world_size if self.config.deepspeed.stage > 1 else 1)

    def _whole(self, tensor: Tensor) -> Tensor:
        if self.engine is None:
            return super()._whole(tensor)
        import deepspeed

        if self.compute_dtype is not None and tensor.requires_grad:
            return deepspeed.utils.safe_get_full_fp32_param(tensor)
        if not _sharded(tensor):
            return tensor
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()

    # ---- building

    def _settings(self) -> dict[str, Any]:
        """DeepSpeed's configuration. We say where an update ends, by `step`."""
        config, own = self.config, self.config.deepspeed
        host = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        zero = {"stage": own.stage, **own.zero}
        zero |= {"offload_optimizer": host} if own.offload_optimizer else {}
        zero |= {"offload_param": host} if own.offload_parameters else {}
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
        """What a checkpoint must agree with."""
        shapes = {name: list(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in weights(self.model).items()}
        return {
            "deepspeed.stage": self.config.deepspeed.stage,
            "processes": self.context.world_size,
            "compute_dtype": self.config.compute_dtype or self.config.dtype,
            "weights": shapes,
        }


def _problems(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of the settings that ZeRO cannot follow."""
    if not config.frozen and config.optimizer.name != "adamw":
        yield (
            "optimizer.name",
            f" is `{config.optimizer.name}`: ZeRO hands the optimizer flat pieces of several parameters, and this one "
            "looks at whole ones; use `adamw`, or `module: fsdp`",
        )
    if config.cpu_offload:
        yield "cpu_offload", ": ZeRO has its own: `deepspeed.offload_optimizer`, `offload_parameters`"
    if changed := next((key for key in ("compile", "fp8") if getattr(config, key)), None):
        yield changed, ": under ZeRO layers compute as they come; use `module: fsdp`"
    if config.ema:
        yield "ema", ": no average is kept beside ZeRO's pieces; use `module: fsdp`"
    if config.lora and config.lora.base_bits:
        yield "lora.base_bits", ": ZeRO cannot share 4-bit weights out; use `module: fsdp`"
    if config.dtype != "float32" and not config.frozen:
        yield (
            "dtype",
            f" is {config.dtype}: ZeRO steps on weights in float32; use `dtype: float32` with "
            f"`compute_dtype: {config.dtype}`",
        )
    for option in config.deepspeed.zero:
        if option in OWNED:
            yield f"deepspeed.zero.{option}", f" is set by Coalign: {OWNED[option]}"


def meet(context: Context) -> None:
    """Make the process group that DeepSpeed takes for granted, also for a process alone."""
    if context.world_size > 1:
        join_process_group(context)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def require_deepspeed() -> None:
    """Raises ImportError with the line that installs a version that Coalign knows."""
    install = f"pip install 'coalign[deepspeed]' (DeepSpeed {SUPPORTED}.*)"
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        raise ImportError(f"module `deepspeed` needs DeepSpeed: {install}") from None
    if not found.startswith(f"{SUPPORTED}."):
        raise ImportError(f"module `deepspeed` works with DeepSpeed {SUPPORTED}.*; {found} is installed: {install}")


def load(device: torch.device) -> Any:
    """The package, computing on ``device``. ValueError where another model has it compute elsewhere in this process."""
    os.environ["LOCAL_RANK"] = "0"  # a process sees its own device only
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if (other := deepspeed.get_accelerator().device_name()) != device.type:
        raise ValueError(
            f"a model is to compute on {device.type}, and DeepSpeed computes on {other} in this process already"
        )
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for minutes; gloo does its work
    return deepspeed


def check_known(options: Iterable[str], model: str) -> None:
    """Raises ValueError for a key that DeepSpeed's section `zero_optimization` does not have."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    if unknown := [name for name in options if name not in known]:
        where, close = f"models.{model}.deepspeed.zero.{unknown[0]}", suggest(unknown[0], known - OWNED.keys())
        raise ValueError(f"{where} is no key of DeepSpeed's zero_optimization{close}")


def _sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "ds_tensor")


def _difference(key: str, there: Any, here: Any) -> str:
    if not isinstance(here, dict):
        return f"{key} is {there} there and {here} here"
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    shown = ", ".join(f"{name} is {there.get(name)} there and {here.get(name)} here" for name in names[:3])
    return shown + (f" (and {len(names) - 3} more)" if len(names) > 3 else "")
