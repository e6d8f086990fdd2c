#!/bin/bash
# GSPO with ChatLearn, as its scripts start it: overrides behind the template.
set -x
exp_name=tiny_gspo

python chatlearn/entrypoint.py grpo --config-file chatlearn_grpo.yaml \
        runtime_args.exp_name=${exp_name} \
        runtime_args.data_path=DATA_DIR/verl.jsonl \
        runtime_args.sample_per_episode=1024 \
        models.policy_trainer.num_gpu=${num_device} \
        models.policy_trainer.pos_clip_ratio=1e-3 \
        models.policy_trainer.neg_clip_ratio=1e-3 \
        models.policy_trainer.kl_coef=0.0 \
        models.policy_trainer.use_group_sequence_policy=True \
        2>&1 | tee log_${exp_name}.log ; exit ${PIPESTATUS[0]}
