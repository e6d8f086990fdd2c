"""`coalign import-config` on scripts and files in the shapes of today's frameworks: right, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coalign.config.errors import ConfigError
from coalign.config.loading import load
from coalign.config.yaml_reader import parse
from coalign_migrate.import_config import import_config
from packages.migrate.tests import scripts


@pytest.fixture
def read(tmp_path, monkeypatch):
    """A function that writes a file, imports it, and returns the YAML with its sections."""
    monkeypatch.setenv("HOME", "/root")

    def read(text: str, name: str = "run.sh", trainer: str | None = None) -> tuple[str, dict[str, Any]]:
        (tmp_path / name).write_text(text)
        yaml = import_config(tmp_path / name, trainer)
        return yaml, parse(yaml, name)[0]

    return read


def test_verl_arrays(read):
    yaml, run = read(scripts.VERL_ARRAYS)
    assert run["algorithm"] == "grpo" and run["models"]["policy"]["load"] == "Qwen/Qwen3-8B"
    paths = [source["path"] for source in run["data"]["train"]]
    assert paths == ["/root/data/gsm8k/train.parquet", "/root/data/math/train.parquet"]
    assert (run["runtime"]["prompts_per_step"], run["runtime"]["samples_per_prompt"]) == (512, 5)
    assert (run["data"]["max_prompt_tokens"], run["models"]["policy"]["sampling"]["max_new_tokens"]) == (1024, 2048)
    trainer = run["models"]["trainer"]
    assert (trainer["updates_per_batch"], trainer["max_tokens_per_micro"]) == (4, 3072)
    assert trainer["optimizer"] == {"lr": 2e-6, "weight_decay": 0.01, "clip_grad_norm": 0.5}
    assert run["models"]["policy"]["compute_dtype"] == "bfloat16" and trainer["module"] == "fsdp"
    assert run["models"]["reference"] == {"dtype": "bfloat16"}  # there is a divergence
    assert (run["loss"]["kl_coef"], run["loss"]["kl_estimator"]) == (0.002, "k3")
    assert run["reward"][1] == {"fn": "length_penalty", "weight": 0.5, "max_tokens": 2048, "buffer": 256}
    assert run["data"]["on_long"] == "error" and run["runtime"]["epochs"] == 3
    assert "#   trainer.experiment_name: qwen3_$(date +%Y%m%d)\n" in yaml
    assert "#   actor_rollout_ref.actor.fsdp_config.param_offload = true: models that share a device" in yaml
    assert "Not translated" not in yaml and "#   trainer.n_gpus_per_node = 8: " in yaml


MIXED = "actor_rollout_ref.actor.fsdp_config.mixed_precision"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("use_kl_loss=True", "use_kl_loss=False", {"kl_coef": 0.0, "reference": None}),
        ("rollout.n=5", "rollout.n=5 actor_rollout_ref.actor.policy_loss.loss_mode=gspo", {"algorithm": "gspo"}),
        ("adv_estimator=grpo", "adv_estimator=gae", {"algorithm": "ppo", "kl_coef": None}),
        ("rollout.n=5", "rollout.n=5 model_engine=megatron", {"module": "megatron"}),
        ("rollout.n=5", "rollout.n=5 actor_rollout_ref.actor.strategy=fsdp2", {"module": "fsdp"}),
        ("rollout.n=5", f"rollout.n=5 {MIXED}.param_dtype=fp32", {"compute_dtype": "float32", "reference": None}),
        ("main_ppo", "main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml'", {"module": "megatron"}),
        ("verl.trainer.main_ppo", "verl.experimental.one_step_off_policy.main_ppo", {"max_staleness": 1}),
    ],
)
def test_verl_variants(read, old, new, expected):
    _, run = read(scripts.VERL_ARRAYS.replace(old, new))
    models = run["models"]
    told = {"algorithm": run["algorithm"], "kl_coef": run["loss"].get("kl_coef"), "module": models["trainer"]["module"]}
    told |= {"compute_dtype": models["policy"]["compute_dtype"], "reference": models.get("reference")}
    told |= {"max_staleness": run["runtime"].get("max_staleness")}
    assert {name: told[name] for name in expected} == expected


def test_verl_distillation(read):
    distilled = "distillation.enabled=True distillation.distillation_loss.{}=False distillation.teacher_models.t.{}"
    text = scripts.VERL_ARRAYS.replace("rollout.n=5", "rollout.n=1 " + distilled)
    _, run = read(text.replace("{}", "use_task_rewards", 1).replace("{}", "model_path=org/teacher"))
    assert run["algorithm"] == "on_policy_distillation" and run["models"]["teacher"]["load"] == "org/teacher"
    with pytest.raises(ValueError, match="use_task_rewards=True: no recipe here"):
        read(text.replace("{}", "x", 1).replace("{}", "model_path=org/teacher"))


def test_verl_sft(read):
    yaml, run = read(scripts.VERL_SFT)
    trainer = run["models"]["trainer"]
    assert run["algorithm"] == "sft" and (trainer["load"], trainer["module"]) == ("Qwen/Qwen3-8B", "megatron")
    assert (trainer["tensor_parallel"], trainer["activation_checkpointing"]) == (2, "full")
    assert trainer["optimizer"]["lr"] == 1e-4 and trainer["optimizer"]["betas"] == [0.9, 0.95]
    assert trainer["compute_dtype"] == "bfloat16" and trainer["lora"]["rank"] == 16
    assert (run["data"]["messages_key"], run["data"]["max_tokens"]) == ("chats", 2048)
    assert (run["runtime"]["prompts_per_step"], run["runtime"]["epochs"]) == (256, 2)  # verl's own batch
    assert run["data"]["train"] == [{"path": "/root/data/train.parquet"}]
    assert "#   trainer.default_local_dir: $2\n" in yaml and "trainer.test_freq = after_each_epoch: " in yaml


def test_values_that_nobody_knows(read):
    text = scripts.VERL_ARRAYS.replace("${MODEL_PATH:-Qwen/Qwen3-8B}", "$ROOT/qwen").replace("=2e-6", "=$RATE")
    yaml, run = read(text)
    assert run["models"]["policy"]["load"] == "<$ROOT/qwen>"
    assert run["models"]["trainer"]["optimizer"]["lr"] == "<$RATE>"
    assert "#   models.policy.load: <$ROOT/qwen>\n" in yaml
    with pytest.raises(ValueError, match=r"run.sh: data.train_batch_size is \$BATCH, which is not known here"):
        read(scripts.VERL_ARRAYS.replace("train_batch_size=512", "train_batch_size=$BATCH"))
    with pytest.raises(ValueError, match=r"run.sh: algorithm.adv_estimator is \$UNSET_NAME, which is not known here"):
        read(scripts.VERL_ARRAYS.replace("adv_estimator=grpo", "adv_estimator=$UNSET_NAME"))


def test_the_environment_gives_what_a_script_takes_from_it(read, monkeypatch):
    monkeypatch.setenv("MODEL_PATH", "org/mine")
    yaml, run = read(scripts.VERL_ARRAYS)
    assert run["models"]["policy"]["load"] == "org/mine" and "MODEL_PATH is 'org/mine' in the environment" in yaml


def test_slime(read, tmp_path):
    (tmp_path / "shape.sh").write_text("MODEL_ARGS=( --swiglu --num-layers 36 --hidden-size 2560 )\n")
    yaml, run = read(scripts.SLIME)
    policy, trainer = run["models"]["policy"], run["models"]["trainer"]
    assert run["algorithm"] == "grpo" and policy["load"] == "/root/Qwen3-4B"
    assert run["data"]["train"] == [{"path": "/root/dapo.jsonl", "keys": {"answer": "label"}}]
    assert run["data"]["eval"] == [{"path": "/root/aime.jsonl", "keys": {"answer": "label"}}]
    assert (run["runtime"]["prompts_per_step"], run["runtime"]["samples_per_prompt"]) == (32, 8)
    assert (trainer["module"], trainer["updates_per_batch"], trainer["tensor_parallel"]) == ("megatron", 2, 2)
    assert trainer["optimizer"]["betas"] == [0.9, 0.98] and policy["compute_dtype"] == "bfloat16"
    assert (run["loss"]["kl_coef"], run["loss"]["clip_high"], run["reward"]) == (0.01, 0.28, [{"fn": "math"}])
    assert "Not translated" not in yaml and "#   num_layers = 36: config.json of the model says its shape" in yaml


def test_openrlhf_flags_with_sections(read):
    yaml, run = read(scripts.OPENRLHF_SECTIONS)
    trainer = run["models"]["trainer"]
    assert run["algorithm"] == "dpo" and run["loss"]["beta"] == 0.2 and trainer["load"] == "org/sft"
    assert (run["runtime"]["prompts_per_step"], run["data"]["max_tokens"]) == (256, 4096)
    assert (trainer["deepspeed"]["stage"], trainer["lora"]["rank"]) == (3, 16)
    assert trainer["compute_dtype"] == "bfloat16" and trainer["optimizer"]["lr"] == 5e-7
    assert run["data"]["train"] == [{"path": "org/preferences:train"}] and "SECRET" not in yaml
    assert "Not translated (1):\n#   nobody.knows = 3\n" in yaml and "#   train.micro_batch_size = 1: " in yaml


def test_openrlhf_online(read):
    _, run = read(scripts.OPENRLHF_ONLINE)
    assert run["algorithm"] == "grpo" and run["models"]["policy"]["load"] == "org/model"
    assert (run["data"]["max_prompt_tokens"], run["models"]["policy"]["sampling"]["max_new_tokens"]) == (1024, 3072)
    assert (run["loss"]["is_mode"], run["loss"]["is_low"], run["loss"]["is_high"]) == ("mask", 0.5, 5.0)
    assert (run["loss"]["kl_coef"], run["loss"]["kl_estimator"]) == (1e-3, "k3")
    assert run["models"]["trainer"]["updates_per_batch"] == 2 and run["models"]["policy"]["module"] == "vllm"
    assert run["reward"] == [{"fn": "remote", "url": ["http://rm:5000"]}]


def test_trl_python(read):
    yaml, run = read(scripts.TRL_GRPO, "train.py")
    assert run["algorithm"] == "grpo" and run["models"]["policy"]["load"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert run["data"]["train"] == ["trl-lib/tldr:train"] and run["output"] == "runs/grpo-1"
    assert (run["runtime"]["prompts_per_step"], run["runtime"]["samples_per_prompt"]) == (2, 4)
    assert run["models"]["trainer"]["optimizer"]["lr"] == 2e-6 and run["loss"]["kl_coef"] == 0.04
    assert run["models"]["trainer"]["lora"] == {"rank": 16, "alpha": 64.0}
    assert run["reward"] == [{"fn": "<a function that calls train.py:reward_len>"}]
    assert run["runtime"]["steps"] == "<compute_steps()>" and "#   runtime.steps: <compute_steps()>" in yaml
    assert "Not translated (1):\n#   rollout_func = play\n" in yaml


def test_trl_python_models_and_files(read):
    _, run = read(scripts.TRL_DPO, "train.py")
    assert run["algorithm"] == "dpo" and run["models"]["trainer"]["load"] == "org/sft-model"
    assert (run["data"]["train"], run["data"]["eval"]) == (["pairs.jsonl"], ["held.jsonl"])
    assert run["loss"] == {"fn": "ipo", "beta": 0.05} and run["runtime"]["prompts_per_step"] == 16


@pytest.mark.parametrize(
    ("trainer", "keywords", "algorithm", "loss"),
    [
        ("SFTTrainer", "args=SFTConfig(max_length=64)", "sft", {}),
        ("ORPOTrainer", "args=ORPOConfig(beta=0.2)", "orpo", {"beta": 0.2}),
        ("CPOTrainer", 'args=CPOConfig(loss_type="simpo", cpo_alpha=0.0)', "simpo", {"beta": 0.1, "gamma": 0.5}),
        ("KTOTrainer", "args=KTOConfig(desirable_weight=2.0)", "kto", {"desirable_weight": 2.0}),
        ("RewardTrainer", "args=RewardConfig()", "reward_model", {}),
        ("RLOOTrainer", 'reward_funcs="org/rm", args=RLOOConfig(num_generations=2)', "rloo", {}),
    ],
)
def test_trl_trainers(read, trainer, keywords, algorithm, loss):
    text = f'from trl import *\n{trainer}(model="org/m", {keywords}, train_dataset=load_dataset("org/d"))\n'
    _, run = read(text, "run.py")
    assert run["algorithm"] == algorithm and run["data"]["train"] == ["org/d:train"]
    assert loss.items() <= run.get("loss", {}).items()


def test_options_of_a_python_script_have_their_defaults(read):
    text = (
        "parser.add_argument('--model-id', default='org/m')\nparser.add_argument('--rate', type=float, default=1e-5)\n"
        "args = parser.parse_args()\nconfig = SFTConfig(learning_rate=args.rate, max_steps=args.steps)\n"
        "SFTTrainer(model=args.model_id, args=config, train_dataset=load_dataset('json', data_files='rows.json'))\n"
    )
    yaml, run = read(text, "run.py")
    assert run["models"]["trainer"]["load"] == "org/m" and run["models"]["trainer"]["optimizer"]["lr"] == 1e-5
    assert "args.model_id is its default, 'org/m'" in yaml and run["runtime"]["steps"] == "<args.steps>"
    assert run["data"]["train"] == ["rows.json"]


def test_a_python_script_is_not_run(read, tmp_path):
    text = f"open('{tmp_path}/ran', 'w')\nSFTTrainer(model=open('{tmp_path}/ran', 'w'), train_dataset='rows.json')\n"
    _, run = read(text, "run.py")
    assert run["models"]["trainer"]["load"].startswith("<open(") and not (tmp_path / "ran").exists()


def test_llama_factory(read, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(scripts.DATASET_INFO)
    yaml, run = read(scripts.LLAMA_FACTORY, "dpo.yaml")
    trainer = run["models"]["trainer"]
    assert run["algorithm"] == "dpo" and run["loss"] == {"fn": "dpo", "beta": 0.2}
    keys = {"prompt": "conversations", "chosen": "good", "rejected": "bad"}
    assert run["data"]["train"][0] == {"path": str(tmp_path / "data" / "mine.json"), "keys": keys, "max_samples": 1000}
    assert run["data"]["train"][1]["path"] == "<the file of unknown in dataset_info.json>"
    assert trainer["lora"] == {"rank": 8, "alpha": 16.0} and trainer["compute_dtype"] == "bfloat16"
    assert (run["runtime"]["prompts_per_step"], run["data"]["max_tokens"]) == (8, 2048)
    assert "#   nobody_knows = 7\n" in yaml and "#   template = qwen3_nothink: the model's own" in yaml


def test_axolotl(read):
    yaml, run = read(scripts.AXOLOTL, "axolotl.yml")
    trainer = run["models"]["trainer"]
    assert run["algorithm"] == "sft" and trainer["load"] == "org/base"
    keys = {"prompt": "instruction", "answer": "output"}
    assert run["data"]["train"][0] == {"path": "org/alpaca:train", "keys": keys}
    assert run["data"]["train"][1] == {"path": "rows.jsonl", "keys": {"messages": "chats"}}
    assert trainer["lora"] == {"rank": 32, "alpha": 16.0, "dropout": 0.05, "base_bits": 4}
    assert trainer["optimizer"]["name"] == "adamw_8bit" and trainer["optimizer"]["warmup"] == 10
    assert run["runtime"]["prompts_per_step"] == 8
    assert run["runtime"]["trackers"] == [{"name": "wandb", "project": "mine"}]
    assert "#   nobody_knows = 7\n" in yaml


def test_swift(read):
    yaml, run = read(scripts.SWIFT)
    assert run["algorithm"] == "grpo" and run["models"]["policy"]["load"] == "Qwen/Qwen2.5-7B-Instruct"
    assert run["data"]["train"] == [{"path": "org/math:train", "max_samples": 1000}, {"path": "local.jsonl"}]
    assert (run["runtime"]["prompts_per_step"], run["runtime"]["samples_per_prompt"]) == (4, 8)  # 4 · 4 · 2 samples
    assert run["loss"]["kl_coef"] == 0.04 and run["reward"] == [{"fn": "math"}]
    assert "lora" not in run["models"]["trainer"] and run["models"]["policy"]["module"] == "vllm"
    assert run["models"]["trainer"]["optimizer"]["betas"] == [0.9, 0.95] and "#   nobody_knows = 7\n" in yaml


NO_MODEL = "no model was read; in files of verl it is `actor_rollout_ref.model.path`"
VERL, FACTORY = "python -m verl.trainer.main_ppo", "stage: sft\nmodel_name_or_path: a\n"
COMMENTED = f"{VERL} data.train_files=a \\\n # b\n actor_rollout_ref.model.path=c"
LOSS = "x=1 actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", VERL, NO_MODEL),
        ("a.sh", f"{VERL} actor_rollout_ref.model.path=a", "no data was read; .* `data.train_files`"),
        ("a.sh", COMMENTED, f"{NO_MODEL}; line 3: `actor_rollout_ref.model.path=c` begins no command"),
        ("a.sh", scripts.VERL_ARRAYS.replace("=grpo", "=gdpo"), "algorithm.adv_estimator=gdpo has no recipe here"),
        ("a.sh", scripts.VERL_ARRAYS.replace("rollout.n=5", LOSS), "dppo_tv with algorithm.adv_estimator=grpo has no"),
        ("a.sh", "python -m verl.experimental.fully_async_policy.fully_async_main a=b", "async_main has no recipe"),
        ("a.sh", "python -m verl.trainer.main_generation_server a=b", "main_generation_server has no recipe here"),
        ("a.sh", "torchrun -m verl.trainer.sft_trainer model.path=a", "no data was read"),
        ("a.sh", "python -m openrlhf.cli.train_sft --pretrain a", "no data was .* `--dataset`, or `--data.dataset`"),
        ("a.sh", "python -m openrlhf.cli.train_ppo_ray --advantage_estimator new", "estimator new has no recipe here"),
        ("a.sh", "python train.py --hf-checkpoint a --loss-type custom_loss", "--loss-type custom_loss has no recipe"),
        ("a.sh", "python train.py --hf-checkpoint a --rollout-batch-size 4", "no data was read; .* `--prompt-data`"),
        ("a.sh", "trl grpo --model_name_or_path a", "no data was read; in files of TRL it is `dataset_name`"),
        ("a.sh", "python sdft.py --model_name_or_path a --dataset_name b", "nothing says which of TRL's trainers sdft"),
        ("a.sh", "swift infer --model a", "program infer has no recipe here"),
        ("a.sh", "swift sft --model a --dataset b --tuner_type boft", "tuner_type boft has no counterpart"),
        ("a.sh", "if true; then\n", "line 1: expected 'fi'"),
        ("a.yaml", "base_model: a\n", "no data was read; in files of Axolotl it is `datasets`"),
        ("a.yaml", "base_model: a\ndatasets: [{path: b}]\nrl: ebft\n", "`rl: ebft` has no recipe here"),
        ("a.yaml", f"{FACTORY}finetuning_type: oft\n", "finetuning_type oft has no counterpart"),
        ("a.yaml", FACTORY, "no data was read; in files of LLaMA-Factory it is `dataset`"),
        ("a.yaml", "actor_rollout_ref: {rollout: {n: 4}}\n", NO_MODEL),
        ("a.yaml", "algorithm: grpo\n", r"neither verl's \(`actor_rollout_ref`\), ChatLearn's .*, TRL's or LLaMA-F"),
        ("a.yaml", "models: {ppo_policy: {}}\nruntime: {num_episode: 1}\n", "without a model that generates"),
        ("a.yaml", "model_name_or_path: x\n", "no argument says which of TRL's trainers"),
        ("a.yaml", "actor_rollout_ref: {model: {path: '${oc.env:NOBODY_SETS_THIS}'}}\n", "NOBODY_SETS_THIS"),
        ("a.sh", "python entry.py -c none.yaml\n", "none.yaml"),
        ("a.sh", "python train.sh\n", "no command of verl"),
        ("a.sh", "python -m openrlhf.cli.train_kd --pretrain x\n", "train_kd has no recipe here"),
        ("a.yaml", "- a\n", "a.yaml"),
        ("a.py", "print('hello')\n", "calls no trainer; of TRL's are read: SFTTrainer"),
        ("a.py", "from trl import GKDTrainer\nGKDTrainer(model='a')\n", "calls GKDTrainer; of TRL's are read"),
        ("a.py", "SFTTrainer(model='a', args=given)\n", "a.py:1: the settings `given` are no call such as GRPOConfig"),
        ("a.py", "GRPOTrainer(model='a', reward_funcs=f, args=GRPOConfig())\n", "no data was read"),
        ("a.py", "def f(:\n", "no Python: "),
    ],
)
def test_what_would_be_a_run_of_defaults_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, OSError), match=message):
        import_config(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "whose"),
    [
        ("verl.yaml", "actor_rollout_ref: {model: {path: a}}\nalgorithm: {gamma: 1}\n", "configuration of verl"),
        ("verl.yaml", "data: {train_files: a}\nmodel: {path: b}\nx: '${oc.select:a,1}'\n", "configuration of verl"),
        ("trl.yaml", "model_name_or_path: a\nlearning_rate: 1.0e-5\n", "configuration of TRL"),
        ("lf.yaml", scripts.LLAMA_FACTORY, "configuration of LLaMA-Factory"),
        ("axolotl.yml", scripts.AXOLOTL, "configuration of Axolotl"),
        ("swift.yaml", "model: a\ndataset: [b]\n", "configuration of ms-swift"),
        ("chatlearn.yaml", "models: {policy: {}}\nruntime_args: {num_episode: 2}\n", "configuration of ChatLearn"),
        ("verl.sh", scripts.VERL_ARRAYS, "script of verl"),
        ("openrlhf.sh", scripts.OPENRLHF_ONLINE, "script of OpenRLHF"),
        ("slime.sh", scripts.SLIME, "script of slime"),
        ("swift.sh", scripts.SWIFT, "script of ms-swift"),
        ("trl.py", scripts.TRL_GRPO, "script of TRL"),
    ],
)
def test_loading_a_file_of_another_framework_names_the_command(tmp_path, name, text, whose):
    file: Path = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert str(refused.value) == f"{file}: is a {whose}; `coalign import-config {file} > run.yaml` translates it"


@pytest.mark.parametrize("text", ["runtime: {steps: 1}\n", "models: {policy: {load: a}}\n", "# nothing\n", "- 1\n"])
def test_other_files_keep_their_messages(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "run.yaml")
    assert "import-config" not in str(refused.value)


def test_positions_and_later_changes_of_a_python_script(read):
    text = (
        "def rows(split='train'):\n    return load_dataset('openai/gsm8k', 'main')[split]\n"
        "config = GRPOConfig('out', num_generations=8)\nconfig.max_steps = 100\n"
        "GRPOTrainer('org/m', [accuracy_reward, fmt], config, rows())\n"
    )
    _, run = read(text, "run.py")
    assert run["runtime"]["steps"] == 100 and run["data"]["train"] == ["openai/gsm8k:main:train"]
    assert run["reward"] == [{"fn": "math"}, {"fn": "<a function that calls fmt>"}]


def test_a_configuration_that_a_script_names(read, tmp_path):
    text = "python3 -m verl.trainer.main_ppo --config-name=mine actor_rollout_ref.model.path=m trainer.total_epochs=2"
    with pytest.raises(ValueError, match=r"the configuration that it names, mine\.yaml, is not at"):
        read(text)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text("data: {train_files: a}\nalgorithm: {adv_estimator: rloo}\n")
    _, run = read(text)
    assert run["algorithm"] == "rloo" and run["runtime"]["epochs"] == 2


def test_references_of_a_command_line(read):
    text = scripts.VERL_ARRAYS.replace("ppo_mini_batch_size=128", "ppo_mini_batch_size='${data.train_batch_size}'")
    _, run = read(text)
    assert run["models"]["trainer"]["updates_per_batch"] == 1


def test_commands_within_commands(read):
    command = "python3 -m verl.trainer.main_ppo data.train_files=a actor_rollout_ref.model.path=m"
    for text in (f'srun bash -c "{command}"', f"ray job submit -- {command} 2>&1 | tee log", f"nohup {command} &"):
        assert read(text)[1]["models"]["policy"]["load"] == "m"
    yaml, _ = read(f"for n in 1 2; do {command} actor_rollout_ref.rollout.n=$n; done")
    assert "run.sh starts 2 programs; this is the first" in yaml


def test_settings_that_a_loss_over_sequences_does_not_take(read):
    weights = "rollout.n=5 algorithm.rollout_correction.rollout_is=token actor_rollout_ref.actor.policy_loss.loss_mode="
    for loss, algorithm in {"gspo": "gspo", "geo_mean": "gmpo"}.items():
        yaml, run = read(scripts.VERL_ARRAYS.replace("rollout.n=5", weights + loss))
        assert run["algorithm"] == algorithm and "aggregation" not in run["loss"]
        assert ("is_level" not in run["loss"] and "weights of tokens have no place" in yaml) == (algorithm == "gspo")


def test_settings_of_samples_in_a_run_without_them(read):
    text = scripts.AXOLOTL + "temperature: 0.5\n"
    text = text.replace("lora_target_linear: true", "lora_target_modules: 'layers.[0-9]+.(mlp|attn).up_proj'")
    yaml, run = read(text, "a.yml")
    assert "policy" not in run["models"] and "#   temperature = 0.5: the run samples nothing" in yaml
    assert "target" not in run["models"]["trainer"]["lora"] and "the run takes all-linear" in yaml
