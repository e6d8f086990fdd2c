"""Every message, word for word."""
# ruff: noqa: E501 (messages stand on one line, as they are told)

import pytest

from coalign.config import ConfigError, check_names, load, locate_problems
from coalign.config.functions import bind


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("models: {policy: {optimzer: {lr: 1}}}", "models.policy.optimzer: unknown key; did you mean 'optimizer'?"),
        (
            "runtime: {qqq: 1}",
            "runtime.qqq: unknown key; there are: cluster, ray_address, accelerator, wait_for_devices, steps, epochs, "
            "tokens, prompts_per_step, tokens_per_step, samples_per_prompt, max_staleness, colocation, …",
        ),
        ("data: {on_missing_key: drop}", "data.on_missing_key: is called data.bad_rows now"),
        ("runtime: {steps: '3'}", "runtime.steps: is '3'; expected a whole number"),
        ("runtime: {steps: true}", "runtime.steps: is true; expected a whole number"),
        ("runtime: {steps: 0}", "runtime.steps: is 0; expected a number above 0"),
        ("seed: -1", "seed: is -1; expected a number of at least 0"),
        ("output: 12", "output: is 12; expected a text (in quotes: '12')"),
        ("data: {shuffle: yes}", "data.shuffle: is 'yes'; expected true or false"),
        ("runtime: [1]", "runtime: is [1]; expected a mapping of keys to values"),
        ("runtime: {colocation: policy}", "runtime.colocation: is 'policy'; expected a list"),
        (
            "models: {policy: {dtype: bfloat}}",
            "models.policy.dtype: is 'bfloat'; expected float32 | bfloat16; did you mean 'bfloat16'?",
        ),
        ("models: {policy: {optimizer: {betas: [1]}}}", "models.policy.optimizer.betas[1]: missing"),
        (
            "reward: {weight: 1}",
            "reward: has neither of `fn` (a function) and `model` (a reward model of the run); expected one",
        ),
        ("reward: [math, {fn: x, weight: a}]", "reward[1].weight: is 'a'; expected a number"),
        (
            "loss: {aggregation: constant}",
            "loss.constant_length: missing: aggregation `constant` needs it (usually max_new_tokens)",
        ),
        (
            "loss: {constant_length: 3}",
            "loss.constant_length: has no effect with aggregation `token_mean`; use `constant`",
        ),
        (
            "runtime: {colocation: [[policy, trainr]]}",
            "runtime.colocation[0]: there is no model 'trainr'; did you mean 'trainer'?",
        ),
        (
            "runtime: {colocation: [[policy], [policy]]}",
            "runtime.colocation[1]: 'policy' is in groups 0 and 1; a model belongs to one group",
        ),
        (
            "runtime: {colocation: [[policy, policy]]}",
            "runtime.colocation[0]: 'policy' is twice in one group; a model belongs to one group",
        ),
        ("runtime: {eval_every: 2}", "runtime.eval_every: is 2, and there is no data.eval"),
        (
            "runtime: {eval_samples: 4}",
            "runtime.eval_samples: is 4, and runtime.eval_sampling.temperature is 0 (greedy), so a "
            "prompt's samples would all be the same; set a temperature above 0",
        ),
        (
            "models: {policy: {num_gpu: 4, tensor_parallel: 3}}",
            "models.policy.tensor_parallel: is 3, which does not divide num_gpu (4)",
        ),
        (
            "data: {train: {path: train.jsonl, weight: 0}}",
            "data.train: every source has weight 0, so there is none to draw from",
        ),
        (
            "data: {prompt_format: '{a'}",
            "data.prompt_format: is no Python format string: expected '}' before end of string; "
            "a brace that is text is written twice",
        ),
        ("models: {judge: {like: polcy}}", "models.judge.like: there is no model 'polcy'; did you mean 'policy'?"),
        (
            "models: {policy: {like: reference}}",
            "models.policy.like: models are like each other: policy → reference → trainer → policy",
        ),
        ("output: ${seeed}", "output: '${seeed}': there is no key 'seeed'"),
        ("output: ${output}", "output: '${output}': refers to itself"),
        ("output: ${oc:1}", "output: '${oc:1}': only ${key.of.this.file} and ${env:NAME,default} are known"),
        (
            "output: ${env:NO_SUCH}",
            "output: '${env:NO_SUCH}': the environment variable NO_SUCH is not set; set it, or write "
            "${env:NO_SUCH,default}",
        ),
        (
            "output: ${seed",
            "output: '${seed': expected ${key.of.this.file} or ${env:NAME,default}; where ${ is meant as text, "
            "write \\${",
        ),
        ("include: 3", "include: expected a file or a list of files"),
        ("include: bsae.yaml", "include: there is no file 'bsae.yaml'; did you mean 'base.yaml'?"),
        ("include: run.yaml", "include: files include each other: run.yaml → run.yaml"),
        ("seed: !!python/name:os.system x", "seed: the tag tag:yaml.org,2002:python/name:os.system is not supported"),
    ],
)
def test_one_problem_in_line_2(complaint, write, text, expected):
    write("{}", "base.yaml")
    assert complaint(f"algorithm: grpo\n{text}\n") == f"run.yaml:2: {expected}"


def test_missing_data_names_both_directories(complaint, here, write):
    (here / "conf").mkdir()
    name = write("algorithm: x\ndata:\n  train: trian.jsonl\n", "conf/run.yaml")
    with pytest.raises(ConfigError) as caught:
        load(name)
    assert str(caught.value) == (
        f"conf/run.yaml:3: data.train.path: there is no file 'trian.jsonl' (looked for {here}/trian.jsonl and "
        f"{here}/conf/trian.jsonl); did you mean '{here}/train.jsonl'?"
    )


