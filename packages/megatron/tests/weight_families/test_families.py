"""Every family: its tensors are visited once and its parameters filled once, and the way back is the way there."""

import pytest
import torch

from coalign_megatron import families
from coalign_megatron.layouts.megatron import MegatronLayout, Mesh, split_layers
from coalign_megatron.layouts.shards import TensorSpec, cut, join
from packages.megatron.tests.weight_families.checkpoints import CASES, FAMILY, MOE, NATIVE, checkpoint, native
from packages.megatron.tests.weight_families.parameters import from_hf, join_parts, part, to_hf

PADDING = 8 * 4  # divides by every tensor-parallel size here, and not by the 131 tokens


def setup(case):
    hf, tensors = checkpoint(case)
    family = families.find_family(hf)
    config = family.config(hf)
    return family, config, tensors, family.parameters(config, vocab_divisor=PADDING)


def views(family, config, tensors):
    return {name: source.read(tensors[name]) for name, source in family.sources(config).items()}


def files(family, config, views):
    """What ``views`` are in the files."""
    sources = family.sources(config)
    return {name: sources[name].write(view) for name, view in views.items()}


def same(family, config, back, tensors):
    """Bit for bit, but for rows that the model never reads, which come back as zeros."""
    assert back.keys() == tensors.keys()
    for name, source in family.sources(config).items():
        expected = tensors[name].clone()
        expected[: source.skip] = 0
        assert torch.equal(back[name], expected), name


@pytest.mark.parametrize("case", CASES)
def test_the_family_is_found(case):
    assert families.find_family(checkpoint(case)[0]).name == FAMILY[case]


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_visited_once_and_every_parameter_filled_once(case):
    family, config, tensors, parameters = setup(case)
    visited = {name: torch.zeros(view.shape) for name, view in views(family, config, tensors).items()}
    for parameter in parameters.values():
        filled = torch.zeros(parameter.shape)
        for piece in parameter.pieces:
            filled[tuple(slice(*ends) for ends in piece.local)] += 1
            visited[piece.name][tuple(slice(*ends) for ends in piece.full)] += 1
        real = config.vocab_size if parameter.sharding == "vocabulary" else parameter.shape[0]
        assert (filled[:real] == 1).all() and (filled[real:] == 0).all(), parameter.name
    assert visited.keys() == tensors.keys()
    assert all((count == 1).all() for count in visited.values())
    assert family.stored_names(config, tensors) == {name: name for name in tensors}


@pytest.mark.parametrize("case", CASES)
def test_parameters_and_back(case):
    family, config, tensors, parameters = setup(case)
    back = {}
    for parameter in parameters.values():
        full = from_hf(parameter, tensors)
        assert torch.equal(join_parts(parameter, [part(parameter, full, i, 2) for i in range(2)]), full)
        back |= to_hf(parameter, full)
    same(family, config, back, tensors)


def round_trip(case, tensor, pipeline, expert, spec="local", expert_tensor=1):
    family, config, tensors, parameters = setup(case)
    mesh = Mesh(tensor, pipeline, expert * expert_tensor, expert, expert_tensor)
    layout = MegatronLayout(config, mesh, split_layers(config.num_layers, pipeline), spec)
    ranks = [layout.shards(parameters, mesh.at(rank)) for rank in range(mesh.size)]
    full = views(family, config, tensors)
    held = [dict(cut(full.__getitem__, shards)) for shards in ranks]
    specs = {name: TensorSpec(tuple(view.shape), view.dtype) for name, view in full.items()}
    back = dict(join(specs, ranks, lambda rank, name: held[rank][name]))
    same(family, config, files(family, config, back), tensors)


LAYOUTS = [
    pytest.param(case, tensor, pipeline, expert, id=f"{case}-tp{tensor}-pp{pipeline}-ep{expert}")
    for case in CASES
    for tensor in (1, 2, 4)
    for pipeline in (1, 2)
    for expert in ((1, 2) if case in MOE else (1,))
]


@pytest.mark.parametrize(("case", "tensor", "pipeline", "expert"), LAYOUTS)
def test_round_trip_is_bit_exact(case, tensor, pipeline, expert):
    """Through what the ranks of every layout hold, by each spec's names; experts whole, and cut in two."""
    config = setup(case)[1]
    for spec in ("local", "te") if config.num_moe_experts or config.qk_layernorm else ("local", "te", "legacy"):
        for expert_tensor in (1, 2) if expert > 1 else (1,):
            round_trip(case, tensor, pipeline, expert, spec, expert_tensor)


@pytest.mark.parametrize("case", NATIVE)
def test_names_in_memory_are_those_of_the_model(case):
    family, config, _, _ = setup(case)
    model = native(case)
    buffers = {name for name, _ in model.named_buffers() if name.endswith("correction_bias")}
    assert family.sources(config, in_memory=True).keys() == dict(model.named_parameters()).keys() | buffers


@pytest.mark.parametrize("case", MOE)
def test_experts_that_a_model_has_stacked_in_memory(case):
    family, config, tensors, parameters = setup(case)
    memory = {name: tensor for name, tensor in native(case).state_dict().items() if "rotary" not in name}
    live = family.parameters(config, vocab_divisor=PADDING, in_memory=True)
    assert family.sources(config, in_memory=True).keys() == memory.keys()
    for name, parameter in live.items():
        assert torch.equal(from_hf(parameter, memory), from_hf(parameters[name], tensors)), name
    mesh = Mesh(data=2, expert=2)
    layout = MegatronLayout(config, mesh, split_layers(2))
    ranks = [layout.shards(live, mesh.at(rank)) for rank in range(2)]
    held = [dict(cut(memory.__getitem__, shards)) for shards in ranks]
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in memory.items()}
    back = dict(join(specs, ranks, lambda rank, name: held[rank][name]))
    assert all(torch.equal(back[name], memory[name]) for name in memory)
