"""Templates and the JSON Schema: what is written reads back to the same, and editors refuse what `load` refuses."""

import json
import re

import pytest

from coalign.config import load
from coalign.config.yaml_reader import parse
from coalign_prepare.json_schema import build_json_schema
from coalign_prepare.yaml_writer import to_commented_yaml
from tests.config.conftest import DEFAULTS


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
