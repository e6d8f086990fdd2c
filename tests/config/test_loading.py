"""What a YAML file means: layers, references, sugar, `like`, defaults."""

import subprocess
import sys

import pytest

from coalign.config import load
from coalign.config.schema import KEYS_OF_WEIGHTS, ModelConfig, RewardConfig, RunConfig, SourceConfig
from tests.config.conftest import DEFAULTS


def test_a_float_may_be_written_without_a_point_in_files_and_overrides(run):
    text = "{algorithm: grpo, models: {policy: {optimizer: {lr: 1e-6, eps: 2E-8}}}}"
    optimizer = run(text).models["policy"].optimizer
    assert (optimizer.lr, optimizer.eps) == (1e-6, 2e-8)
    assert run(text, "models.policy.optimizer.lr=3e-5").models["policy"].optimizer.lr == 3e-5


def test_scalars_follow_yaml_1_2(run):
    data = run(
        "{algorithm: grpo, data: {prompt_key: yes, answer_key: 2026-11-21, messages_key: 1:30, shuffle: false}}"
    ).data
    assert (data.prompt_key, data.answer_key, data.messages_key, data.shuffle) == ("yes", "2026-11-21", "1:30", False)


def test_underscores_group_digits(run):
    assert run("{algorithm: grpo, runtime: {steps: 10_000}}").runtime.steps == 10_000


def test_anchors_and_merge_keys(run):
    models = run("""
        algorithm: grpo
        models:
          policy: &p {load: model, dtype: bfloat16}
          judge: {<<: *p, dtype: float32}
        """).models
    assert (models["judge"].load, models["judge"].dtype) == ("model", "float32")


def test_included_files_lie_beneath_in_order_and_lists_replace(run, write):
    write("{runtime: {steps: 1, epochs: 2}, data: {train: [train.jsonl, eval.jsonl]}}", "parts/a.yaml")
    write("{include: [a.yaml], runtime: {steps: 2, keep: 5}}", "parts/b.yaml")
    config = run("{include: [parts/b.yaml], algorithm: grpo, runtime: {keep: 7}, data: {train: [train.jsonl]}}")
    assert (config.runtime.steps, config.runtime.epochs, config.runtime.keep) == (2, 2, 7)
    assert [source.path for source in config.data.train] == ["train.jsonl"]


def test_references_and_environment(run, monkeypatch):
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.delenv("LR", raising=False)
    config = run("""
        algorithm: grpo
        output: runs/${algorithm}-${seed}
        seed: 3
        runtime: {steps: "${env:STEPS}", save_every: "${runtime.steps}"}
        models: {policy: {optimizer: {lr: "${env:LR,1e-5}"}, sampling: {stop: ['\\${x}']}}}
        """)
    assert config.output == "runs/grpo-3"
    assert (config.runtime.steps, config.runtime.save_every) == (12, 12)
    assert config.models["policy"].optimizer.lr == 1e-5
    assert config.models["policy"].sampling.stop == ["${x}"]


def test_a_reference_to_a_section_and_to_what_like_gives(run):
    config = run("""
        algorithm: grpo
        models: {policy: {load: model, sampling: {top_k: 5}}, judge: {sampling: "${models.policy.sampling}"}}
        data: {system: "${models.trainer.load}"}
        """)
    assert config.models["judge"].sampling.top_k == 5
    assert config.data.system == "model"


@pytest.mark.parametrize(
    "written",
    ["train.jsonl", "[train.jsonl]", "{path: train.jsonl}", "[{path: train.jsonl}]", "${env:NO_SUCH,train.jsonl}"],
)
def test_short_forms_of_data(run, written):
    assert run(
        f"{{algorithm: grpo, data: {{train: '{written}'}}}}"
        if "$" in written
        else f"{{algorithm: grpo, data: {{train: {written}}}}}"
    ).data.train == [SourceConfig(path="train.jsonl")]


@pytest.mark.parametrize("written", ["math", "[math]", "{fn: math}", "[{fn: math}]"])
def test_short_forms_of_rewards(run, written):
    assert run(f"{{algorithm: grpo, reward: {written}}}").reward == [RewardConfig(fn="math")]


def test_a_short_form_takes_further_keys_from_an_override(run):
    config = run("{algorithm: grpo, reward: math}", "reward.weight=2", "reward.strict=true")
    assert config.reward == [RewardConfig(fn="math", weight=2.0, strict=True)]


def test_the_schema_takes_short_forms_without_the_loader():
    config = RunConfig(algorithm="grpo", loss="sft", reward="math", data={"train": "a"})
    assert (config.loss.fn, config.reward[0].fn, config.data.train[0].path) == ("sft", "math", "a")


def test_overrides_replace_lists_sections_and_items(run):
    text = "{algorithm: grpo, reward: [{fn: math, weight: 2}, contains], loss: {fn: policy_gradient, clip_low: 0.1}}"
    config = run(text, "runtime.colocation=[[policy,trainer]]", "reward[1].weight=0.5", "loss={fn: gspo}")
    assert config.runtime.colocation == [["policy", "trainer"]]
    assert [reward.weight for reward in config.reward] == [2.0, 0.5]
    assert (config.loss.fn, config.loss.arguments) == ("gspo", {})


def test_null_takes_away_and_is_a_value_only_where_it_can_be(run):
    policy = "{max_tokens_per_micro: 5, optimizer: {clip_grad_norm: null}}"
    text = f"{{algorithm: grpo, runtime: {{keep: 9}}, models: {{policy: {policy}}}}}"
    config = run(
        text, "runtime.keep=null", "models.policy.max_tokens_per_micro=null", "models.reference=null", "loss.dual=null"
    )
    assert config.runtime.keep == 2
    assert config.models["policy"].max_tokens_per_micro is None
    assert config.models["policy"].optimizer.clip_grad_norm is None
    assert "reference" not in config.models
    assert config.loss.arguments == {"kl_coef": 0.0, "dual": None}


