"""`coalign import-config`: files of verl, OpenRLHF, ChatLearn and TRL become runs that `coalign check` accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coalign import load_config
from coalign.cli import app
from coalign.config.yaml_reader import parse
from coalign.launch.check import check
from coalign.report.display import Display
from coalign_migrate.import_config import import_config
from tests.tiny import tiny_model_dir

FILES = sorted((Path(__file__).parent / "files").iterdir())
PAIR = {"chosen": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
PAIR["rejected"] = [PAIR["chosen"][0], {"role": "assistant", "content": "3"}]
ROWS = {
    "verl": {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}},
    "openrlhf": {"question": "1+1?", "answer": "2"},
    "trl": {"prompt": "1+1?", "answer": "2"},
    "pairs": PAIR,
    "conversations": {"messages": PAIR["chosen"]},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, a reward model, and rows of every kind."""
    home = tmp_path_factory.mktemp("foreign")
    tiny_model_dir(home / "model", hidden=64, heads=2, kv_heads=1)  # as vLLM has kernels for
    for name, row in ROWS.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    return home


def translate(home: Path, name: str, **changes: str) -> tuple[str, Path]:
    """Import a file with this folder's model and data; return the YAML, and the file that holds it."""
    for file in FILES:  # one may name another
        text = file.read_text()
        for old, new in ({"MODEL_DIR": str(home / "model"), "DATA_DIR": str(home)} | changes).items():
            text = text.replace(old, new)
        (home / file.name).write_text(text)
    (source,) = [file for file in FILES if file.name == name]
    written = home / f"{source.stem}_run.yaml"
    written.write_text(yaml := import_config(home / name))
    return yaml, written


def read(home: Path, name: str, **changes: str):
    return load_config(translate(home, name, **changes)[1])


def test_verl_grpo(home):
    yaml, file = translate(home, "verl_grpo.sh")
    config = load_config(file)
    assert config.algorithm == "grpo" and config.loss.arguments["clip_high"] == 0.28
    assert (config.loss.arguments["kl_coef"], config.loss.arguments["kl_estimator"]) == (0.001, "k3")
    assert (config.runtime.prompts_per_step, config.runtime.samples_per_prompt) == (64, 5)
    assert config.models["trainer"].updates_per_batch == 4  # 64 prompts in mini-batches of 16
    assert config.models["policy"].module == "transformers" and not config.models["policy"].vllm
    assert config.models["trainer"].optimizer.weight_decay == 0.01  # verl's own default
    assert config.data.train[0].keys == {"answer": "reward_model.ground_truth"}
    [tracker] = config.runtime.trackers
    assert (tracker.name, tracker.project, tracker.run) == ("wandb", "verl_grpo_gsm8k", "tiny")
    assert "# Not translated (1):\n#   actor_rollout_ref.actor.my_own_key = 3\n" in yaml
    assert "#   trainer.n_gpus_per_node = 8: num_gpu is auto" in yaml


def test_verl_ppo(home):
    config = read(home, "verl_ppo.yaml")
    assert config.algorithm == "ppo" and config.kl.arguments["coef"] == 0.02
    assert config.advantage.arguments["lam"] == 0.95 and config.loss.aggregation == "sequence_mean_token_mean"
    trainer, value = config.models["trainer"], config.models["value"]
    assert (trainer.epochs_per_batch, trainer.updates_per_batch, trainer.learns_after) == (2, 2, 5)
    assert trainer.optimizer.warmup == 20  # a tenth of 200 steps
    assert trainer.lora.rank == 8 and trainer.lora.target == ["all-linear"]
    assert value.optimizer.lr == 1e-5 and value.loss.arguments["clip"] == 0.4
    assert config.models["reward"].head == "reward" and [part.model for part in config.reward] == ["reward"]
    assert config.models["policy"].sampling.top_k == 0 and config.output == "runs/verl_ppo"


def test_openrlhf_ppo(home):
    yaml, file = translate(home, "openrlhf_ppo.sh", REWARD_DIR=str(home / "model"))
    config = load_config(file)
    assert config.algorithm == "ppo" and config.data.chat_template == "auto"
    assert config.models["trainer"].updates_per_batch == 2  # 64 samples in batches of 32
    assert config.models["trainer"].optimizer.betas == (0.9, 0.95)
    assert config.models["trainer"].module == "deepspeed" and config.models["trainer"].deepspeed.stage == 3
    assert config.reward[0].normalise == "running" and config.data.train[0].keys == {"answer": "answer"}
    assert "#   ptx_coef = 0.05" in yaml


