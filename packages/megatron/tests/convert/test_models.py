"""--verify runs both models, and finds what a comparison of tensors cannot."""

import json
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from coalign.cli import app
from coalign.weights.sync.transport import WeightError
from coalign_megatron import command
from coalign_megatron.convert import ConversionRequest, convert
from coalign_megatron.families.family import ConcatenatedTensors
from coalign_megatron.families.llama import LLAMA
from packages.megatron.tests.convert import made
from packages.megatron.tests.weight_families import checkpoints

needs_megatron = [
    pytest.mark.backends,  # seconds to import megatron-core
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]


def source(tmp_path, case):
    hf, weights = checkpoints.checkpoint(case)
    return made.model(tmp_path / "hf", hf, {name: tensor.contiguous() for name, tensor in weights.items()})


def run(*words):
    return CliRunner().invoke(app, ["convert", *map(str, words), "--verify"])


class TestWithMegatron:
    pytestmark = needs_megatron

    @pytest.mark.parametrize("case", ["llama", "deepseek_v3"])
    def test_both_ways(self, tmp_path, case):
        there = run(source(tmp_path, case), "-o", tmp_path / "dist", "--to", "megatron", "--tp", 2)
        back = run(tmp_path / "dist", "-o", tmp_path / "back", "--to", "hf", "--dtype", "bfloat16")
        for result in (there, back):
            assert result.exit_code == 0, result.output
            assert "transformers and megatron-core compute the same" in " ".join(result.stderr.split())
        assert "of 64 tokens" in json.loads((tmp_path / "dist" / "coalign_convert.json").read_text())["verified"]

    def test_tensors_that_come_back_to_the_bit_but_mean_something_else(self, tmp_path, monkeypatch):
        """Gate and up swapped both ways: every tensor is the same, and the model is another."""
        from coalign_megatron.backend.verify import compare_models

        monkeypatch.setitem(LLAMA.layer, "mlp.linear_fc1", ConcatenatedTensors(("mlp.up_proj", "mlp.gate_proj")))
        given = {"source": source(tmp_path, "llama"), "output": tmp_path / "dist", "to": "megatron", "verify": True}
        message = r"differ by .* in log-probs or entropies of 64 tokens; 1e-04 is tolerated"
        with pytest.raises(WeightError, match=message):
            convert(ConversionRequest(**given), models=compare_models)
        assert not (tmp_path / "dist").exists()

    def test_a_family_that_transformers_does_not_have(self, tmp_path):
        result = run(source(tmp_path, "baichuan_7b"), "-o", tmp_path / "dist", "--to", "megatron")
        assert "no class for ['BaichuanForCausalLM']" in " ".join(result.stderr.split()), result.output


def test_without_megatron_core_tensors_alone_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    hf = made.model(tmp_path / "hf", made.LLAMA)
    told = " ".join(run(hf, "-o", tmp_path / "dist", "--to", "megatron").stderr.split())
    assert "the same bit for bit; no model was run: megatron-core is not installed" in told