def test_a_key_with_nothing_behind_it_is_not_given(run):
    assert run("algorithm: grpo\nmodels:\nruntime:\n  # steps: 3\n").runtime.samples_per_prompt == 8


def test_defaults_lie_beneath_and_may_be_a_mapping(write):
    text = write("{algorithm: grpo, runtime: {steps: 3}}")
    runtime = load(text, defaults=DEFAULTS).runtime
    assert (runtime.steps, runtime.samples_per_prompt) == (3, 8)
    assert load(text).runtime.samples_per_prompt == 1


def test_a_mapping_in_place_of_a_file(here):
    assert load({"algorithm": "grpo", "loss": "sft"}, ["seed=4"]).seed == 4


def test_another_function_drops_the_default_arguments_and_keeps_the_section(run):
    config = run("{algorithm: grpo, advantage: rloo, loss: {fn: 'my:loss'}}")
    assert (config.advantage.fn, config.advantage.arguments) == ("rloo", {})
    assert (config.loss.arguments, config.loss.aggregation) == ({}, "token_mean")
    assert run("{algorithm: grpo, advantage: {fn: group, eps: 1}}").advantage.arguments == {"scale": True, "eps": 1}


def test_like_takes_what_is_not_given_along_the_chain(run):
    models = run("""
        algorithm: grpo
        models:
          policy: {load: model, dtype: bfloat16, optimizer: {lr: 1, eps: 2}, vllm: {max_num_seqs: 4}}
          trainer: {optimizer: {lr: 3}}
        """).models
    assert (models["trainer"].module, models["reference"].module, models["policy"].module) == ("fsdp", "fsdp", "native")
    assert (models["reference"].load, models["reference"].dtype, models["reference"].frozen) == (
        "model",
        "bfloat16",
        True,
    )
    assert (models["reference"].optimizer.lr, models["reference"].optimizer.eps) == (3.0, 2.0)
    assert (models["trainer"].frozen, models["trainer"].vllm) == (False, {"max_num_seqs": 4})


def test_like_null_takes_nothing(run):
    assert (
        run("{algorithm: grpo, models: {policy: {load: model}, trainer: {like: null}}}").models["trainer"].load is None
    )


def test_paths_count_from_the_current_directory_then_from_the_file(run, write, here):
    (here / "conf").mkdir()
    (here / "conf" / "own.jsonl").write_text("")
    (here / "conf" / "train.jsonl").write_text("")
    name = write("{algorithm: x, data: {train: [train.jsonl, own.jsonl]}}", "conf/run.yaml")
    assert [source.path for source in load(name).data.train] == ["train.jsonl", "conf/own.jsonl"]


def test_config_imports_no_torch(write):
    code = (
        f"import sys; sys.path.insert(0, {str(sys.path[0])!r}); from coalign.config import load, dump\n"
        "dump(load('run.yaml', ['seed=1']))\n"
        "print(sorted({'torch', 'transformers', 'ray', 'numpy'} & set(sys.modules)))"
    )
    write("{algorithm: grpo, models: {policy: {load: model}}}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/rows.jsonl", "rows"),
        ("a/rows.v2.jsonl.gz", "rows.v2"),
        ("gsm8k/*.jsonl", "gsm8k"),
        ("openai/gsm8k:main:train", "gsm8k"),
        ("openai/gsm8k@0123:main:train", "gsm8k"),
        ("https://host/sets/math.csv?download=1", "math"),
        ("x/saved", "saved"),
    ],
)
def test_what_a_source_is_called(path, name):
    assert SourceConfig(path=path).called == name


TRAINED = """
    algorithm: grpo
    models:
      trainer: {load: model, tokenizer: model, init: random, head_init: zero, pickled_weights: true, dtype: bfloat16,
                chat_template: chatml, score_at: end_of_text, lora: {rank: 4, load: adapter}}
      reference: {load: %s}
"""


def test_other_weights_do_not_take_what_belongs_to_those_of_the_model_that_they_are_like(run, here):
    for name in ("adapter", "merged"):
        (here / name).mkdir()
    reference = run(TRAINED % "merged").models["reference"]
    assert (reference.dtype, reference.lora.rank, reference.frozen) == ("bfloat16", 4, True)
    plain = ModelConfig()
    assert reference.lora.load is None
    for key in KEYS_OF_WEIGHTS:
        assert getattr(reference, key) == getattr(plain, key), key


@pytest.mark.parametrize("load", ["model", "./model", "model/", "'${models.trainer.load}'"])
def test_the_same_weights_take_all(run, here, load):
    (here / "adapter").mkdir()
    reference = run(TRAINED % load).models["reference"]
    assert (reference.lora.load, reference.init, reference.tokenizer) == ("adapter", "random", "model")


def test_adapters_that_are_a_reference_are_not_taken_either(run, here):
    (here / "adapter").mkdir()
    (here / "merged").mkdir()
    models = run("""
        algorithm: grpo
        models:
          policy: {load: model, lora: {load: adapter, rank: 4}}
          trainer: {like: policy, lora: '${models.policy.lora}'}
          reference: {load: merged}
        """).models
    assert models["trainer"].lora.load == "adapter"
    assert (models["reference"].lora.load, models["reference"].lora.rank) == (None, 4)
