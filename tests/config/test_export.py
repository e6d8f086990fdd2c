"""What is written out reads back to the same."""

import json
import re

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coalign.config import dump, load
from coalign.config.export import build_json_schema, to_commented_yaml
from coalign.config.yaml_reader import parse
from tests.config.conftest import DEFAULTS, recipe_defaults

SAMPLES = st.sampled_from(
    [
        "yes",
        "1e-6",
        "1_0",
        "null",
        "~",
        "???",
        "${seed}",
        "\\${a}",
        "\\\\${a}",
        "a: b",
        "#x",
        "2026-11-21",
        "0x1F",
        "1:30",
        "\n",
        "\x85",
        "a\x85b",
        " \u2028\u2029\t\r\x00\x1b\x7f\xa0\ufeff ",
    ]
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | SAMPLES
ANY_TEXT = st.text(max_size=8) | SAMPLES | st.just("\ud800 \udfff")  # a configuration refuses lone surrogates
POSITIVE = st.integers(1, 10**9)
NUMBER = st.floats(0, 1e30)
SCALAR = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | NUMBER | TEXT
OPEN = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT.filter(str.strip), inner, max_size=2),
    max_leaves=4,
)
NAMES = st.text("abcdefgh_", min_size=1, max_size=6)


def section(**keys):
    return st.fixed_dictionaries({}, optional=keys)


MODEL = section(
    dtype=st.sampled_from(["float32", "bfloat16"]),
    frozen=st.booleans(),
    load=st.just("model"),
    max_tokens_per_micro=st.none() | POSITIVE,
    optimizer=section(lr=NUMBER, betas=st.tuples(st.just(0.5), st.floats(0, 1))),
    loss=st.none()
    | st.builds(
        lambda fn, more: {**more, "fn": fn}, NAMES, st.dictionaries(st.sampled_from(["a", "b"]), OPEN, max_size=2)
    ),
    sampling=section(stop=st.lists(TEXT, max_size=3), temperature=NUMBER),
    vllm=st.dictionaries(NAMES, OPEN, max_size=3),
)
RUN = st.fixed_dictionaries(
    {"algorithm": NAMES},
    optional={
        "output": TEXT,
        "data": section(
            train=st.lists(st.just("train.jsonl"), max_size=2), system=st.none() | TEXT, shuffle=st.booleans()
        ),
        "reward": st.lists(
            st.builds(lambda fn, w: {"fn": fn, "weight": w}, NAMES, NUMBER.filter(bool)),
            max_size=2,
            unique_by=lambda reward: reward["fn"],
        ),
        "runtime": section(steps=st.none() | POSITIVE, call_timeout=NUMBER.filter(bool)),
        "models": st.dictionaries(NAMES, MODEL, max_size=2),
    },
)


def escaped(value):
    if isinstance(value, str):
        return "x" + value.replace("$", "") if "$" in value or value == "???" else value
    if isinstance(value, dict):
        return {name: escaped(item) for name, item in value.items()}
    return [escaped(item) for item in value] if isinstance(value, list | tuple) else value


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)
@given(RUN)
def test_dump_reads_back_to_an_equal_configuration(here, data):
    config = load(escaped(data))
    (here / "dumped.yaml").write_text(dump(config), encoding="utf-8")
    assert load("dumped.yaml") == config


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(ANY_TEXT, OPEN | ANY_TEXT, max_size=3))
def test_emitted_yaml_means_the_same_here_and_to_others(data):
    from coalign.config.yaml_reader import emit

    for flow in (False, True):
        written = emit(data, flow=flow).encode()  # no lone surrogate is left in it
        assert parse(written.decode(), "")[0] == data


@pytest.mark.parametrize("text", ["${seed}", "\\${seed}", "a\\\\${seed}", "$", "{$}", "${", "\\", "???", "$${x}"])
def test_texts_that_look_like_references_survive(here, text):
    from coalign.config.schema import RunConfig

    config = RunConfig(algorithm="x", data={"system": text})
    (here / "dumped.yaml").write_text(dump(config))
    assert load("dumped.yaml") == config


def test_a_dump_with_recipe_defaults_reads_back(run, here):
    config = run("{algorithm: grpo, advantage: rloo, models: {policy: {load: model, optimizer: {lr: 1e-6}}}}")
    (here / "dumped.yaml").write_text(dump(config))
    assert load("dumped.yaml", defaults=recipe_defaults) == config
    assert yaml.safe_load(dump(config))["models"]["policy"]["optimizer"]["lr"] == 1e-6


