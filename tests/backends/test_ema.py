import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from coalign.backends.optim import WeightAverage
from tests.backends.batches import rollout
from tests.backends.test_fsdp import module, same, weights
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model")))


def test_the_formula_by_hand():
    """From 1.0, at decay 0.9: 0.9 * 1 + 0.1 * 2 = 1.1, then 0.9 * 1.1 + 0.1 * 4 = 1.39."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    average = WeightAverage(layer, decay=0.9)
    for weight, expected in ((2.0, 1.1), (4.0, 1.39)):
        nn.init.constant_(layer.weight, weight)
        average.update()
        assert average.tensors["weight"].item() == pytest.approx(expected)
    assert layer.weight.item() == 4.0


def test_a_bfloat16_model_has_a_float32_average():
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    average = WeightAverage(layer, decay=0.999)
    nn.init.constant_(layer.weight, 1.125)
    average.update()
    assert average.tensors["weight"].dtype == torch.float32
    assert average.tensors["weight"].item() == pytest.approx(1.000125, abs=1e-7)  # in bfloat16 it would stay at 1


def test_only_what_is_trained_is_averaged():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    assert set(WeightAverage(net, 0.9).tensors) == {"1.weight", "1.bias"}


def test_the_models_own_weights_come_back_even_after_an_error():
    layer = nn.Linear(3, 3)
    average = WeightAverage(layer, decay=0.5)
    own = nn.init.normal_(layer.weight).detach().clone()
    storage = layer.weight.data_ptr()
    with pytest.raises(RuntimeError), average.swap_in():
        assert torch.equal(layer.weight, average.tensors["weight"]) and not torch.equal(layer.weight, own)
        raise RuntimeError
    assert torch.equal(layer.weight, own) and layer.weight.data_ptr() == storage


def test_training_averages_after_each_update(path):
    trainer = module(path, ema={"decay": 0.8}, updates_per_batch=1)
    expected = weights(trainer)
    for seed in range(3):
        trainer.train_step(rollout(seed=seed))
        expected = {
            name: 0.8 * a + 0.2 * w for (name, a), w in zip(expected.items(), weights(trainer).values(), strict=True)
        }
    average = {name.removeprefix("model."): tensor for name, tensor in trainer.average.tensors.items()}
    for name, tensor in expected.items():
        torch.testing.assert_close(average[name], tensor)


def test_training_is_not_changed_by_it(path):
    plain, averaged = module(path), module(path, ema={"decay": 0.9})
    for trainer in (plain, averaged):
        trainer.train_step(rollout())
    assert same(weights(plain), weights(averaged))


def test_an_update_that_is_skipped_leaves_the_average(path):
    trainer = module(path, loss={"fn": "tests.backends.test_fsdp:nan_loss"}, ema={"decay": 0.9})
    before = {name: tensor.clone() for name, tensor in trainer.average.tensors.items()}
    trainer.train_step(rollout())
    assert same(before, trainer.average.tensors)


def test_it_is_saved_as_a_model(path, tmp_path):
    trainer = module(path, ema={"decay": 0.9})
    trainer.train_step(rollout())
    own = weights(trainer)
    trainer.save_hf(tmp_path / "hf")
    trainer.save_hf(tmp_path / "hf_ema", average=True)
    assert same(own, weights(trainer))
    for name, expected in (("hf", own), ("hf_ema", None)):
        loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).named_parameters())
        expected = expected or {n.removeprefix("model."): t for n, t in trainer.average.tensors.items()}
        assert same({n: t.detach() for n, t in loaded.items()}, expected)


def test_a_model_without_an_average_has_none_to_save(path, tmp_path):
    with pytest.raises(ValueError, match="'trainer' keeps no average"):
        module(path).save_hf(tmp_path, average=True)


def test_a_checkpoint_without_an_average_is_refused(path, tmp_path):
    module(path).save(tmp_path)
    with pytest.raises(ValueError, match=r"average\..* is missing there"):
        module(path, ema={"decay": 0.9}).load(tmp_path)
