import math
from functools import partial

import pytest
import torch
from torch import nn

from coalign.backends import optim
from coalign.backends.optim import build_optimizer, clip_gradients
from coalign.config.schema import ModelConfig, OptimizerConfig
from tests.backends.batches import rollout
from tests.backends.test_fsdp import module, same, weights
from tests.tiny import tiny_model_dir

NAMES = ["adamw", "adamw_8bit", "adafactor", "muon"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), hidden=64))  # embeddings of 20480: 8 bits


class Net(nn.Module):
    """An embedding, one layer with a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layer = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4, bias=False))
        self.head = nn.Linear(4, 3)


def pair() -> tuple[Net, Net]:
    torch.manual_seed(0)
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def train(net: Net, *optimizers: torch.optim.Optimizer, steps: int = 4) -> list[torch.Tensor]:
    for step in range(steps):
        tokens = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(step))
        net.head(net.layer(net.embed(tokens))).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


def build_for(net: Net, **config):
    return build_optimizer(net.parameters(), OptimizerConfig(lr=0.05, weight_decay=0.5, **config), layers=[net.layer])


def vectors_apart(net: Net) -> list[dict]:
    return [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize(
    ("name", "build", "settings"),
    [
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.99), "eps": 1e-6}),
        ("adafactor", partial(torch.optim.Adafactor, foreach=False), {}),
    ],
)
def test_steps_are_those_of_torch_and_spare_vectors_from_decay(name, build, settings):
    ours, theirs = pair()
    reference = build(vectors_apart(theirs), lr=0.05, **settings)
    torch.testing.assert_close(train(ours, build_for(ours, name=name, **settings)), train(theirs, reference))


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest():
    ours, theirs = pair()
    matrices = [theirs.layer[0].weight, theirs.layer[2].weight]
    rest = [
        {"params": [theirs.embed.weight, theirs.head.weight], "weight_decay": 0.5},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    reference = (
        torch.optim.Muon(matrices, lr=0.05, weight_decay=0.5, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.05, betas=(0.9, 0.999), eps=1e-8),
    )
    torch.testing.assert_close(train(ours, build_for(ours, name="muon")), train(theirs, *reference))


def test_muon_finds_the_layers_of_a_model(path):
    trainer = module(path, optimizer={"name": "muon"})
    state = trainer.optimizer.state
    chosen = {name for name, p in trainer.model.named_parameters() if "momentum_buffer" in state[p]}
    assert len(chosen) == 2 * 7 and all(".layers." in name and "proj.weight" in name for name in chosen)


@pytest.mark.parametrize("name", NAMES)
def test_only_what_requires_a_gradient_is_optimised(name):
    net, _ = pair()
    net.embed.requires_grad_(False)
    net.layer[0].requires_grad_(False)
    optimizer = build_for(net, name=name)
    chosen = {p for group in optimizer.param_groups for p in group["params"]}
    assert chosen == set(optimizer.state) == {p for p in net.parameters() if p.requires_grad}


def test_what_cannot_be_optimised_is_refused(path, tmp_path, monkeypatch):
    for name in NAMES:
        with pytest.raises(ValueError, match="nothing to train"):
            build_for(pair()[0].requires_grad_(False), name=name)
    ModelConfig(optimizer={"name": "adamw_8bit"}, num_process=2, frozen=True)
    with pytest.raises(ValueError, match="`adamw_8bit` cannot read parameters that 2 processes share"):
        ModelConfig(optimizer={"name": "adamw_8bit"}, num_gpu=2)
    monkeypatch.setattr(optim, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"`adamw_8bit` needs bitsandbytes \(pip install"):
        build_for(pair()[0], name="adamw_8bit")
    module(path).save(tmp_path)
    with pytest.raises(ValueError, match=r"of another model or optimizer: optimizer\..*row_var is missing there"):
        module(path, optimizer={"name": "adafactor"}).load(tmp_path)


def test_muon_without_matrices_or_with_nothing_else():
    net, _ = pair()
    net.layer.requires_grad_(False)
    assert len(build_for(net, name="muon").optimizers) == 1
    layer = nn.Linear(3, 3, bias=False)
    assert len(build_optimizer(layer.parameters(), OptimizerConfig(name="muon"), layers=[layer]).optimizers) == 1


def test_eight_bits_stay_close_to_adamw(path):
    pytest.importorskip("bitsandbytes")
    batch = rollout()
    moved = []
    for name in ("adamw", "adamw_8bit"):
        trainer = module(path, optimizer={"name": name, "lr": 1e-3})
        before = weights(trainer)
        for _ in range(3):
            trainer.train_step(batch)
        moved.append(torch.cat([(t - before[n]).flatten() for n, t in weights(trainer).items()]))
    assert float((moved[1] - moved[0]).norm() / moved[0].norm()) < 0.1
    assert any(
        entry.dtype == torch.uint8
        for entry in trainer.optimizer.state[trainer.model.model.lm_head.weight].values()
        if isinstance(entry, torch.Tensor)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_optimizer_goes_on_bit_for_bit(path, tmp_path, name):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    config = {"optimizer": {"name": name, "lr": 1e-3}, "ema": {"decay": 0.9}}
    straight = module(path, **config)
    for seed in range(4):
        if seed == 2:
            straight.save(tmp_path)
        straight.train_step(rollout(seed=seed))
    resumed = module(path, init="random", seed=5, **config)
    resumed.train_step(rollout(seed=9))  # whatever was there is replaced
    resumed.load(tmp_path)
    for seed in (2, 3):
        resumed.train_step(rollout(seed=seed))
    assert same(weights(straight), weights(resumed))
    assert same(straight.average.tensors, resumed.average.tensors)


def test_clip_returns_the_norm_before_clipping():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_gradients([a, b], None) == 5.0
    assert clip_gradients([a, b], 10.0) == 5.0 and a.grad.tolist() == [3.0, 0.0]
    assert clip_gradients([a, b], 1.0) == 5.0
    assert a.grad.tolist() == pytest.approx([0.6, 0.0]) and b.grad.tolist() == pytest.approx([0.8])
    a.grad = torch.tensor([math.inf, 1.0])
    assert clip_gradients([a], 1.0) == math.inf
    a.grad = torch.tensor([math.nan, 1.0])
    assert math.isnan(clip_gradients([a], 1.0))