def test_openrlhf_offline(home):
    config = read(home, "openrlhf_dpo.sh")
    assert config.algorithm == "dpo" and config.loss.arguments == {"beta": 0.1, "label_smoothing": 0.1}
    assert config.models["trainer"].lora.target == ["*.q_proj", "*.v_proj"] and config.runtime.prompts_per_step == 16
    config = read(home, "openrlhf_sft.sh")
    assert config.algorithm == "sft" and config.data.prompt_format == "User: {prompt}\nAssistant: "
    assert (config.data.prompt_key, config.data.answer_key, config.data.chat_template) == ("question", "answer", "none")


def test_trl(home):
    config = read(home, "trl_grpo.yaml")
    assert (config.runtime.prompts_per_step, config.runtime.samples_per_prompt) == (16, 8)  # 16 · 4 · 2 samples
    assert config.loss.aggregation == "constant" and config.loss.constant_length == 32
    assert config.advantage.arguments["scale"] == "none" and config.truncated.fn == "mask_truncated"
    assert config.models["trainer"].epochs_per_batch == 2 and config.models["trainer"].optimizer.warmup == 10
    config = read(home, "trl_dpo.yaml")
    assert config.loss.fn == "ipo" and config.loss.arguments["beta"] == 0.05
    assert config.models["trainer"].lora.rank == 8 and config.runtime.save_every == 50
    config = read(home, "trl_sft.sh")
    assert config.runtime.prompts_per_step == 64 and config.data.train_on == "assistant"  # 2 · 8 · 4


def test_chatlearn_grpo(home):
    yaml, file = translate(home, "chatlearn_grpo.yaml")
    config = load_config(file)
    assert config.algorithm == "grpo" and config.runtime.steps == 200 and config.output == "runs/chatlearn_grpo"
    assert (config.runtime.prompts_per_step, config.runtime.samples_per_prompt) == (16, 32)  # 512 samples
    policy, trainer = config.models["policy"], config.models["trainer"]
    assert (policy.module, policy.sampling.max_new_tokens, policy.sampling.top_k) == ("vllm", 32, 0)
    assert (trainer.updates_per_batch, trainer.max_tokens_per_micro, trainer.optimizer.lr) == (2, 4096, 2e-6)
    assert trainer.optimizer.betas == (0.9, 0.95) and trainer.compute_dtype == "bfloat16"  # ChatLearn's own defaults
    assert trainer.activation_checkpointing == "full" and policy.num_gpu == trainer.num_gpu == "auto"
    assert (config.loss.arguments["clip_low"], config.loss.arguments["clip_high"]) == (0.2, 0.28)
    assert (config.loss.arguments["kl_coef"], config.loss.arguments["kl_estimator"]) == (0.001, "k3")
    assert config.data.train[0].keys == {"answer": "reward_model.ground_truth"}
    assert config.runtime.eval_sampling.temperature == 0.6 and not config.runtime.eval_at_start
    [tracker] = config.runtime.trackers
    assert (tracker.name, tracker.project, tracker.run) == ("wandb", "math", "tiny_grpo")
    assert "Not translated (1):\n#   models.policy_trainer.final_clip_ratio = 3: `loss.dual_clip`" in yaml
    assert "#   models.ref_policy.num_gpu = 8: num_gpu is auto" in yaml


def test_chatlearn_overrides_of_a_script(home):
    yaml, file = translate(home, "chatlearn_gspo.sh")
    config = load_config(file)
    assert config.algorithm == "gspo" and "means over tokens, `gspo` over responses" in yaml
    assert config.loss.arguments["clip_high"] == 0.001 and config.runtime.prompts_per_step == 32
    assert "reference" not in yaml.split("\n\n")[-1] and "models.policy.num_gpu = $num_device: num_gpu is auto" in yaml


