"""What else a trainer does, cut over two ranks: as it does in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coalign.data.batch import Batch
from coalign.types import merge_stats
from tests.backends.batches import rollout
from tests.conformance.backends import Backend, build, exported, on_ranks, relative, same
from tests.conformance.layouts import CP, EP, MODELS, TP, share
from tests.tiny import tiny_model_dir, tiny_reward_model_dir

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1800)]
VALUE = {"head": "value", "head_init": "zero", "loss": {"fn": "value"}}
LORA = {"lora": {"rank": 4, "target": ["*.q_proj", "*.o_proj", "*.up_proj", "*.down_proj"]}}
# name -> (model, how it is cut, what is tried; how closely it agrees)
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "lora-tp": ("tied", TP, LORA, 1e-4),
    "lora-cp": ("tied", CP, LORA, 1e-4),
    "lora-ep": ("moe", EP, {"lora": {"rank": 4, "target": ["*.q_proj"]}}, 1e-4),
    "value-tp": ("scores", TP, VALUE, 1e-4),
    "value-cp": ("scores", CP, VALUE, 1e-4),
    "adafactor-tp": ("tied", TP, {"optimizer": {"name": "adafactor", "lr": 1e-3}}, 1e-4),
    "average-ep": ("moe", EP, {"ema": {"decay": 0.5}}, 1e-4),
    "full-tp": ("untied", TP, {"activation_checkpointing": "full"}, 1e-4),
    "selective-tp": ("untied", TP, {"activation_checkpointing": "selective"}, 1e-4),
    "selective-cp": ("untied", CP, {"activation_checkpointing": "selective"}, 1e-4),
    "full-ep": ("moe", EP, {"activation_checkpointing": "full"}, 1e-4),
    "host": ("tied", {}, {"cpu_offload": True, "num_process": 2}, 1e-4),
    "host-tp": ("untied", TP, {"cpu_offload": True, "num_process": 2}, 1e-4),
    "bf16-tp": ("tied", TP, {"compute_dtype": "bfloat16"}, 0.3),
    "bf16-ep": ("moe", EP, {"compute_dtype": "bfloat16"}, 0.3),
}


def _run(
    rank: int, port: int, ranks: int, paths: dict[str, str], batch: Batch, folder: Path
) -> dict[str, dict[str, Any]]:
    results = {}
    for i, (name, (model, cut, tried, _)) in enumerate(KINDS.items()):
        config = {"max_tokens_per_micro": 60, **(cut if ranks > 1 else {}), **tried}
        if ranks == 1:
            config = {key: value for key, value in config.items() if key not in ("cpu_offload", "num_process")}
        module = build(Backend(name, "fsdp", ranks=ranks, config=config), paths[model], rank=rank, port=port + i)
        part = share(batch, module)
        before = exported(module)
        scored = module.forward_step(part)
        stats = [module.train_step(part) for _ in range(2)]
        results[name] = {
            "share": module.config.shares(ranks)[rank],
            "scored": next(iter(scored.values())),
            "stats": stats,
            "before": before,
            "after": exported(module),
        }
        if module.average:
            module.save_hf(folder / f"{name}-{ranks}", average=True)
        module.close()
    return results


def test_two_ranks_do_what_one_process_does(tmp_path, subtests):
    """All in one start of the processes."""
    paths = {name: str(tiny_model_dir(tmp_path / name, **MODELS[name])) for name in ("tied", "untied", "moe")}
    paths["scores"] = str(tiny_reward_model_dir(tmp_path / "scores", tied=False))
    batch = rollout((5, 9, 12, 7), 3)
    batch = batch.with_(values=batch["returns"] * 0.5)
    [alone], together = (on_ranks(ranks, _run, tmp_path, ranks, paths, batch, tmp_path) for ranks in (1, 2))
    for name, (*_, tolerance) in KINDS.items():
        with subtests.test(name):
            check(alone[name], [each[name] for each in together], tolerance)


def check(one: dict[str, Any], shares: list[dict[str, Any]], tolerance: float) -> None:
    shares = list({each["share"]: each for each in reversed(shares)}.values())[::-1]
    first = shares[0]
    assert same(first["before"], one["before"])
    scored = torch.cat([each["scored"] for each in shares])
    torch.testing.assert_close(scored, one["scored"], rtol=tolerance, atol=max(1e-5, tolerance / 10))
    for step in range(2):
        stats = merge_stats(each["stats"][step] for each in shares)
        for key in ("loss/grad_norm", "loss/value"):
            assert stats[key].value == pytest.approx(one["stats"][step][key].value, rel=tolerance, abs=tolerance / 10)
        assert stats["tokens/trained"] == one["stats"][step]["tokens/trained"]
    moves = ({key: each["after"][key] - t for key, t in one["before"].items()} for each in (first, one))
    assert relative(*moves) < tolerance
