"""Expert parallelism: each rank holds some of the experts, and tokens are sent to theirs and back.

transformers does the exchange: a model's plan says which modules hold experts, and two all-to-alls surround their
forward. No two ranks have the same token (coalign.backends.hf.ranks), so any ranks can share experts.
"""

from __future__ import annotations

import re
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, __version__

DISPATCH, SLICED = "ep_dispatch_experts", "moe_tp_experts"  # styles in the plans of transformers


def find_style(name: str, plan: dict[str, str]) -> str | None:
    """What a model's ``plan``, whose keys are patterns (`layers.*.mlp.up_proj`), says about ``name``."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def find_experts(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that hold the stacked experts of a layer, according to the model's plans."""
    modules = model.named_modules()
    return [m for n, m in modules if find_style(n, model.ep_plan) == DISPATCH or find_style(n, model.tp_plan) == SLICED]


def find_unfit_experts(model: PreTrainedModel, ways: int) -> str | None:
    """Why the experts of a model cannot be distributed over so many ranks; None if they can."""
    experts = [module for name, module in model.named_modules() if find_style(name, model.ep_plan) == DISPATCH]
    if not experts and find_experts(model):
        return f"the plans of transformers {__version__} cut experts and distribute none; those of 5.19 do"
    if not experts:
        return f"{type(model).__name__} has no experts to distribute"
    counts = {cast(int, module.num_experts) for module in experts}
    return None if not any(count % ways for count in counts) else f"it does not divide the {max(counts)} experts"


def apply_expert_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Distribute the experts (on the meta device) of all layers over ``mesh``, which has one dimension."""
    from transformers.distributed.tensor_parallel import apply_expert_parallelism  # not in every version

    apply_expert_parallelism(model, mesh, cast(Any, None), model.ep_plan)  # no mesh of tensor parallelism
