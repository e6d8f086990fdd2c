"""Megatron models of tiny checkpoints, on the ranks that have joined (coalign_megatron.backend.build.join_ranks), and
what they must agree with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from coalign.backends.hf.heads import LanguageModelHead
from coalign.backends.hf.row_sharding import RankAxis, RowSharding
from coalign.backends.packing import pack
from coalign.data.batch import Batch
from coalign_megatron import families
from coalign_megatron.backend.build import create_transformer_config
from coalign_megatron.backend.model import PackedGPT
from coalign_megatron.backend.partition import (
    HuggingFaceExport,
    ParallelSizes,
    WeightPartition,
    choose_vocabulary_multiple,
)
from coalign_megatron.layouts.megatron import MegatronLayout, split_layers
from packages.megatron.tests.weight_families import remote
from packages.megatron.tests.weight_families.checkpoints import (
    CASES,
    LLAMA_LIKE,
    MLA,
    NATIVE,
    REMOTE,
    checkpoint,
    native,
    random_model,
)
from tests.backends.batches import rollout

FORWARD = {
    "qwen": remote.qwen,
    "chatglm": remote.chatglm,
    "baichuan_7b": lambda *given: remote.baichuan(*given, alibi=False, normalised=False),
    "baichuan_13b": lambda *given: remote.baichuan(*given, alibi=True, normalised=False),
    "baichuan2_7b": lambda *given: remote.baichuan(*given, alibi=False, normalised=True),
}


# What transformers can be, and the families' own checkpoints are not: the type of model, and settings.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_yarn": ("glm", LLAMA_LIKE | {"head_dim": 8, "rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    "deepseek_v3_yarn": (
        "deepseek_v3",
        LLAMA_LIKE
        | MLA
        | {"q_lora_rank": 16, "rms_norm_eps": 1e-2, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
}
EVERY = [*CASES, *MORE]


def rows() -> Batch:
    """Of four prompts three responses each, which have their prompt in common."""
    return rollout((5, 9, 12, 30), 3, vocab=131)


def loss(outputs: dict[str, Tensor]) -> Tensor:
    """Some of the log-probs up, some down."""
    return (outputs["logprobs"] * torch.linspace(-1, 1, len(outputs["logprobs"]))).sum()


@dataclass(frozen=True)
class Reference:
    """A model as transformers has it, or as it is written down: config.json, the tensors by name, and what it makes of
    ``rows``: of the trained tokens their logprobs and the entropy of all tokens' there, and the gradients of ``loss``.

    ``in_memory``: tensors as transformers has them, not as they are in files.
    """

    hf: dict[str, Any]
    tensors: dict[str, Tensor]
    in_memory: bool
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def reference(case: str) -> Reference:
    if case in NATIVE or case in MORE:
        model = native(case) if case in NATIVE else random_model(*MORE[case])
        hf = model.config.to_dict()
        tensors, parameters = model.state_dict(), dict(model.named_parameters())
        outputs = _outputs(lambda tokens: model(input_ids=tokens[None], use_cache=False).logits[0])
    else:
        hf, tensors = checkpoint(case)
        parameters = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        outputs = _outputs(lambda tokens: FORWARD[case](hf, parameters, tokens))
    gradients = torch.autograd.grad(loss(outputs), list(parameters.values()))
    return Reference(
        hf=hf,
        tensors={name: tensor.detach() for name, tensor in tensors.items()},
        in_memory=case not in REMOTE,
        outputs={name: tensor.detach() for name, tensor in outputs.items()},
        gradients=dict(zip(parameters, gradients, strict=True)),
    )


def _outputs(logits: Any) -> dict[str, Tensor]:
    found = []
    for row in rows().rows():
        tokens = row["tokens"].long()
        every = logits(tokens)[:-1].log_softmax(-1)
        chosen = every.gather(1, tokens[1:, None])[:, 0]
        found.append(torch.stack([chosen, -(every.exp() * every).sum(-1)])[:, row["loss_mask"][1:]])
    logprobs, entropy = torch.cat(found, 1)
    return {"logprobs": logprobs, "entropy": entropy}


class Megatron:
    """The same as a Megatron model of this rank. To be used within coalign_megatron.backend.cpu.on_cpu."""

    def __init__(self, reference: Reference, sizes: ParallelSizes, **settings: Any) -> None:
        self.rank, self.reference = dist.get_rank(), reference
        family = families.find_family(reference.hf)
        described = family.config(reference.hf)
        multiple = choose_vocabulary_multiple(described, sizes.tensor)
        layout = MegatronLayout(described, sizes.mesh(dist.get_world_size()), split_layers(described.num_layers))
        self.weights = WeightPartition(family, layout, multiple)
        padded = -(-described.vocab_size // multiple) * multiple
        config = create_transformer_config(described, sizes, **settings)
        self.model = PackedGPT(described, config, vocabulary=padded, read=LanguageModelHead())
        own = self.own()
        for name, tensor in self.weights.read(self.rank, reference.tensors.__getitem__, in_memory=reference.in_memory):
            own.pop(name).copy_(tensor)
        assert not own, f"nothing was read for {sorted(own)}"
        context = RankAxis.of(parallel_state.get_context_parallel_group())
        self.rows = RowSharding(context, RankAxis(), multiple=sizes.tensor)

    def own(self) -> dict[str, Tensor]:
        return {f"0/{name}": t for name, t in self.model.state_dict().items() if isinstance(t, Tensor)}

    def outputs(self) -> dict[str, Tensor]:
        part = self.rows.cut(pack(rows()))
        return self.rows.gather(self.model(part.layout, self.rows.heads, ("entropy",)), part)

    def gradients(self) -> dict[str, Tensor]:
        """By the names of Hugging Face tensors: those that this rank makes."""
        loss(self.outputs()).backward()
        gradients = {f"0/{name}": self._summed(parameter) for name, parameter in self.model.named_parameters()}
        # What has none is held, too: biases of experts.
        own = {name: gradients.get(name, torch.zeros_like(tensor)) for name, tensor in self.own().items()}
        return dict(HuggingFaceExport(self.weights, self.rank, in_memory=self.reference.in_memory).tensors(own))

    def _summed(self, parameter: Tensor) -> Tensor:
        """Over the ranks that have other tokens of a row, as megatron-core does before a step."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        groups = self.model.pg_collection
        if getattr(parameter, "sequence_parallel", False) and groups.tp.size() > 1:
            dist.all_reduce(gradient, group=groups.tp)
        if getattr(parameter, "allreduce", True) and groups.cp.size() > 1:
            dist.all_reduce(gradient, group=groups.cp)
        return gradient

    def differences(self) -> tuple[float, float, str]:
        """From the reference: the greatest of all outputs; of all gradients, as a part of the tensor's greatest one,
        and whose it is."""
        expected = self.reference.outputs
        with torch.no_grad():
            found = self.outputs()
        outputs = max(float((found[name] - expected[name]).abs().max()) for name in expected)
        gradients, expected = self.gradients(), self.reference.gradients
        # Some are only rounding: a bias of keys is the same for all that softmax compares.
        least = 1e-2 * max(float(tensor.abs().max()) for tensor in expected.values())
        parts = {
            name: float((gradients[name].view_as(tensor) - tensor).abs().max()) / max(float(tensor.abs().max()), least)
            for name, tensor in expected.items()
            if name in gradients
        }
        worst = max(parts, key=parts.__getitem__)
        return outputs, parts[worst], worst
