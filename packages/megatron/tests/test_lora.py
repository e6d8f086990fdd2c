"""Adapters in Megatron's layers: they compute, learn, save and resume as those of FSDP's module in one process do."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from coalign.backends import lora as adapters
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from coalign.types import merge_stats
from coalign_megatron.backend.module import MegatronModule
from packages.megatron.tests.weight_families.checkpoints import checkpoint, native
from tests.backends.batches import rollout
from tests.conformance.backends import Backend, build, exported, on_ranks
from tests.conformance.layouts import MODELS, share
from tests.conformance.test_parallel import joined, relative
from tests.tiny import tiny_model_dir, tiny_reward_model_dir

pytest.importorskip("megatron.core")
STEADY = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}  # rounding does not make whole steps
TP, PP, CP, EP = "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"
ZERO = {"distributed_optimizer": True}
ETP1 = {"expert_tensor_parallel": 1}
KINDS: dict[str, dict[str, Any]] = {
    "all": {"rank": 4},
    "some": {"rank": 4, "alpha": 8.0, "rslora": True, "target": ["*.k_proj", "*.up_proj", "*.down_proj"]},
    "first": {"rank": 4, "target": ["model.layers.[01].*_proj"]},
    "experts": {"rank": 2, "target": ["all-linear", "*.experts.*"]},
    "only": {"rank": 2, "target": ["*.experts.*"]},
    "shared": {"rank": 2, "target": ["*_proj", "*.experts.*"]},
    "value": {"rank": 4},
}
VALUE = {"head": "value", "loss": {"fn": "value"}}


@dataclass(frozen=True)
class Case:
    """``config`` cuts one of MODELS or of the families, with adapters of one of KINDS, over the ranks."""

    model: str
    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def start(self) -> str:
        return f"{self.model}-{self.kind}"

    @property
    def head(self) -> dict[str, Any]:
        return VALUE if self.kind == "value" else {}

    def __str__(self) -> str:
        return "-".join([self.start, *(f"{key}_{value}" for key, value in {**self.config, **self.own}.items())])


TWO = [
    Case("untied", "all", {TP: 2}),
    Case("untied", "all", {TP: 2}, {"sequence_parallel": False}),
    Case("untied", "all", {PP: 2}),
    Case("untied", "all", {CP: 2}),
    Case("untied", "all"),
    Case("untied", "all", {}, ZERO),
    Case("untied", "all", {TP: 2}, ZERO),  # these three also read the first one's checkpoint
    Case("untied", "all", {PP: 2}, ZERO),
    Case("tied", "some", {PP: 2, "activation_checkpointing": "full"}),
    Case("deep", "first", {PP: 2}, {"virtual_pipeline": 2, **ZERO}),  # chunks without adapters
    Case("deep", "some", {TP: 2}),  # one rank has no keys
    Case("deep", "all", {PP: 2}, {"virtual_pipeline": 2}),
    Case("deep", "all", {TP: 2, "activation_checkpointing": "selective"}),
    Case("moe", "experts", {EP: 2}),
    Case("moe", "experts", {TP: 2}),
    Case("moe", "experts", {TP: 2, EP: 2}, ETP1),
    Case("moe", "experts", {PP: 2}),
    Case("moe", "all", {EP: 2}),
    Case("moe", "only", {EP: 2}),
    Case("shared", "shared", {EP: 2}, ZERO),
    Case("scores", "value", {TP: 2}),
    Case("scores", "value", {TP: 2}, {"sequence_parallel": False}),
    Case("scores", "value", {PP: 2}, ZERO),
    Case("bloom", "all", {TP: 2}),  # fused in its files, biases, both halves of a layer at once, latent attention
    Case("glm4", "all", {TP: 2}),
    Case("gpt_neox", "all", {TP: 2}, {"sequence_parallel": False}),
    Case("deepseek_v2", "experts", {TP: 2}),
]
FOUR = [
    Case("deep", "all", {TP: 2, PP: 2}),
    Case("untied", "all", {TP: 2, CP: 2}),
    Case("moe", "experts", {TP: 2, EP: 2}),
    Case("moe", "experts", {TP: 2, EP: 2}, {**ETP1, **ZERO}),
    Case("moe", "experts", {PP: 2, EP: 2}, ZERO),  # reads the checkpoint of the one above
]


def make(module: str, path: str, ranks: int = 1, rank: int = 0, port: int = 0, **config: Any) -> Any:
    config = {"max_tokens_per_micro": 60, "optimizer": STEADY, **config}
    return build(Backend(module, module, ranks=ranks, config=config), path, rank=rank, port=port)


def run(rank: int, port: int, ranks: int, cases: list[Case], paths: dict[str, str], folder: Path, batch: Batch) -> list:
    """Each case as FSDP's module does it in one process, or as Megatron's does over ``ranks``."""
    results: list[dict[str, Any]] = []
    written: dict[str, Any] = {}  # the first checkpoint of a model and kind, and the weights then and one step later
    for i, case in enumerate(cases):
        kind, config = "fsdp", {}
        if ranks > 1:
            kind = "megatron"
            config = {**case.config, "megatron": {"distributed_optimizer": False, **case.own}}
        lora = {**KINDS[case.kind], "load": str(folder / case.start)}
        module = make(kind, paths[case.model], ranks, rank, port + i, lora=lora, **config, **case.head)
        part, here = share(batch, module), folder / f"{case}-{ranks}"
        result = {
            "share": module.config.shares(ranks)[rank],
            "before": exported(module),
            "scored": module.forward_step(part, into="found")["found"],
            "base": module.forward_step(part, into="found", base=True)["found"],
        }
        with note_gradients(module, here / "gradients"):
            stats = [module.train_step(part)]
        stats.append(module.train_step(part))
        module.save(here / "checkpoint")
        middle = exported(module)
        stats.append(module.train_step(part))
        after = exported(module)
        module.save_adapter(here / "adapter")
        module.load(here / "checkpoint")
        result["loaded"] = same(exported(module), middle)
        module.train_step(part)
        result["resumed"] = same(exported(module), after)
        if case.own.get("distributed_optimizer"):  # other state can be read in the same layout alone
            checkpoint, *wanted = written.setdefault(case.start, (here / "checkpoint", middle, after))
            module.load(checkpoint)
            found = exported(module)
            module.train_step(part)
            result["resharded"] = list(zip((found, exported(module)), wanted, strict=True))
        results.append({**result, "stats": stats, "after": after})
        module.close()
    return results


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@contextmanager
def note_gradients(module: Any, folder: Path) -> Any:
    """Save those of the next update, before they are clipped, as if they were adapters."""
    fsdp = module.config.module == "fsdp"
    owner, name = (module, "optimizer_step") if fsdp else (module.pipeline, "finish_gradients")
    original = getattr(owner, name)

    def note() -> Any:
        result = None if fsdp else original()
        if fsdp or not module.config.megatron.distributed_optimizer:  # else each rank has some of them
            trained = [p for _, p in module.pipeline.trained()] if not fsdp else list(module.model.parameters())
            trained = [parameter for parameter in trained if parameter.requires_grad]
            values = [parameter.data for parameter in trained]
            for parameter in trained:
                parameter.data = parameter.grad if fsdp else parameter.main_grad
            module.save_adapter(folder)
            for parameter, value in zip(trained, values, strict=True):
                parameter.data = value
        return original() if fsdp else result

    with patch.object(owner, name, note):
        yield


def write_model(path: Path, name: str) -> str:
    if name in MODELS:
        return str(tiny_model_dir(path, **MODELS[name]))
    if name == "scores":
        return str(tiny_reward_model_dir(path, tied=False))
    native(name).save_pretrained(path)
    return str(path)


def start(paths: dict[str, str], cases: list[Case], folder: Path, batch: Batch) -> None:
    """Write an adapter that does something, for each model and kind."""
    for case in {case.start: case for case in cases}.values():
        optimizer = {**STEADY, "lr": 1e-2}
        module = make("fsdp", paths[case.model], lora=KINDS[case.kind], optimizer=optimizer, **case.head)
        for _ in range(2):
            module.train_step(batch)
        module.save_adapter(folder / case.start)


@pytest.mark.backends
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)], ids=["two", "four"])
def test_ranks_do_what_fsdp_does_in_one_process(ranks, cases, tmp_path, subtests):
    paths = {name: write_model(tmp_path / name, name) for name in {case.model for case in cases}}
    batch = rollout((5, 9, 12, 7), 3, vocab=131)
    batch = batch.with_(values=batch["returns"] * 0.5)
    start(paths, cases, tmp_path, batch)
    alone = {case.start: case for case in cases}.values()
    [done] = on_ranks(1, run, tmp_path, 1, list(alone), paths, tmp_path, batch)
    wanted = {case.start: (case, result) for case, result in zip(alone, done, strict=True)}
    together = on_ranks(ranks, run, tmp_path, ranks, cases, paths, tmp_path, batch)
    for i, case in enumerate(cases):
        with subtests.test(str(case)):
            first, want = wanted[case.start]
            check(case, [each[i] for each in together], want, tmp_path / f"{case}-{ranks}", tmp_path / f"{first}-1")


def check(case: Case, shares: list[dict[str, Any]], want: dict[str, Any], here: Path, there: Path) -> None:
    shares = list({each["share"]: each for each in reversed(shares)}.values())[::-1]
    for name in ("scored", "base"):
        assert float((torch.cat([each[name] for each in shares]) - want[name]).abs().max()) < 1e-5
    assert float((want["scored"] - want["base"]).abs().max()) > 0.05
    got = shares[0]
    assert relative(joined(got["before"], want["before"]), joined(want["before"], want["before"])) < 1e-6
    if not case.own.get("distributed_optimizer"):
        same_adapters(here / "gradients", there / "gradients", 1e-5)
    stats = [merge_stats(each["stats"][step] for each in shares) for step in range(3)]
    for key, close in (("loss/value", 1e-4), ("loss/grad_norm", 2e-5)):
        told = [each[key].value for each in stats]
        assert told == pytest.approx([each[key].value for each in want["stats"]], rel=close, abs=1e-6)
    moves = (
        torch.cat([(each["after"][name] - tensor).flatten() for name, tensor in want["before"].items()])
        for each in (got, want)
    )
    assert relative(*moves) < 1e-4
    same_adapters(here / "adapter", there / "adapter", 1e-4)
    assert got["loaded"] and got["resumed"]
    for (found, wanted), tolerance in zip(got.get("resharded", ()), (1e-6, 1e-5), strict=False):
        assert relative(joined(found, wanted), joined(wanted, wanted)) < tolerance


def same_adapters(here: Path, there: Path, tolerance: float) -> None:
    found, wanted = (load_file(folder / adapters.TENSORS) for folder in (here, there))
    assert relative(joined(found, wanted), joined(wanted, wanted)) < tolerance
    assert min(float(tensor.norm()) for tensor in wanted.values()) > 0


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    scores = tiny_reward_model_dir(folder / "scores", tied=False)
    hf, _ = checkpoint("chatglm")
    (folder / "config.json").write_text(json.dumps(hf))
    return {"scores": str(scores), "remote": str(folder)} | {
        n: str(tiny_model_dir(folder / n, **MODELS[n])) for n in ("moe", "shared")
    }


@pytest.fixture
def opened():
    """Makes modules of one process, and closes them."""
    modules: list[Any] = []

    def open_module(*arguments: Any, **config: Any) -> Any:
        modules.append(make(*arguments, **config))
        return modules[-1]

    yield open_module
    for module in modules:
        module.close()


def test_one_process_draws_learns_sends_and_saves_what_fsdp_does(paths, opened, tmp_path):
    from peft import PeftModel

    batch, lora = rollout((5, 9), 3), KINDS["experts"]
    both = [opened(name, paths["moe"], lora=lora) for name in ("fsdp", "megatron")]
    base = [module.forward_step(batch)["ref_logprobs"] for module in both]
    for module in both:
        for _ in range(3):
            module.train_step(batch)
        module.save_adapter(tmp_path / module.config.module)
    same_adapters(tmp_path / "megatron", tmp_path / "fsdp", 1e-4)
    fsdp, own = both
    scored = own.forward_step(batch)["ref_logprobs"]
    torch.testing.assert_close(scored, fsdp.forward_step(batch)["ref_logprobs"], rtol=0, atol=1e-5)
    torch.testing.assert_close(own.forward_step(batch, base=True)["ref_logprobs"], base[1], rtol=0, atol=0)
    assert float((scored - base[1]).abs().max()) > 1e-2

    policy = NativeModule(ModelConfig(load=paths["moe"], sampling={"max_new_tokens": 6}), Context())
    policy.setup()
    policy.load_weights(own.export_weights(), version=1)
    prompts = Batch(
        torch.tensor([4]), {"tokens": torch.arange(4, dtype=torch.int32) + 40}, {"group": torch.tensor([0])}
    )
    out = policy.generate(prompts, samples=2)
    found = own.forward_step(out, into="old_logprobs")["old_logprobs"]
    torch.testing.assert_close(found, out["rollout_logprobs"], rtol=0, atol=2e-5)

    plain = AutoModelForCausalLM.from_pretrained(paths["moe"], dtype=torch.float32)
    tokens = out["tokens"][: int(out.lengths[0])].long()[None]
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(plain, tmp_path / "megatron").eval()(input_ids=tokens).logits
    own.save_hf(tmp_path / "merged")
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(input_ids=tokens).logits
    torch.testing.assert_close(merged, theirs, rtol=0, atol=1e-5)
    chosen = theirs[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(chosen[3:], found[4 : tokens.shape[1]], rtol=0, atol=1e-5)


def test_fused_layers_have_ranks_and_scales_of_their_own(paths, opened, tmp_path):
    import peft

    plain = AutoModelForCausalLM.from_pretrained(paths["moe"], dtype=torch.float32)
    names = ["q_proj", "v_proj", "o_proj"]
    patterns = {"rank_pattern": {"q_proj": 3, "o_proj": 6}, "alpha_pattern": {"v_proj": 40, "layers.0.*q_proj": 2}}
    settings = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=names, **patterns)
    peft.get_peft_model(plain, settings).save_pretrained(tmp_path)
    lora = {"rank": 4, "alpha": 8, "target": [f"*.{name}" for name in names], "load": str(tmp_path)}
    fsdp, own = (opened(name, paths["moe"], lora=lora) for name in ("fsdp", "megatron"))
    for _ in range(2):
        found, wanted = (module.forward_step(rollout((5, 9), 3))["ref_logprobs"] for module in (own, fsdp))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        found, wanted = exported(own), exported(fsdp)
        assert relative(joined(found, wanted), joined(wanted, wanted)) < 1e-5
        for module in (own, fsdp):
            module.train_step(rollout((5, 9), 3))


@pytest.mark.parametrize("adapter_rank", [None, 4], ids=["merged", "apart"])
def test_what_changes_is_sent_alone(paths, opened, adapter_rank):
    lora, sent = {"rank": 4, "target": ["*.q_proj"]}, []
    for name in ("fsdp", "megatron"):
        module = opened(name, paths["moe"], lora=lora)
        module.context = replace(module.context, adapter_rank=adapter_rank)
        module.train_step(rollout((5, 9), 3))
        sent.append([exported(module), exported(module, changing=True)])
    for wanted, found in zip(*sent, strict=True):
        assert found.keys() >= wanted.keys()
        assert relative(joined({name: found[name] for name in wanted}, wanted), joined(wanted, wanted)) < 1e-5
    every, changing = sent[1]
    assert len(changing) < len(every) and all(".self_attn." in name for name in changing)


def test_a_head_is_trained_saved_and_loaded_beside_them(paths, opened, tmp_path):
    batch, config = rollout((5, 9), 3), {"head": "value", "loss": {"fn": "value"}}
    batch = batch.with_(values=batch["returns"] * 0.5)
    both = [opened(name, paths["scores"], lora={"rank": 4}, **config) for name in ("fsdp", "megatron")]
    for module in both:
        module.train_step(batch)
        module.save_adapter(tmp_path / module.config.module)
    same_adapters(tmp_path / "megatron", tmp_path / "fsdp", 1e-4)
    assert "base_model.model.score.weight" in load_file(tmp_path / "megatron" / adapters.TENSORS)
    lora = {"rank": 4, "load": str(tmp_path / "megatron")}
    frozen = opened("megatron", paths["scores"], lora=lora, frozen=True, **config)
    found, wanted = (module.forward_step(batch)["values"] for module in (frozen, both[1]))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_an_adapter_of_another_rank_is_named_once(paths, opened, tmp_path):
    opened("megatron", paths["moe"], lora={"rank": 4}).save_adapter(tmp_path)
    with pytest.raises(ValueError, match=r"^models\.model\.lora\.rank is 2, but 4 in the adapter"):
        opened("megatron", paths["moe"], lora={"rank": 2, "load": str(tmp_path)})


def test_in_bf16_they_are_float32_and_what_is_frozen_stays_exact(paths, opened, tmp_path):
    batch = rollout((5, 9), 3)
    module = opened("megatron", paths["moe"], lora=KINDS["experts"], compute_dtype="bfloat16")
    module.train_step(batch)
    module.save(tmp_path / "checkpoint")
    module.save_hf(tmp_path / "merged")
    trained = dict(module.pipeline.trained())
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    assert all(adapters.INFIX in name for name in trained)
    before, after = (load_file(*Path(folder).glob("*.safetensors")) for folder in (paths["moe"], tmp_path / "merged"))
    assert torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved == {name for name in before if "_proj" in name}
    stored = FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    assert stored and not [name for name in stored if adapters.INFIX not in name and "weight" in name]
    for lora, said in ((KINDS["all"], "gate_up_proj is only there"), (None, "down_proj is only there")):
        with pytest.raises(ValueError, match=rf"lora\.target is not that of the checkpoint .*{said}"):
            opened("megatron", paths["moe"], lora=lora).load(tmp_path / "checkpoint")
    other = opened("megatron", paths["moe"], lora=KINDS["experts"], compute_dtype="bfloat16")
    other.load(tmp_path / "checkpoint")
    for each in (module, other):
        each.train_step(batch)
    assert same(exported(module), exported(other))


STAGES = {"lora": {"target": "*.1.*"}, PP: 2, "num_process": 2}  # none of whose adapters is on the first


@pytest.mark.parametrize(
    ("model", "config", "said"),
    [
        ("moe", {"lora": {"dropout": 0.1}}, r"models\.model\.lora\.dropout is 0\.1: .*; use `module: fsdp`"),
        ("moe", {"lora": {"dora": True}}, r"models\.model\.lora\.dora is True: .*; use `module: fsdp`"),
        ("moe", {"lora": {"base_bits": 4}}, r"models\.model\.lora\.base_bits is 4: .*; use `module: fsdp`"),
        ("moe", {"lora": {}, "megatron": {"transformer_engine": True}}, "megatron.transformer_engine is true"),
        ("shared", {"lora": {}}, r"models\.model\.lora\.target matches 'model\.layers\.0\.mlp\.shared_expert_gate'"),
        ("remote", {"lora": {}}, r"models\.model\.lora: .* a class of transformers, .* none for .* type `chatglm`"),
        ("moe", {"lora": {"target": "*.q"}}, r"models\.model\.lora\.target: '\*\.q' matches none"),
        ("moe", STAGES, r"models\.model\.lora\.target leaves stage 0 of `pipeline_parallel` 2"),
    ],
)
def test_what_they_cannot_be_is_refused_by_name_before_weights_are_read(paths, model, config, said):
    settings = ModelConfig(module="megatron", load=paths[model], **config)
    with pytest.raises(ValueError, match=said):
        MegatronModule.check_settings(settings, "model", torch.device("cpu"))
        MegatronModule.check_architecture(settings, "model")
