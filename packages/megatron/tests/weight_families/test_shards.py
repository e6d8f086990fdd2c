"""Layouts of models over ranks: by hand for each rule, and 1,000 random pairs of them without a wrong byte."""

from __future__ import annotations

import random

import pytest
import torch

from coalign.weights.sync.transport import WeightError
from coalign_megatron.layouts.megatron import Mesh
from coalign_megatron.layouts.shards import TensorSpec, cut, join, overlap, plan, reshard, subtract
from packages.megatron.tests.weight_families.rules import (
    Attention,
    ParallelLayout,
    Rule,
    Split,
    UncutTensor,
    contiguous,
)


def lay(rules, full, stages=(), experts=((),), **mesh):
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in full.items()}
    return ParallelLayout(Mesh(**mesh), rules, specs, stages, experts)


def own(layout, full, rank):
    return dict(cut(full.__getitem__, layout.shards(rank)))


# ---- by hand


def test_gate_and_up_are_cut_before_they_are_joined():
    gate, up = torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)
    layout = lay([Rule("fc1", Split(("gate", "up")), "every")], {"gate": gate, "up": up}, tensor=2)
    for rank in range(2):
        expected = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        assert torch.equal(own(layout, {"gate": gate, "up": up}, rank)["fc1"], expected)
    down = {"down": torch.arange(12.0).view(2, 6)}  # columns of a row-parallel weight
    layout = lay([Rule("fc2", Split(("down",), dim=1), "every")], down, tensor=3)
    assert own(layout, down, 1)["fc2"].tolist() == [[2, 3], [8, 9]]


def test_grouped_queries_interleaved_as_megatron_packs_them():
    heads, groups, d, hidden = 6, 2, 2, 3
    full = {name: torch.randn(n * d, hidden) for name, n in (("q", heads), ("k", groups), ("v", groups))}
    packed = torch.cat(
        [full["q"].view(groups, 3 * d, hidden), full["k"].view(groups, d, hidden), full["v"].view(groups, d, hidden)], 1
    )
    rules = [Rule("qkv", Attention("q", "k", "v", heads, groups, d, interleaved=True), "every")]
    layout = lay(rules, full, tensor=2)
    for rank in range(2):
        assert torch.equal(own(layout, full, rank)["qkv"], packed[rank])


def test_one_group_of_keys_stands_on_every_rank():
    full = {"q": torch.arange(8.0).view(8, 1), "k": torch.tensor([[10.0], [11]]), "v": torch.tensor([[20.0], [21]])}
    layout = lay([Rule("qkv", Attention("q", "k", "v", 4, 1, 2), "every")], full, tensor=4)
    assert own(layout, full, 2)["qkv"].flatten().tolist() == [4, 5, 10, 11, 20, 21]


def test_heads_that_do_not_divide_bring_the_groups_they_attend_with():
    full = {"q": torch.arange(5.0).view(5, 1), "k": torch.tensor([[10.0]] * 5), "v": torch.tensor([[20.0]] * 5)}
    full["k"] += torch.arange(5.0).view(5, 1)
    layout = lay([Rule("qkv", Attention("q", "k", "v", 5, 5, 1), "every")], full, tensor=2)
    assert own(layout, full, 0)["qkv"].flatten().tolist() == [0, 1, 10, 11, 20, 20]
    assert own(layout, full, 1)["qkv"].flatten().tolist() == [2, 3, 4, 12, 13, 14, 20, 20, 20]


def test_a_vocabulary_is_padded_at_its_end():
    full = {"embed": torch.arange(1.0, 6.0).view(5, 1)}
    layout = lay([Rule("words", Split(("embed",), multiple=8), "every")], full, tensor=2)
    assert own(layout, full, 0)["words"].flatten().tolist() == [1, 2, 3, 4]
    assert own(layout, full, 1)["words"].flatten().tolist() == [5, 0, 0, 0]


