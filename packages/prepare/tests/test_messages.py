"""What is wrong before a run begins is said in a few lines: key, cause and remedy. One row for each bad input."""

import copy
import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from coalign import load_config, train
from coalign.cli import app, main
from coalign.config.errors import ConfigError, parse_key
from coalign.config.introspect import list_keys
from coalign.launch.check import check
from coalign.report.display import Display
from coalign_migrate.keys.foreign_keys import load_keys
from coalign_prepare.data_check import ROWS
from tests.runs import settings, show_check

LINES = 5  # of a message
TABLES = ("verl", "verl_sft", "openrlhf", "openrlhf_offline", "slime", "trl", "llama_factory", "swift", "axolotl")
TABLES += ("chatlearn",)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("messages")


def refuse(home, algorithm, changes, *overrides):
    """What `coalign check` says of a small run's configuration with ``changes`` ({dotted key: value})."""
    config = copy.deepcopy(settings(home, algorithm))
    for key, value in changes.items():
        *sections, last = key.split(".")
        inner = config
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    (home / "run.yaml").write_text(json.dumps(config, indent=1))
    with pytest.raises((ValueError, OSError)) as refused:
        check(load_config(home / "run.yaml", overrides, planned=True), Display(quiet=True))
    said = str(refused.value)
    assert len(said.splitlines()) <= LINES, said
    return said


NAMES = [
    ("reward", {"fn": "./rewards/mine.py:score"}, r"reward\[0\]: .*is no name of a module; .* such as `mine:score`"),
    ("reward", {"fn": "mth"}, r"run\.yaml:\d+: reward\[0\]: 'mth' .*did you mean 'math'"),
    ("loss", {"fn": "policy_gradint"}, r"run\.yaml:\d+: loss\.fn: .*did you mean 'policy_gradient'"),
    ("advantage", {"fn": "grup"}, r"run\.yaml:\d+: advantage\.fn: .*did you mean 'group'"),
    ("models.policy.module", "natve", r"run\.yaml:\d+: models\.policy\.module: .*did you mean 'native'"),
    ("rollout", {"fn": "tool_us"}, r"run\.yaml:\d+: rollout\.fn: .*did you mean 'tool_use'"),
]
FOREIGN = [
    ("per_device_train_batch_size", 4, r"is TRL's; here it is runtime\.prompts_per_step"),
    ("num_generations", 4, r"num_generations: is TRL's; here it is runtime\.samples_per_prompt"),
    ("runtime.max_completion_length", 4, r"is TRL's; here it is models\.policy\.sampling\.max_new_tokens"),
    ("beta", 0.1, r"is TRL's; here it is loss\.beta"),
    ("data.train_files", "x", r"data\.train_files: is verl's; here it is data\.train$"),
    ("actor_rollout_ref", {"model": {"path": "x"}}, r"actor_rollout_ref\.model\.path is models\.policy\.load"),
    ("actor_rollout_ref", {"rollout": {"n": 4}}, r"actor_rollout_ref\.rollout\.n is runtime\.samples_per_prompt"),
    ("algorithm", {"adv_estimator": "grpo"}, r"verl's; here algorithm\.adv_estimator is algorithm and advantage\.fn"),
]


PAGE = "https://huggingface.co/Qwen/Qwen2.5-0.5B/tree/main"
LOADS = [
    ("models.policy.load", "runs/one", r"models\.policy\.load: .*; the model is in '.*runs/one/model'"),
    ("models.policy.load", "runs/two", r"models\.policy\.load: .* a run folder, .*two/checkpoints/step_N/hf"),
    ("models.policy.load", "megatron", r"models\.policy\.load: .*Megatron checkpoint: `coalign convert"),
    ("models.policy.load", PAGE, r"load: .*is the address of a page; the name of its model is `Qwen/Qwen2\.5-0\.5B`"),
    ("models.reference", {"load": None}, r"run\.yaml:\d+: models\.reference\.load: missing"),
]


CODE = {
    "unclosed": ("def reward(sample:\n    return 1", r"SyntaxError: '\(' was never closed", 1),
    "needing": ("import no_such_package\n\ndef reward(sample): return 1.0", r"No module named 'no_such_package'", 1),
    "raising": ("def reward(sample): return 1.0\n\nboom = 1 / 0", r"ZeroDivisionError", 3),
}


