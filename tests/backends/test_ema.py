import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from coalign.backends.optim import WeightAverage
from tests.backends.batches import rollout
from tests.backends.test_fsdp import module, same, weights


def test_a_bfloat16_model_has_a_float32_average():
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    average = WeightAverage(layer, decay=0.999)
    nn.init.constant_(layer.weight, 1.125)
    average.update()
    assert average.tensors["weight"].dtype == torch.float32
    assert average.tensors["weight"].item() == pytest.approx(1.000125, abs=1e-7)  # in bfloat16 it would stay at 1


def test_the_models_own_weights_come_back_even_after_an_error():
    layer = nn.Linear(3, 3)
    average = WeightAverage(layer, decay=0.5)
    own = nn.init.normal_(layer.weight).detach().clone()
    storage = layer.weight.data_ptr()
    layer.bias.requires_grad_(False)
    assert set(WeightAverage(layer, 0.9).tensors) == {"weight"}  # what is trained alone
    with pytest.raises(RuntimeError), average.swap_in():
        assert torch.equal(layer.weight, average.tensors["weight"]) and not torch.equal(layer.weight, own)
        raise RuntimeError
    assert torch.equal(layer.weight, own) and layer.weight.data_ptr() == storage


def test_training_averages_after_each_update(path):
    trainer, plain = module(path, ema={"decay": 0.8}, updates_per_batch=1), module(path)
    expected = weights(trainer)
    for seed in range(3):
        for learner in (trainer, plain):
            learner.train_step(rollout(seed=seed))
        expected = {
            name: 0.8 * a + 0.2 * w for (name, a), w in zip(expected.items(), weights(trainer).values(), strict=True)
        }
    average = {name.removeprefix("model."): tensor for name, tensor in trainer.average.tensors.items()}
    for name, tensor in expected.items():
        torch.testing.assert_close(average[name], tensor)
    assert same(weights(plain), weights(trainer))  # training is not changed by it


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


def test_an_average_that_is_not_there_is_neither_saved_nor_loaded(path, tmp_path):
    with pytest.raises(ValueError, match="'trainer' keeps no average"):
        module(path).save_hf(tmp_path, average=True)
    module(path).save(tmp_path)
    with pytest.raises(ValueError, match=r"average\..* is missing there"):
        module(path, ema={"decay": 0.9}).load(tmp_path)