def test_the_template_reads_as_what_it_was_made_from(here):
    given_keys = {"algorithm": "grpo", **DEFAULTS}
    text = to_commented_yaml(given_keys)
    (here / "template.yaml").write_text(text)
    assert load("template.yaml") == load(given_keys)
    assert "\n  # Training steps; null: as many as `epochs` give.\n  # steps: null\n" in text
    assert "\n  samples_per_prompt: 8\n" in text
    assert "\n  trainer: {module: fsdp, like: policy}\n" in text


def test_references_of_defaults_stay_references_in_the_template(here):
    given_keys = {"algorithm": "grpo", "seed": "${runtime.samples_per_prompt}", "runtime": {"samples_per_prompt": 8}}
    (here / "template.yaml").write_text(to_commented_yaml(given_keys))
    assert load("template.yaml").seed == 8


def test_every_commented_key_of_the_template_can_be_uncommented(here):
    """Keys are commented with their defaults, so reading them changes nothing but what is written of functions'
    arguments; four are examples."""
    template = to_commented_yaml({"algorithm": "grpo", **DEFAULTS})
    text, found = re.subn(
        r"# (?=(?!train|eval|reward|trackers)[a-z_]+: (?!null$)[^ ]+$)", "", template, flags=re.MULTILINE
    )
    (here / "all.yaml").write_text(text)
    assert found > 40
    plain, written = load({"algorithm": "grpo", **DEFAULTS}), load("all.yaml")
    assert written.model_copy(update={"loss": plain.loss, "advantage": plain.advantage}) == plain
    assert written.loss.arguments.items() >= {"kl_coef": 0.0, "clip_low": 0.2, "kl_estimator": "k3"}.items()
    assert written.advantage.arguments == {"scale": True, "unbiased": True, "eps": 1e-6}


def test_the_template_of_a_whole_configuration(run, here):
    config = run(
        "{algorithm: grpo, reward: math, data: {train: train.jsonl, system: 'a \\${b}'}, models: {a: {load: model}}}"
    )
    (here / "template.yaml").write_text(to_commented_yaml(config))
    assert load("template.yaml") == config


@pytest.fixture(scope="module")
def validate():
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.validators.validator_for(build_json_schema())(build_json_schema())
    validator.check_schema(build_json_schema())
    return lambda text: [error.message for error in validator.iter_errors(parse(text, "")[0])]


@pytest.mark.parametrize(
    "text",
    [
        "{algorithm: grpo, reward: math, loss: sft, data: {train: a.jsonl, eval: [b.jsonl, {path: c}]}}",
        "{algorithm: ppo, loss: {clip_high: 0.3}, kl: {fn: adaptive_kl, coef: '${x}', target: 6}, advantage: {lam: 1}}",
        "{algorithm: grpo, reward: [{fn: remote, url: 'http://a'}, {fn: CosineLength, by: {fn: math}, max_tokens: 9}]}",
        "{algorithm: grpo, include: a.yaml, seed: '${env:SEED}', models: {policy: {num_gpu: '${x}', vllm: {a: 1}}}}",
        "{algorithm: grpo, models: {policy: null}, loss: {fn: 'my:fn', my_own: 3}, runtime: {steps: null}, seed: null}",
    ],
)
def test_editors_accept_what_load_accepts(validate, text):
    assert validate(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "{algorithm: x, seeed: 1}",
        "{algorithm: x, seed: a}",
        "{algorithm: x, runtime: {stepz: 1}}",
        "{algorithm: x, loss: {fn: dpo, betta: 0.1}}",
        "{algorithm: x, advantage: {fn: gae, lam: high}}",
        "{algorithm: x, kl: {fn: FixedKL, coef: a}}",
        "{algorithm: x, reward: [{fn: math, strict: 3}]}",
    ],
)
def test_editors_refuse_what_load_refuses(validate, text):
    assert validate(text)


def test_the_schema_describes_its_keys():
    schema = json.loads(json.dumps(build_json_schema()))
    assert schema["properties"]["output"]["description"] == "The run folder."
    assert schema["required"] == ["algorithm"]
