"""Plans that transformers' models bring along: patterns of names (`layers.*.mlp.up_proj`) and what to do there.

Expert parallelism: each rank has some of the experts, and tokens travel to theirs and back.

The exchange is transformers': a model says in its plan which modules hold experts, and their forward is surrounded by
two all-to-alls. As no two ranks have the same token (coalign.backends.hf.ranks), any ranks can share experts.
"""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, __version__


def find_style(name: str, plan: dict[str, str]) -> str | None:
    """What ``plan`` says about the module or parameter ``name``."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


DISPATCH, SLICED = "ep_dispatch_experts", "moe_tp_experts"


def find_experts(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that hold the experts of a layer, stacked, as the model's plans call them."""
    modules = model.named_modules()
    return [m for n, m in modules if find_style(n, model.ep_plan) == DISPATCH or find_style(n, model.tp_plan) == SLICED]


def find_unfit_experts(model: PreTrainedModel, ways: int) -> str | None:
    """Why the experts of a model cannot be dealt out over so many ranks."""
    dealt = [module for name, module in model.named_modules() if find_style(name, model.ep_plan) == DISPATCH]
    if not dealt and find_experts(model):
        return f"the plans of transformers {__version__} cut experts, and deal none out; 5.19 does"
    if not dealt:
        return f"{type(model).__name__} has no experts that could be dealt out"
    counts = {module.num_experts for module in dealt}
    return None if not any(count % ways for count in counts) else f"it does not divide the {max(counts)} experts"


def apply_expert_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Deal the experts (without storage yet) of all layers out over ``mesh``, of one dimension."""
    from transformers.distributed.tensor_parallel import apply_expert_parallelism  # not in every version

    apply_expert_parallelism(model, mesh, None, model.ep_plan)
