"""What is written out reads back to the same."""

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coalign.config import dump, load
from coalign.config.yaml_reader import parse
from tests.config.conftest import recipe_defaults

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
