"""Rows that are not packed: which heads have them, who refuses them, a run. That log-probs and gradients are those of
each sequence alone is in test_architectures.py."""

from __future__ import annotations

import logging

import pytest
import torch

from coalign import load_config
from coalign.backends.hf.heads import LanguageModel
from coalign.launch.check import check
from coalign.report.display import Display
from tests.backends.architectures import make
from tests.backends.batches import rollout
from tests.backends.test_fsdp import module
from tests.runs import metrics, run, settings
from tests.tiny import tiny_model_dir


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
    path = make(tmp_path, "gptj")
    computed = LanguageModel._compute_unpacked

    def fail(self, layout):
        return computed(self, layout) * (0.5 if self.rows == "padded" else 1.0)

    monkeypatch.setattr(LanguageModel, "_compute_unpacked", fail)
    with caplog.at_level(logging.INFO):
        assert module(str(path)).model.rows == "single"
    assert "models.trainer computes single rows" in caplog.text
    with pytest.raises(NotImplementedError, match="GPTJForCausalLM changes its logits"):
        module(str(path), rows="padded")


def test_a_run_of_a_model_without_attention(tmp_path, capsys):
    path = make(tmp_path / "mamba", "mamba")
    config = settings(tmp_path, "grpo", steps=2, eval_at_start=False)
    for name in ("policy", "trainer"):
        config["models"].setdefault(name, {})["load"] = str(path)
    config["models"]["policy"]["module"] = "transformers"
    check(load_config(config), Display())
    assert "computes padded rows" in capsys.readouterr().out
    assert run(config) == 0
    assert max(line["loss/mismatch"] for line in metrics(config) if "loss/mismatch" in line) < 1e-4
