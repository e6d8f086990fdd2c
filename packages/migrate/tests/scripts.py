"""Small files in the shapes of other frameworks' examples."""

VERL_ARRAYS = """#!/usr/bin/env bash
set -xeuo pipefail
# ---- user-adjustable ----
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
max_prompt_length=${MAX_PROMPT_LENGTH:-1024}
max_response_length=${MAX_RESPONSE_LENGTH:-2048}
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
experiment_name=${EXPERIMENT_NAME:-qwen3_$(date +%Y%m%d)}
case "${DEVICE}" in
    gpu) n_gpus=8 ;;
    npu) n_gpus=16 ;;
esac
train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="$train_files"
    data.train_batch_size=512
    data.max_prompt_length=${max_prompt_length}
    data.max_response_length=${max_response_length}
    data.truncation='error'
    # data.shuffle=False
)
MODEL=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
)
ACTOR=(
    actor_rollout_ref.actor.optim.lr=2e-6
    actor_rollout_ref.actor.optim.clip_grad=0.5
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length))
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.002
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.fsdp_config.param_offload=True
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.response_length='${data.max_response_length}'
)
REWARD=(
    reward.reward_manager.name=dapo
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True
    +reward.reward_kwargs.overlong_buffer_cfg.len=256
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5
)
TRAINER=(
    trainer.logger='["console","wandb"]'
    trainer.project_name=verl_test
    trainer.experiment_name=${experiment_name}
    trainer.n_gpus_per_node=${n_gpus}
    trainer.total_epochs=3
)
LAUNCH=(python3)
if [ "${VERL_USE_UV:-1}" != 0 ] && [ "${DEVICE:-gpu}" = gpu ]; then
    LAUNCH=(uv run --frozen python3)
    ROLLOUT+=(ray_kwargs.ray_init.runtime_env.py_executable="uv run --frozen")
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \\
    "${DATA[@]}" \\
    "${MODEL[@]}" \\
    "${ACTOR[@]}" \\
    "${ROLLOUT[@]}" "${REWARD[@]}" "${TRAINER[@]}" "$@"
"""

VERL_SFT = """nproc_per_node=$1
save_path=$2
shift 2
torchrun --standalone --nproc_per_node=$nproc_per_node -m verl.trainer.sft_trainer \\
    data.train_files=$HOME/data/train.parquet data.messages_key=chats data.max_length=2048 \\
    optim.lr=1e-4 optim.betas='[0.9,0.95]' engine=megatron engine.tensor_model_parallel_size=2 \\
    engine.override_transformer_config.recompute_granularity=full \\
    model.path=Qwen/Qwen3-8B model.lora.rank=16 trainer.default_local_dir="${save_path}" trainer.total_epochs=2 \\
    trainer.test_freq=after_each_epoch
"""

SLIME = """SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/shape.sh"
CKPT_ARGS=(
   --hf-checkpoint /root/Qwen3-4B
   #--hf-checkpoint /root/Qwen3-4B-FP8
   --ref-load /root/Qwen3-4B_torch_dist
)
ROLLOUT_ARGS=(
   --prompt-data /root/dapo.jsonl
   --input-key prompt --label-key label
   --apply-chat-template
   --rm-type deepscaler
   --num-rollout 300
   --rollout-batch-size 32 --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 128
)
EVAL_ARGS=( --eval-interval 20 --eval-prompt-data aime /root/aime.jsonl --n-samples-per-eval-prompt 16 )
GRPO_ARGS=( --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl --eps-clip 0.2
   --eps-clip-high 0.28 )
OPTIMIZER_ARGS=( --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.98 )
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json='{"env_vars": {}}' \\
   -- python3 train.py --colocate --tensor-model-parallel-size 2 \\
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${EVAL_ARGS[@]} ${GRPO_ARGS[@]} ${OPTIMIZER_ARGS[@]}
"""

OPENRLHF_SECTIONS = """read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \\
   --ckpt.output_dir ./checkpoint/dpo \\
   --train.batch_size 256 --train.micro_batch_size 1 \\
   --model.model_name_or_path org/sft --model.beta 0.2 \\
   --ds.param_dtype bf16 --ds.zero_stage 3 --ds.lora.rank 16 \\
   --data.dataset org/preferences --data.max_len 4096 --data.apply_chat_template \\
   --adam.lr 5e-7 --logger.wandb.key SECRET --nobody.knows 3
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""

OPENRLHF_ONLINE = """CKPT_ARGS=( --actor.model_name_or_path org/model --ckpt.output_dir out )
python3 -m openrlhf.cli.train_ppo_ray ${CKPT_ARGS[@]} --data.prompt_dataset org/prompts --data.input_key prompt \\
   --data.max_len 4096 --rollout.max_new_tokens 3072 --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 \\
   --train.batch_size 512 --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.init_coef 1e-3 \\
   --algo.kl.estimator k3 --actor.adam.lr 5e-7 --reward.remote_url http://rm:5000 --vllm.num_engines 2 \\
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop
"""

TRL_GRPO = """import os
import re

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MODEL = os.environ.get("MODEL_OF_NOBODY", "Qwen/Qwen2.5-0.5B-Instruct")
rows = 4 * 2
name = f"runs/{'grpo'}-1"


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def main():
    dataset = load_dataset("trl-lib/tldr", split="train")
    training_args = GRPOConfig(
        output_dir=name,
        learning_rate=2e-6,
        num_generations=4,
        per_device_train_batch_size=rows,
        max_completion_length=128,
        beta=0.04,
        bf16=True,
        max_steps=compute_steps(),
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs=[reward_len],
        args=training_args,
        train_dataset=dataset,
        peft_config=LoraConfig(r=16, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
        rollout_func=play,
    )
    trainer.train()
"""

TRL_DPO = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

path = "org/sft-model"
model = AutoModelForCausalLM.from_pretrained(path, torch_dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(path)
data = load_dataset("json", data_files={"train": "pairs.jsonl", "test": "held.jsonl"})
arguments = dict(beta=0.05, loss_type="ipo", learning_rate=5e-7)
config = DPOConfig(output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=8, **arguments)
trainer = DPOTrainer(model, None, args=config, train_dataset=data["train"], eval_dataset=data["test"],
                     processing_class=tokenizer)
"""

LLAMA_FACTORY = """### model
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
### method
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_beta: 0.2
pref_loss: sigmoid
### dataset
dataset: mine, unknown
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
### output
output_dir: saves/dpo
save_steps: 500
report_to: none
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
nobody_knows: 7
"""
DATASET_INFO = """{"mine": {"file_name": "mine.json", "ranking": true, "formatting": "sharegpt",
  "columns": {"messages": "conversations", "chosen": "good", "rejected": "bad"}}}"""

AXOLOTL = """base_model: org/base
datasets:
  - path: org/alpaca
    type: alpaca
  - path: rows.jsonl
    type: chat_template
    field_messages: chats
val_set_size: 0.1
output_dir: ./out
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 4096
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 2
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
warmup_steps: 10
bf16: auto
gradient_checkpointing: true
wandb_project: mine
nobody_knows: 7
"""

SWIFT = """CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=2 \\
swift rlhf \\
    --rlhf_type grpo \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --dataset 'org/math#1000' local.jsonl \\
    --tuner_type full \\
    --reward_funcs accuracy \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps $(expr 16 / 4) \\
    --num_generations 8 --max_completion_length 1024 --learning_rate 1e-6 --beta 0.04 \\
    --use_vllm true --vllm_mode colocate --nobody_knows 7
"""
