"""Rows that are not packed: architectures whose layers mix tokens by other means than attention, or have an attention
of their own, compared with plain Hugging Face on each sequence alone."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from coalign import load_config
from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.hf.heads import LanguageModel
from coalign.config.schema import ModelConfig
from coalign.launch.check import check
from coalign.report.display import Display
from tests.backends.batches import rollout
from tests.backends.test_fsdp import module
from tests.backends.test_transformers_engine import ARCHITECTURES, make
from tests.runs import metrics, run, settings
from tests.tiny import tiny_model_dir

PACKED = {"llama", "qwen2", "gpt2", "opt", "gemma3_text"}
QUICK = ("gptj", "mamba", "qwen3_next")
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
SHAPES = {family: shape | (NO_DROPOUT if family == "opt" else {}) for family, shape, _ in ARCHITECTURES}
LOSS = {"fn": "tests.backends.test_fsdp:sequence_loss"}


class Gradients(FSDPModule):
    """Keeps the gradients of the last step."""

    def optimizer_step(self) -> float:
        self.gradients = {name: p.grad.clone() for name, p in self.model.model.named_parameters() if p.grad is not None}
        return super().optimizer_step()


def compare(path, batch, **config):
    """Check log-probs and the gradient of a trainer against plain Hugging Face; returns the trainer."""
    trainer = module(str(path), kind=Gradients, loss=LOSS, optimizer={"lr": 0.0}, **config)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    plain.config.rescale_every = 0
    for part in (*trainer.model.modules(), *plain.modules()):
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    loss, expected = 0.0, []
    for row in batch.rows():
        tokens, mask = row["tokens"].long(), row["loss_mask"][1:]
        logits = plain(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        own = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0] * mask
        loss = loss - own.sum() / len(batch)
        expected.append(torch.cat([torch.zeros(1), own.detach()]))
    loss.backward()
    found = trainer.forward_step(batch)["ref_logprobs"]
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=3e-5)
    trainer.train_step(batch)
    own = {name: p.grad for name, p in plain.named_parameters()}
    both = [(trainer.gradients[name], own[name]) for name in own if name in trainer.gradients]
    found, expected = (torch.cat([tensor.flatten() for tensor in side]) for side in zip(*both, strict=True))
    assert float((found - expected).norm()) < 1e-4 * float(expected.norm())
    return trainer


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in QUICK else pytest.mark.backends) for family in SHAPES]
)
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(tmp_path, family):
    path, batch = make(tmp_path, family, **SHAPES[family]), rollout((5, 9), 3)
    trainer = compare(path, batch, max_tokens_per_micro=60)
    assert trainer.model.rows == ("packed" if family in PACKED else "padded")
    assert compare(path, batch, max_tokens_per_micro=60, rows="single").model.rows == "single"


@pytest.mark.parametrize("head", ["value", "reward"])
def test_numbers_of_other_heads_do_not_depend_on_rows(tmp_path, head):
    path, batch, found = str(tiny_model_dir(tmp_path)), rollout(), []
    for rows in ("packed", "padded", "single"):
        scorer = module(path, loss={}, head=head, head_init="zero", rows=rows, frozen=True)
        with torch.no_grad():
            torch.manual_seed(0)
            scorer.model.model.get_submodule("score").weight.normal_()
        found.append(scorer.forward_step(batch)[{"value": "values", "reward": "reward"}[head]])
    assert found[0].abs().max() > 0
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-5)


def test_what_a_model_only_declares_is_replaced(tmp_path, monkeypatch, caplog):
    """Rows that fail the comparison at the start are computed another way, unless the file forces them."""
    path = make(tmp_path, "gptj", **SHAPES["gptj"])
    computed = LanguageModel._compute_unpacked

    def fail(self, layout):
        return computed(self, layout) * (0.5 if self.rows == "padded" else 1.0)

    monkeypatch.setattr(LanguageModel, "_compute_unpacked", fail)
    with caplog.at_level(logging.INFO):
        assert module(str(path)).model.rows == "single"
    assert "models.trainer computes single rows" in caplog.text
    with pytest.raises(NotImplementedError, match="GPTJForCausalLM changes its logits"):
        module(str(path), rows="padded")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 2, "num_process": 2}, "tensor_parallel is 2, and models.trainer computes `rows: padded`"),
        ({"rows": "single", "num_process": 2}, "has 2 processes, and models.trainer computes `rows: single`"),
    ],
)
def test_check_refuses_what_needs_packed_rows(tmp_path, changes, message):
    path = make(tmp_path, "gptj", **SHAPES["gptj"])
    with pytest.raises(ValueError, match=message):
        FSDPModule.check_architecture(ModelConfig(load=str(path), **changes), "trainer")


def test_a_run_of_a_model_without_attention(tmp_path, capsys):
    path = make(tmp_path / "mamba", "mamba", **SHAPES["mamba"])
    config = settings(tmp_path, "grpo", steps=2, eval_at_start=False)
    for name in ("policy", "trainer"):
        config["models"].setdefault(name, {})["load"] = str(path)
    config["models"]["policy"]["module"] = "transformers"
    check(load_config(config), Display())
    assert "computes padded rows" in capsys.readouterr().out
    assert run(config) == 0
    assert max(line["loss/mismatch"] for line in metrics(config) if "loss/mismatch" in line) < 1e-4
