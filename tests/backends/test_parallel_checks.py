"""What cannot be cut is refused from the architecture alone, by `coalign check` and before anything loads."""

import pytest

from coalign.backends import pretrained
from coalign.backends.hf.fsdp import FSDPModule
from coalign.cluster.choice import find_footprint
from coalign.config.errors import ConfigError
from coalign.config.schema import ModelConfig
from packages.megatron.tests.weight_families.checkpoints import native
from tests.backends.architectures import make
from tests.tiny import tiny_model_dir

TP = {"tensor_parallel": 2}
OPT = {"family": "opt", "word_embed_proj_dim": 32, "ffn_dim": 64}
PHI3, ODD = {"family": "phi3", "pad_token_id": 0}, {"heads": 6, "kv_heads": 3, "hidden": 48}
MOE = {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def try_out(path, **config) -> None:
    config = ModelConfig(load=str(path), **config)
    FSDPModule.check_architecture(config, "trainer")


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        ({}, {"tensor_parallel": 4}, "tensor_parallel is 4: it does not divide the 2 heads of keys and values"),
        (OPT, TP, "tensor_parallel is 2: OPTForCausalLM brings no plan for it"),
        (PHI3, TP, "tensor_parallel is 2: the model's plan cuts '.*o_proj' as `rowwise_split_input`"),
        ({}, TP | {"lora": {"dora": True}}, r"tensor_parallel is 2: DoRA \(lora.dora\) needs"),
        ({}, TP | {"optimizer": {"name": "muon"}}, r"tensor_parallel is 2: Muon \(optimizer.name\)"),
        ({}, TP | {"compile": True}, "compile is True: layers that exchange tokens inside"),
        ({}, TP | {"fp8": True, "compute_dtype": "bfloat16"}, r"tensor_parallel is 2: 8-bit products \(fp8\) scale"),
        ({}, {"context_parallel": 3}, "context_parallel is 3: it does not divide the 4 heads of queries"),
        (
            ODD,
            {"context_parallel": 2},
            "context_parallel is 2: the 3 heads of keys and values of a process do not divide",
        ),
        ({}, {"expert_parallel": 2}, "expert_parallel is 2: Qwen2ForCausalLM has no experts to distribute"),
        (MOE, {"expert_parallel": 3}, "expert_parallel is 3: it does not divide the 4 experts"),
    ],
)
def test_what_an_architecture_refuses(tmp_path, model, config, message):
    with pytest.raises(ValueError, match=rf"models\.trainer\.{message}"):
        try_out(tiny_model_dir(tmp_path, **model), **config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 2, "num_process": 2}, "tensor_parallel is 2, and models.trainer computes `rows: padded`"),
        ({"rows": "single", "num_process": 2}, "has 2 processes, and models.trainer computes `rows: single`"),
    ],
)
def test_what_needs_packed_rows(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        try_out(make(tmp_path, "gptj"), **changes)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ({}, TP | {"context_parallel": 2}),
        ({}, {"context_parallel": 4}),
        ({"family": "gemma2"}, TP),
        (MOE, TP | {"expert_parallel": 4}),
        ({}, TP | {"lora": {"rank": 2}}),
    ],
)
def test_what_can_be_cut(tmp_path, model, config):
    try_out(tiny_model_dir(tmp_path, **model), **config)


def test_a_module_says_in_which_ways_it_can_be_cut():
    config = ModelConfig(module="native", context_parallel=2)
    with pytest.raises(ConfigError, match=r"policy\.context_parallel: is 2, and the module `native` is not cut"):
        find_footprint("policy", config)
    frozen = ModelConfig(frozen=True, num_process=4)  # its processes are one group only if they share it
    assert not FSDPModule.one_group(frozen)
    assert FSDPModule.one_group(frozen.model_copy(update={"tensor_parallel": 2}))
    with pytest.raises(ValueError, match="needs a model that several processes share"):
        ModelConfig(cpu_offload=True, num_gpu=0)
    ModelConfig(cpu_offload=True)  # whether several share it depends on the devices that are there


@pytest.mark.parametrize("case", ["falcon_7b", "bloom"])
def test_attention_of_its_own_is_refused(case, tmp_path):
    native(case).save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="cannot compute packed sequences; set `rows: padded`"):
        pretrained.load(ModelConfig(load=str(tmp_path)), seed=0)
