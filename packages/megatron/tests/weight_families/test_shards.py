"""Shards of layouts over ranks: 1,000 random pairs of layouts without a wrong byte, boxes, and what is refused."""

import random
from itertools import pairwise

import pytest
import torch

from coalign.weights.sync.transport import WeightError
from coalign_megatron import families
from coalign_megatron.layouts.megatron import MegatronLayout, Mesh
from coalign_megatron.layouts.shards import Shard, ShardBox, TensorSpec, cut, join, overlap, plan, reshard, subtract
from packages.megatron.tests.convert import made


def test_what_cannot_be_laid_out_is_refused():
    with pytest.raises(ValueError, match=r"expert 3 × expert_tensor 1 does not divide the 2 × 2 ranks"):
        Mesh(tensor=2, data=2, expert=3)
    half = [Shard("x", (2,), "a", (ShardBox("a", ((0, 2),), ((0, 2),)),))]
    with pytest.raises(WeightError, match=r"no source rank holds \[\(2, 4\)\] of 'a', wanted for 'a'"):
        list(join({"a": TensorSpec((4,), torch.float32)}, [half], lambda rank, name: torch.zeros(2)))


def test_boxes():
    assert overlap(((0, 3), (2, 5)), ((1, 9), (0, 4))) == ((1, 3), (2, 4))
    assert overlap(((0, 3),), ((3, 4),)) is None
    rest = subtract(((0, 3), (0, 3)), ((1, 2), (1, 2)))
    counted = torch.zeros(3, 3)
    for (a, b), (c, d) in rest:
        counted[a:b, c:d] += 1
    assert counted.tolist() == [[1, 1, 1], [1, 0, 1], [1, 1, 1]]


# ---- 1,000 pairs


def random_model(rng):
    """A family, its configuration of random sizes, and full tensors of random bytes."""
    sizes = {
        "num_hidden_layers": rng.randint(1, 4),
        "num_attention_heads": 8,
        "num_key_value_heads": rng.choice([1, 2, 4, 8]),
        "hidden_size": rng.choice([32, 64]),
        "intermediate_size": 8 * rng.randint(1, 3),
        "vocab_size": rng.randint(1, 40),
        "tie_word_embeddings": rng.random() < 0.5,
        "num_local_experts": rng.choice([2, 4, 6]),
    }
    hf = rng.choice([made.LLAMA, made.QWEN2, made.MIXTRAL]) | sizes
    family = families.find_family(hf)
    config = family.config(hf)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    full = {
        name: torch.randint(1, 256, source.shape, dtype=torch.uint8, generator=generator)
        for name, source in family.sources(config).items()
    }
    return family, config, full


def random_layout(rng, family, config):
    """The shards of each rank and chunk of one of the ways in which Megatron lays such a model out."""
    tensor, data = rng.choice([1, 1, 2, 4, 8]), rng.choice([1, 1, 2, 3])
    expert, expert_tensor = 1, 1
    if config.num_moe_experts:
        divisors = [n for n in range(1, tensor * data + 1) if tensor * data % n == 0]
        expert = rng.choice([n for n in divisors if config.num_moe_experts % n == 0])
        fitting = [n for n in divisors if tensor * data // expert % n == 0 and config.moe_ffn_hidden_size % n == 0]
        expert_tensor = rng.choice(fitting)
    layers = list(range(config.num_layers))
    pipeline = rng.randint(1, len(layers))
    virtual = rng.randint(1, len(layers) // pipeline)
    ends = [0, *sorted(rng.sample(layers[1:], pipeline * virtual - 1)), len(layers)]
    runs = [tuple(layers[start:stop]) for start, stop in pairwise(ends)]
    mesh = Mesh(tensor, pipeline, data, expert, expert_tensor)
    layout = MegatronLayout(
        config, mesh, tuple(tuple(runs[s::pipeline]) for s in range(pipeline)), rng.choice(["local", "te"])
    )
    parameters = family.parameters(config, vocab_divisor=rng.choice([1, 8, 128]) * tensor)
    return [layout.shards(parameters, mesh.at(rank), i) for rank in range(mesh.size) for i in range(virtual)]


def check_pair(seed):
    rng = random.Random(seed)
    family, config, full = random_model(rng)
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in full.items()}
    sources, targets = random_layout(rng, family, config), random_layout(rng, family, config)
    for shards in sources:
        assert len({shard.name for shard in shards}) == len(shards), seed
    held = [dict(cut(full.__getitem__, shards)) for shards in sources]
    fetch = lambda rank, name: held[rank][name]  # noqa: E731
    for name, tensor in join(specs, sources, fetch):
        assert torch.equal(tensor, full[name]), (seed, name)
    for rank in rng.sample(range(len(targets)), min(2, len(targets))):
        shards = targets[rank]
        moves = dict(plan(shards, sources, near=rank))
        found, wanted = dict(reshard(specs, shards, moves, fetch)), dict(cut(full.__getitem__, shards))
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]), (seed, name)
        moved = sum(_count(move.target_box) for copies in moves.values() for move in copies)
        assert moved == sum(_count(piece.local) for shard in shards for piece in shard.pieces)  # nothing twice


def _count(box):
    return torch.Size(stop - start for start, stop in box).numel()


@pytest.mark.parametrize("part", [pytest.param(i, marks=pytest.mark.slow if i > 0 else ()) for i in range(10)])
def test_a_thousand_pairs_of_layouts_without_a_wrong_byte(part):
    for seed in range(part * 100, part * 100 + 100):
        check_pair(seed)
