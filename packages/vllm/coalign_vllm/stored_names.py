"""The names and shapes that a model's weights have in checkpoints, which vLLM reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from coalign.backends import vision_language
from coalign.backends.pretrained import building, transpose_back


class StoredNames:
    """Gives weights of ``model`` (which may have none itself) the names and shapes that checkpoints have. transformers
    stacks experts in memory and renames some modules; the files of most families, and engines that read them, have one
    tensor for each expert. ``source``: the directory of the model's own files, if it has any."""

    def __init__(self, model: PreTrainedModel, source: Path) -> None:
        self.model = model
        # As transformers sets it for a model that it loaded. For one without weights it would omit prefixes of towers.
        names = vision_language.list_weight_names(source)
        cast(Any, model)._weight_conversions = vision_language.find_conversions(model, names)
        bare = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
        self.changed = {name for name, tensor in bare.items() if self._revert(name, tensor).get(name) is not tensor}

    @building()
    def _revert(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        with transpose_back():
            return revert_weight_conversion(self.model, {name: tensor})

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """(stored name, stored tensor) of each of ``weights``, which have the names that they have in memory."""
        for name, tensor in weights:
            yield from self._revert(name, tensor).items() if name in self.changed else [(name, tensor)]