def test_tied_embeddings_stand_on_the_first_stage_and_the_last():
    full = {"embed": torch.ones(2, 2), "model.0": torch.zeros(1), "model.1": torch.zeros(1), "model.2": torch.zeros(1)}
    rules = [
        Rule("embedding", UncutTensor("embed"), "first"),
        Rule("layers.{own_layer}", UncutTensor("model.{layer}")),
        Rule("output", UncutTensor("embed"), "last"),
    ]
    layout = lay(rules, full, [[0], [1], [2]], pipeline=3)
    assert [[shard.name for shard in shards] for shards in layout.ranks()] == [
        ["embedding", "layers.0"],
        ["layers.0"],
        ["layers.0", "output"],
    ]


def test_experts_of_a_rank_stacked():
    full = {f"experts.{e}.up": torch.full((4, 2), float(e)) for e in range(4)}
    rules = [Rule("up", Split(("experts.{expert}.up",)), "every", experts=True, stacked=True)]
    layout = lay(rules, full, experts=[[0, 2], [1, 3]], tensor=2, data=2, expert=2, expert_tensor=2)
    assert [own(layout, full, rank)["up"][:, 0, 0].tolist() for rank in range(4)] == [[0, 2], [0, 2], [1, 3], [1, 3]]
    assert own(layout, full, 0)["up"].shape == (2, 2, 2)


def test_what_cannot_be_laid_out_is_refused():
    with pytest.raises(ValueError, match=r"expert 3 × expert_tensor 1 does not divide the 2 × 2 ranks"):
        Mesh(tensor=2, data=2, expert=3)
    half = lay([Rule("x", Split(("a",)), "every")], {"a": torch.zeros(4)}, tensor=2).shards(0)
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
    """Full tensors of random bytes, of a model of random sizes."""
    groups = rng.choice([1, 1, 2, 3, 4])
    size = {
        "layers": rng.randint(1, 4),
        "groups": groups,
        "heads": groups * rng.choice([1, 2, 3, 7]),
        "head": rng.choice([1, 2, 4]),
        "hidden": rng.randint(1, 6),
        "ffn": rng.randint(1, 9),
        "vocabulary": rng.randint(1, 40),
        "experts": rng.choice([0, 0, 1, 2, 4, 6]),
        "tied": rng.random() < 0.5,
    }
    h, q, kv = size["hidden"], size["heads"] * size["head"], groups * size["head"]
    shapes = {"embed": (size["vocabulary"], h), "norm": (h,)}
    if not size["tied"]:
        shapes["head"] = (size["vocabulary"], h)
    for i in range(size["layers"]):
        shapes |= {f"{i}.q": (q, h), f"{i}.k": (kv, h), f"{i}.v": (kv, h), f"{i}.o": (h, q), f"{i}.norm": (h,)}
        shapes |= {f"{i}.q_bias": (q,), f"{i}.k_bias": (kv,), f"{i}.v_bias": (kv,)}
        for e in range(size["experts"]):
            shapes |= {f"{i}.{e}.{what}": (size["ffn"], h) for what in ("gate", "up")} | {
                f"{i}.{e}.down": (h, size["ffn"])
            }
        if not size["experts"]:
            shapes |= {f"{i}.gate": (size["ffn"], h), f"{i}.up": (size["ffn"], h), f"{i}.down": (h, size["ffn"])}
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    full = {
        name: torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator) for name, shape in shapes.items()
    }
    return size, full