DATA = [
    ("sft", "", r"data\.train\[0\]: .* holds no rows"),
    ("sft", '{"prompt": "a"', r"data\.train\[0\]: .*rows\.jsonl:1: not valid JSON"),
    ("sft", '{"prompt": "", "answer": ""}', r"rows\.jsonl has no usable rows \(0 used, 1 empty\)"),
    ("sft", '{"prompt": "1+1="}', r"rows\.jsonl:1: no key 'answer'; the row has prompt"),
    ("dpo", '{"prompt": "1+1=", "chosen": "2"}', r"rows\.jsonl:1: no key 'rejected'"),
    ("kto", '{"prompt": "1+1=", "answer": "2"}', r"rows\.jsonl:1: no key 'label'"),
    ("grpo", '{"prompt": 5}', r"rows\.jsonl:1: 'prompt' is int"),
    ("grpo", '{"prompt": "1+1="}', r"reward\[0\]: `math` compares with a row's 'answer', which no row"),
    ("grpo", '{"prompt": "%s", "answer": "2"}' % ("1" * 2000), r"no usable rows .*; data\.max_prompt_tokens is"),
]
JUDGED = {"fn": "remote_judge", "url": "http://127.0.0.1:9/v1", "judge": "x"}
JUDGED |= {"ask": {"fn": "coalign_graders.services.rubric:Rubric"}}
LONG = {"models.policy.sampling.max_new_tokens": 5000, "models.trainer.max_tokens_per_micro": 9000}
SETTINGS = [
    ("grpo", {"data.prompt_format": "the same"}, r"data\.prompt_format: makes the same prompt of all 24 rows"),
    ("grpo", {"data.chat_template": '{{ "x" }}'}, r"data\.chat_template leaves out the content of message 0"),
    ("grpo", {"data.prompt_format": "{questoin}"}, r"no key 'questoin', which data\.prompt_format names"),
    ("sft", {"data.chat_template": "{{ oops"}, r"the chat template is no valid Jinja"),
    ("sft", {"models.trainer.max_tokens_per_micro": 3}, r"a sequence of .* has \d+ tokens, and 3 are what"),
    ("sft", {"output": "/proc/run"}, r"output: nothing can be written in '/proc'"),
    ("sft", {"data.cache": "/proc/cache"}, r"data\.cache: nothing can be written in '/proc'"),
    ("grpo", {"reward": [JUDGED]}, r"reward\[0\]: `remote_judge` cannot judge .* row 0: the row has no rubric under"),
    ("grpo", {"data.stream": True, "runtime.steps": None}, r"data\.stream: is true, and nobody knows how many rows"),
    ("sft", {"data.stream": True, "data.mixing": "size"}, r"data\.mixing: is size, and nobody knows how many rows"),
    ("sft", {"runtime.resume": "gone/step_3"}, r"runtime\.resume: is 'gone/step_3', and there is no such directory"),
    ("sft", {"models.trainer.load": None}, r"models\.trainer\.load: missing"),
    ("grpo", LONG, r"models\.policy\.sampling\.max_new_tokens: is 5000, and the model reads \d+ tokens at once"),
]


WITHOUT_WEIGHTS = [
    ("rlaif", {"reward": [{"model": "judge"}]}, r"models\.judge\.load: missing"),
    ("distill", {"models.teacher": {"load": None}}, r"models\.teacher\.load: missing"),
    ("on_policy_distillation", {"models.teacher": {"load": None}}, r"models\.teacher\.load: missing"),
]


@pytest.mark.parametrize(("algorithm", "rows", "message"), DATA, ids=lambda value: str(value)[:30])
def test_data_that_cannot_be_trained_on_is_found_by_check(home, algorithm, rows, message):
    (home / "rows.jsonl").write_text(rows)
    reward = {"reward": {"fn": "math"}} if algorithm == "grpo" else {}
    said = refuse(home, algorithm, {"data.train": str(home / "rows.jsonl"), **reward})
    assert re.search(rf"run\.yaml:\d+: .*{message}", said), said


ONE_KEY = [("grpo", {key: value}, message) for key, value, message in (*NAMES, *FOREIGN)]


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"), [*SETTINGS, *ONE_KEY, *WITHOUT_WEIGHTS], ids=lambda value: str(value)[:30]
)
def test_names_and_settings_that_do_not_fit_are_found_by_check(home, algorithm, changes, message):
    said = refuse(home, algorithm, changes)
    assert re.search(message, said), said


def test_check_says_what_it_reads(home):
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(ROWS)]
    (home / "many.jsonl").write_text("\n".join([*lines, "broken"]))
    config = settings(home, "grpo", prompts_per_step=32)
    config["models"]["trainer"]["updates_per_batch"] = 40
    said = show_check(config, f"data.train={home / 'many.jsonl'}")
    assert f"many.jsonl: of the first {ROWS} rows, {ROWS} used\n  prompts of " in said
    assert "the first row: '0+1='" in said and "grpo.jsonl: 24 rows, 24 used" in said
    assert "warning: models.trainer.updates_per_batch is 40, and a step has 32 rows" in said
    assert "a step repeats some" not in said
    assert "warning: runtime.prompts_per_step is 32, and data.train has 24 rows" in show_check(config)


