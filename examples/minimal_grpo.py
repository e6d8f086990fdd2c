"""GRPO in one loop, on the backends alone: what Coalign's engine does at every step, without the engine.

    python examples/minimal_grpo.py [MODEL]     MODEL is a Hugging Face directory; without it a tiny one is made

The policy learns to answer with even digits. Docs: docs/start.md.
"""

import sys
import tempfile

import torch
from arithmetic import make_model

from coalign.algorithms.advantages import group as group_advantages
from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.objective import Objective
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import ModelConfig, OptimizerConfig, SamplingConfig
from coalign.data.batch import Batch
from coalign.data.templates import read_samples
from coalign.roles import Context

STEPS, PROMPTS, SAMPLES = 25, 8, 8


def compute_reward(text: str) -> float:
    """The share of a response's characters that are even digits."""
    return sum(character in "02468" for character in text) / max(1, len(text))


def train(model: str) -> list[float]:
    """Train the model for STEPS steps; returns the mean reward of each step."""
    sampling, optimizer = SamplingConfig(max_new_tokens=8), OptimizerConfig(lr=3e-3)
    policy = NativeModule(ModelConfig(load=model, sampling=sampling), Context("policy"))
    trainer = FSDPModule(
        ModelConfig(load=model, optimizer=optimizer), Context("trainer", steps=STEPS, loss=Objective(PolicyGradient()))
    )
    policy.setup()
    trainer.setup()
    means = []
    for step in range(STEPS):
        # 1. Generate: SAMPLES responses to each prompt. A group is a prompt and its responses.
        encoded = [policy.tokenizer(f"{step}+{i}=")["input_ids"] for i in range(PROMPTS)]
        tokens = torch.tensor([token for prompt in encoded for token in prompt], dtype=torch.int32)
        groups = torch.arange(PROMPTS) + step * PROMPTS
        prompts = Batch([len(prompt) for prompt in encoded], {"tokens": tokens}, {"group": groups})
        batch = policy.generate(prompts, samples=SAMPLES)

        # 2. Reward: one number for each response.
        reward = torch.tensor([compute_reward(sample.response) for sample in read_samples(batch, policy.tokenizer)])

        # 3. Advantages: each reward against the mean of its group, at every token of the response.
        advantages = group_advantages(reward, batch["group"], batch["loss_mask"], batch.segment)["advantages"]

        # 4. Train, and give the new weights to the policy.
        stats = trainer.train_step(batch.with_(advantages=advantages))
        policy.load_weights(trainer.export_weights(), version=trainer.version)

        means.append(reward.mean().item())
        print(f"step {step + 1:2}  reward {means[-1]:.3f}  loss {stats['loss/value'].value:+.4f}")
    return means


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) == 1:
            make_model(folder, hidden=64, layers=2)
        train(sys.argv[1] if len(sys.argv) > 1 else folder)