def test_missing_model_is_told_once_though_others_are_like_it(complaint, here):
    text = "algorithm: grpo\nmodels:\n  policy:\n    load: ./Qwen/Qwen3-8B\n"
    assert complaint(text) == (
        f"run.yaml:4: models.policy.load: there is no directory './Qwen/Qwen3-8B' (looked for {here}/Qwen/Qwen3-8B)"
    )


def test_all_problems_at_once_with_their_files_and_overrides(complaint, write):
    write("runtime:\n  stepz: 1\n", "base.yaml")
    text = (
        "include: base.yaml\nalgorithm: grpo\nmodels:\n  policy: {lod: model}\n  trainer: {dtype: 3}\noutput: ${no}\n"
    )
    assert complaint(text, "data.trian=x", "models.trainer.head=lmm").splitlines() == [
        "base.yaml:2: runtime.stepz: unknown key; did you mean 'steps'?",
        "override 'data.trian=x': data.trian: unknown key; did you mean 'train'?",
        "override 'models.trainer.head=lmm': models.trainer.head: is 'lmm'; expected lm | value | reward; did you mean 'lm'?",
        "run.yaml:4: models.policy.lod: unknown key; did you mean 'load'?",
        "run.yaml:5: models.trainer.dtype: is 3; expected float32 | bfloat16",
        "run.yaml:6: output: '${no}': there is no key 'no'",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("runtime.steps", "expected key=value, like runtime.steps=100"),
        ("=3", "expected key=value, like runtime.steps=100"),
        ("seed=[1", "not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("reward[3].weight=1", "reward[3].weight: the list has no such item"),
        (
            "output=${seed",
            "output: '${seed': expected ${key.of.this.file} or ${env:NAME,default}; where ${ is meant as "
            "text, write \\${",
        ),
        ("runtime.steps=x", "runtime.steps: is 'x'; expected a whole number"),
        ("runtime={stepz: 1}", "runtime.stepz: unknown key; did you mean 'steps'?"),
    ],
)
def test_a_wrong_override(complaint, override, expected):
    assert complaint("{algorithm: grpo, reward: [math]}", override) == f"override '{override}': {expected}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\nb: 2\n", "run.yaml:2: not valid YAML: expected ',' or ']', but got ':'"),
        (
            "algorithm: grpo\noutput: a: b\n",
            "run.yaml:2: not valid YAML: mapping values are not allowed here (a colon in a text needs quotes; or the line is "
            "indented wrongly)",
        ),
        (
            "runtime:\n\tsteps: 1\n",
            "run.yaml:2: not valid YAML: found character '\\t' that cannot start any token (indent "
            "with spaces, not tabs)",
        ),
        ("a: \x01\n", "run.yaml:1: not valid YAML: special characters are not allowed"),
        ("- 1\n", "run.yaml:1: expected keys with values, like `algorithm: grpo`"),
        ("seed: 1\nruntime: {}\nseed: 2\n", "run.yaml:3: seed: given twice, first in line 1"),
        ("models:\n  a: &a {b: *a}\n", "run.yaml:2: models.a.b: an alias that contains itself"),
        ("", "run.yaml: is empty; `coalign init grpo` prints a run to begin with"),
        ("seed: 1", "algorithm: missing; name a recipe, such as `algorithm: grpo` (`coalign recipes` lists them)"),
        ("algorithm: gpro\n", "run.yaml:1: algorithm: 'gpro' is no recipe; did you mean 'grpo'?"),
    ],
)
def test_a_file_that_cannot_be_read(complaint, text, expected):
    assert complaint(text) == expected


def test_a_file_that_is_not_there_or_not_text(here, write):
    write("", "run.yaml")
    with pytest.raises(ConfigError, match=r"^there is no file 'rum.yaml'; did you mean 'run.yaml'\?$"):
        load("rum.yaml")
    (here / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"^'bytes.yaml' is not UTF-8 text$"):
        load("bytes.yaml")
    with pytest.raises(ConfigError, match="'model' cannot be read: is a directory"):
        load("model")


def test_a_problem_in_the_defaults_names_them(write):
    with pytest.raises(ConfigError) as caught:
        load(write("algorithm: mine"), defaults={"runtime": {"stepz": 1}})
    assert str(caught.value) == "defaults of mine: runtime.stepz: unknown key; did you mean 'steps'?"


def test_models_that_the_recipe_does_not_have(run):
    config = run("algorithm: grpo\nmodels:\n  polciy: {load: model}\n")
    with pytest.raises(ConfigError) as caught:
        check_names(config, ["policy", "trainer", "reference", "reward"])
    assert str(caught.value) == "run.yaml:3: models.polciy: `grpo` has no such model; did you mean 'policy'?"
    check_names(config, ["policy", "polciy", "trainer", "reference"])


def test_arguments_of_a_function_are_located(run):
    def loss(x, *, clip_low: float = 0.2):
        return x

    config = run("algorithm: grpo\nloss:\n  clip_lwo: 0.1\n  kl_coef: null\n")
    with pytest.raises(ConfigError) as caught, locate_problems(config):
        bind(loss, {"clip_lwo": 0.1}, "loss")
    assert str(caught.value) == "run.yaml:3: loss.clip_lwo: unknown argument of loss; did you mean 'clip_low'?"


def test_like_of_what_is_no_model_is_told_once(complaint):
    text = "algorithm: grpo\nmodels:\n  judge: 3\n  other: {like: judge}\n"
    assert complaint(text) == "run.yaml:3: models.judge: is 3; expected a mapping of keys to values"


def test_an_error_survives_pickling(run):
    import pickle

    with pytest.raises(ConfigError) as caught:
        run("algorithm: grpo\nseed: x\n")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)