@pytest.mark.parametrize(("key", "value", "message"), LOADS, ids=lambda value: str(value)[:30])
def test_what_holds_no_model_is_named_with_where_it_is(home, monkeypatch, key, value, message):
    monkeypatch.chdir(home)
    for folder in ("runs/one/model", "runs/two/checkpoints/step_4/hf", "megatron"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    (home / "runs/one/model/config.json").write_text("{}")
    (home / "megatron/latest_checkpointed_iteration.txt").write_text("4")
    said = refuse(home, "grpo", {key: value, "loss": {"fn": "policy_gradient", "kl_coef": 0.1}})
    assert re.search(message, said), said


def test_rows_that_a_judge_cannot_be_asked_about_are_found_by_check(home):
    questions = {"fn": "coalign_graders.services.rubric:Rubric"}
    config = settings(home, "grpo")
    judge = {"module": "judge", "load": config["models"]["policy"]["load"], "judge": questions}
    rows = [
        {"prompt": f"{i}+1=", "rubric": ["Adds."] if i < 5 else [{"criterion": "Adds.", "weigth": 2}]} for i in range(8)
    ]
    (home / "rubrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    changes = {"models.judge": judge, "reward": [{"model": "judge"}], "data.train": str(home / "rubrics.jsonl")}
    said = refuse(home, "grpo", changes)
    message = (
        r"reward\[0\]: `judge` cannot judge .*rubrics\.jsonl row 5: rubric\[0\] has the key 'weigth'; a criterion has"
    )
    assert re.search(message, said), said


@pytest.mark.parametrize("module", CODE)
def test_code_that_cannot_be_imported_is_shown_by_its_place(home, monkeypatch, capsys, module):
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.setattr("sys.argv", ["coalign", "check", "code.yaml"])
    code, message, line = CODE[module]
    (home / f"{module}.py").write_text(code)
    (home / "code.yaml").write_text(json.dumps(settings(home, "grpo") | {"reward": {"fn": f"{module}:reward"}}))
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert re.search(message, said) and f"{module}.py:{line}" in said and "named by reward[0]" in said, said
    assert len(said.splitlines()) <= LINES, said


def test_keys_of_other_libraries_are_translated_to_keys_that_exist():
    names = [ours for keys in map(load_keys, TABLES) for ours in (*keys.same.values(), *keys.combined.values())]
    keys = {key for ours in names for key in re.findall(r"\w+(?:\[\])?(?:\.\w+)+", ours)}
    for text in keys - {"my.module"}:
        *section, last = parse_key(text)
        arguments = section[0] in ("loss", "advantage", "kl", "reward", "filter") or section[-1] in ("loss", "vllm")
        model = section == ["models"]  # by any name
        assert arguments or model or last in list_keys(tuple(section)), text


def test_a_text_may_begin_with_a_brace_on_the_command_line(home):
    config = settings(home, "grpo")
    for text in ("{prompt} Think.", "Question: {prompt}", "{prompt}", "'{prompt}'"):
        given = load_config(config, [f"data.prompt_format={text}"]).data.prompt_format
        assert given == text.strip("'")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(config, ["seed=[1"])


def test_commands_name_what_was_mixed_up(home, tmp_path, monkeypatch):
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    (tmp_path / "pipeline.yaml").write_text("stages: [{train: run.yaml}]\n")
    (tmp_path / "run.yaml").write_text(json.dumps(settings(home, "sft")))
    monkeypatch.chdir(tmp_path)
    for command, message in {
        "train run.yaml --runtime.steps=5": "a setting stands without dashes: `runtime.steps=5`",
        "check run.yaml --runtime.steps 5": "a setting stands without dashes, like runtime.steps=100",
        "train pipeline.yaml": "pipeline.yaml:1: stages: makes this file a pipeline, not a run: start it with `",
        "pipeline run.yaml": "run.yaml:1: algorithm: makes this file a run, not a pipeline: start it with `",
        "check empty.yaml": "empty.yaml: is empty; `coalign init grpo`",
    }.items():
        done = CliRunner().invoke(app, command.split())
        assert message in str(done.exception), (command, done.output)


def test_an_architecture_that_transformers_does_not_know_is_named_with_its_key(home, tmp_path):
    shutil.copytree(settings(home, "sft")["models"]["trainer"]["load"], tmp_path / "model")
    fields = json.loads((tmp_path / "model" / "config.json").read_text()) | {"model_type": "qwen22"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    said = refuse(home, "sft", {"models.trainer.load": str(tmp_path / "model")})
    message = r"run\.yaml:\d+: models\.trainer\.load: .*model type `qwen22`, which transformers .* `qwen2`"
    assert re.search(message, said)


def test_a_run_refuses_a_folder_that_cannot_be_written_by_its_key(home):
    with pytest.raises(ConfigError, match=r"output: nothing can be written in '/proc"):
        train(settings(home, "sft"), {"output": "/proc/run"}, quiet=True)


def test_rows_of_which_none_of_the_first_is_usable_are_no_data(home, tmp_path):
    rows = "".join(json.dumps({"prompt": "1+1=" * 20, "answer": "2"}) + "\n" for _ in range(ROWS + 10))
    (tmp_path / "long.jsonl").write_text(rows)
    said = refuse(home, "grpo", {"data.train": str(tmp_path / "long.jsonl"), "data.max_prompt_tokens": 8})
    assert re.search(r"data\.train\[0\]: .*long\.jsonl has no usable row among its first 5,000 \(.* 8", said)
