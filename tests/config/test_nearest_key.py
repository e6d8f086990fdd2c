"""What an unknown key may have meant: a key of another section, by name, by what people call it, by spelling."""

import pytest

from coalign.config import ConfigError, load


def complain(overrides):
    with pytest.raises(ConfigError) as caught:
        load({"algorithm": "grpo", "models": {"policy": {}, "trainer": {"like": "policy"}}}, overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("models.trainer.lr=1", "'models.trainer.optimizer.lr'"),
        ("models.policy.max_new_tokens=8", "'models.policy.sampling.max_new_tokens'"),
        ("models.policy.path=x", "'models.policy.load'"),
        ("models.policy.gpus=2", "'models.policy.num_gpu'"),
        ("models.trainer.batch_size=8", "'runtime.prompts_per_step'"),
        ("runtime.gpus=2", "'models.NAME.num_gpu'"),
        ("runtime.seed=1", "'seed'"),
        ("runtime.temperature=1", "'runtime.eval_sampling.temperature'"),
        ("temperature=1", "'models.policy.sampling.temperature' or 'runtime.eval_sampling.temperature'"),
        ("lr=1", "'models.trainer.optimizer.lr'"),
        ("steps=1", "'runtime.steps' or 'replay.steps'"),
        ("batch_size=8", "'runtime.prompts_per_step'"),
        ("eval_every=8", "'runtime.eval_every'"),
        ("evalevery=8", "'runtime.eval_every'"),
        ("data.dataset=x", "'data.train'"),
        ("model=x", "'models.NAME.load'"),
        ("wandb.project=x", "'runtime.trackers.project'"),
        ("lora.r=8", "'models.trainer.lora.rank'"),
        ("lora={r: 8, alpha: 1}", "'models.trainer.lora.rank' or 'models.trainer.lora.alpha'"),
        ("lora=true", "'models.trainer.lora'"),
        ("training.lr=1", "'models.trainer.optimizer.lr'"),
        ("policy.load=x", "'models.policy.load'"),
        ("runtime.stepz=1", "'steps'"),
    ],
)
def test_what_was_meant_is_named_with_its_section(override, meant):
    (line,) = complain([override])
    assert line.endswith(f": unknown key; did you mean {meant}?")


def test_names_of_other_frameworks_are_theirs():
    (line,) = complain(["learning_rate=1"])
    assert line.endswith("learning_rate: is TRL's; here it is models.trainer.optimizer.lr")


def test_a_model_like_another_repeats_no_problem():
    assert len(complain(["models.policy.tp=2", "models.policy.optimzer.lr=1"])) == 2


def test_a_penalty_without_a_function_is_told_from_a_term_of_the_loss():
    (line,) = complain(["kl.coef=0.1"])
    assert "kl.fn: missing; `kl: {fn: FixedKL, coef: 0.1}` is a penalty in the reward, and loss.kl_coef a term" in line


def test_true_is_no_section():
    (line,) = complain(["models.trainer.lora=true"])
    assert line.endswith("models.trainer.lora: is true; expected a mapping of keys to values; `{}` takes all defaults")


def test_layers_in_one_text_are_a_list():
    (line,) = complain(["models.trainer.lora.target=q_proj, v_proj"])
    assert line.endswith("is 'q_proj, v_proj'; several layers are a list: [q_proj, v_proj]")


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    config = load({"algorithm": "grpo"}, ["data.train=~/rows.jsonl", "output=~/run", "data.system=~ is no path"])
    assert config.data.train[0].path == f"{tmp_path}/rows.jsonl" and config.output == f"{tmp_path}/run"
    assert config.data.system == "~ is no path"
    (line,) = complain(["data.train=~/row.jsonl"])
    assert f"did you mean '{tmp_path}/rows.jsonl'?" in line