def random_layout(rng, size, full):
    """One of the ways in which backends lay such a model out."""
    tensor, data = rng.choice([1, 1, 2, 3, 4, 8]), rng.choice([1, 1, 2, 3])
    expert, expert_tensor = 1, 1
    if size["experts"]:
        divisors = [n for n in range(1, tensor * data + 1) if tensor * data % n == 0]
        expert = rng.choice(divisors)
        expert_tensor = rng.choice([n for n in divisors if tensor * data // expert % n == 0])
    pipeline = rng.randint(1, size["layers"])
    layers, experts = list(range(size["layers"])), list(range(size["experts"]))
    stages = contiguous(size["layers"], pipeline)
    if rng.random() < 0.3:  # interleaved
        stages = [layers[stage::pipeline] for stage in range(pipeline)]
    owners = [experts[i * len(experts) // expert : (i + 1) * len(experts) // expert] for i in range(expert)]
    if rng.random() < 0.3:
        owners = [experts[i::expert] for i in range(expert)]
    heads = (size["heads"], size["groups"], size["head"])
    multiple, layer = rng.choice([1, 8, 128]) * tensor, "layers.{own_layer}."
    rules = [Rule("words", Split(("embed",), multiple=multiple), "first"), Rule("norm", UncutTensor("norm"), "last")]
    rules.append(Rule("output", Split(("embed" if size["tied"] else "head",), multiple=multiple), "last"))
    rules.append(Rule(layer + "norm", UncutTensor("{layer}.norm")))
    rules.append(Rule(layer + "o", Split(("{layer}.o",), dim=1, unit=size["head"])))
    packed = rng.choice(["blocks", "interleaved", "separate"])
    for end in ("", "_bias"):
        names = [f"{{layer}}.{what}{end}" for what in "qkv"]
        if packed == "separate":
            rules += [Rule(layer + name[8:], Split((name,))) for name in names]
        else:
            rules.append(Rule(layer + "qkv" + end, Attention(*names, *heads, interleaved=packed == "interleaved")))
    middle = "{expert}." if size["experts"] else ""
    stacked = bool(size["experts"]) and rng.random() < 0.5
    inside = layer + (("experts." if stacked else "experts.{own_expert}.") if size["experts"] else "")
    many = {"experts": bool(size["experts"]), "stacked": stacked}
    gated = ("{layer}." + middle + "gate", "{layer}." + middle + "up")
    fused = [gated] if rng.random() < 0.5 else [(name,) for name in gated]
    rules += [Rule(f"{inside}fc1.{i}", Split(names), **many) for i, names in enumerate(fused)]
    rules.append(Rule(inside + "fc2", Split(("{layer}." + middle + "down",), dim=1), **many))
    mesh = {"tensor": tensor, "data": data, "pipeline": pipeline, "expert": expert, "expert_tensor": expert_tensor}
    return lay(rules, full, stages, owners, **mesh)


def check_pair(seed):
    rng = random.Random(seed)
    size, full = random_model(rng)
    source, target = random_layout(rng, size, full), random_layout(rng, size, full)
    sources = source.ranks()
    for shards in sources:
        assert len({shard.name for shard in shards}) == len(shards), seed
    held = [dict(cut(full.__getitem__, shards)) for shards in sources]
    fetch = lambda rank, name: held[rank][name]  # noqa: E731
    for name, tensor in join(source.specs, sources, fetch):
        assert torch.equal(tensor, full[name]), (seed, name)
    for rank in rng.sample(range(target.mesh.size), min(2, target.mesh.size)):
        shards = target.shards(rank)
        moves = dict(plan(shards, sources, near=rank))
        found, wanted = dict(reshard(target.specs, shards, moves, fetch)), dict(cut(full.__getitem__, shards))
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]), (seed, name)
        moved = sum(_count(move.target_box) for each in moves.values() for move in each)
        assert moved == sum(_count(piece.local) for shard in shards for piece in shard.pieces)  # nothing twice


def _count(box):
    return torch.Size(stop - start for start, stop in box).numel()


@pytest.mark.parametrize("part", [pytest.param(i, marks=pytest.mark.slow if i > 0 else ()) for i in range(10)])
def test_a_thousand_pairs_of_layouts_without_a_wrong_byte(part):
    for seed in range(part * 100, part * 100 + 100):
        check_pair(seed)