def test_chatlearn_files_with_a_file_for_each_model(tmp_path, monkeypatch):
    monkeypatch.setenv("policy_tp", "2")
    (tmp_path / "base.yaml").write_text("max_new_tokens: ${limit:512}\nseq_length: 1024\nlr: 1e-6\nhidden_size: 64\n")
    (tmp_path / "shared.yaml").write_text("load: ${policy_load:/models/policy}\nlr: ${lr:2.4e-7}\n")
    (tmp_path / "policy.yaml").write_text(
        "includes: [base.yaml, shared.yaml]\ntop_p: ${top_p:0.9}\ntop_k: ${top_k:-1}\n"
        "tensor_model_parallel_size: ${policy_tp}\nsliding_window: ${sliding_window:None}\n"
    )
    (tmp_path / "trainer.yaml").write_text(
        "includes: [base.yaml, shared.yaml]\nmin_lr: 1.2e-7\nlr_decay_style: linear\nlr_warmup_iters: 100\n"
        "adam_beta2: 0.95\ncliprange: 0.2\ncliprange_value: 0.1\ngamma: 1\nlam: 0.95\ninit_kl_coef: 0.02\n"
    )
    (tmp_path / "reward.yaml").write_text("load: ${reward_load}\n")
    (tmp_path / "value.yaml").write_text("load: /models/value\nlr: 5e-6\n")
    (tmp_path / "rlhf.yaml").write_text(
        "models:\n"
        "  policy: {model_config_file: policy.yaml, num_gpu: '${num_gpu_policy:8}', trainable: False}\n"
        "  reference: {model_config_file: policy.yaml, num_gpu: 8}\n"
        "  reward: {model_config_file: reward.yaml, num_gpu: 8}\n"
        "  value: {model_config_file: value.yaml, num_gpu: 8}\n"
        "  ppo_policy: {model_config_file: trainer.yaml, num_gpu: 16, trainable: True}\n"
        "  ppo_value: {model_config_file: value.yaml, num_gpu: 8, trainable: True}\n"
        "runtime:\n"
        "  colocation: ['policy,reference,reward', 'ppo_policy,ppo_value']\n"
        "  num_episode: 20\n  sample_per_episode: 1024\n  train_global_batch_size: 512\n  data_path: '${data_path}'\n"
        "  output_dir: runs/rlhf\n"
    )
    written = tmp_path / "run.yaml"
    written.write_text(yaml := import_config(tmp_path / "rlhf.yaml"))
    assert "no value here: data_path, reward_load" in yaml and "not translated: hidden_size" in yaml
    settings = parse(yaml, "run.yaml")[0]
    models = settings["models"]
    assert settings["algorithm"] == "ppo" and settings["runtime"]["prompts_per_step"] == 1024
    assert models["policy"]["tensor_parallel"] == 2 and models["policy"]["sampling"]["max_new_tokens"] == 512
    assert settings["data"]["max_prompt_tokens"] == 512 and models["trainer"]["module"] == "megatron"
    optimizer = models["trainer"]["optimizer"]
    assert (optimizer["lr"], optimizer["schedule"], optimizer["warmup"]) == (2.4e-7, "linear", 100)
    assert (optimizer["min_lr_ratio"], optimizer["betas"], optimizer["weight_decay"]) == (0.5, [0.9, 0.95], 0.01)
    assert models["value"]["optimizer"]["lr"] == 5e-6 and models["value"]["loss"]["clip"] == 0.1
    assert (models["trainer"]["num_gpu"], models["policy"]["num_gpu"]) == (16, 8)
    assert settings["runtime"]["colocation"] == [["policy", "reference", "reward"], ["trainer", "value"]]
    assert settings["data"]["train"][0]["path"] == "<$data_path>" and models["reward"]["load"] == "<$reward_load>"
    assert "To fill in (2):\n#   data.train: <$data_path>" in yaml
    assert settings["kl"]["coef"] == 0.02 and settings["advantage"]["lam"] == 0.95


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_key_is_used_or_listed(home, file):
    """No key of a file vanishes: with a key that nobody knows added, the list has that key, and one more entry."""
    yaml, _ = translate(home, file.name, REWARD_DIR=str(home / "model"))
    text = (home / file.name).read_text()
    if file.suffix == ".yaml":
        text += "nobody_knows: 7\n"
    else:
        text = text.rstrip().removesuffix("$@").rstrip()
        text = text.replace("2>&1", "nobody_knows=7 2>&1")  # ChatLearn's
        text += "" if "nobody" in text else " nobody_knows=7\n" if "verl" in file.name else " --nobody_knows 7\n"
    (home / file.name).write_text(text)
    listed = [line for line in import_config(home / file.name).splitlines() if line.startswith("#   ")]
    assert "#   nobody_knows = 7" in listed
    assert len(listed) == 1 + sum(line.startswith("#   ") for line in yaml.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_check_accepts_every_file(home, file, monkeypatch, capsys):
    monkeypatch.chdir(home)
    _, written = translate(home, file.name, REWARD_DIR=str(home / "model"))
    text = written.read_text()
    zero = ["models.reward.head_init=zero"] * ("models:" in text and "\n  reward:" in text)
    check(load_config(written, zero), Display())
    assert "no problem found" in capsys.readouterr().out


def test_the_command_writes_a_new_file(home, tmp_path):
    translate(home, "trl_dpo.yaml")
    run = tmp_path / "run.yaml"
    done = CliRunner().invoke(app, ["import-config", str(home / "trl_dpo.yaml"), str(run)])
    assert done.exit_code == 0 and load_config(run).algorithm == "dpo"
    again = CliRunner().invoke(app, ["import-config", str(home / "trl_dpo.yaml"), str(run)])
    assert "is there already" in str(again.exception)
