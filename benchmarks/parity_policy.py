"""The losses of online algorithms on both sides: TRL's GRPOTrainer computes its loss on a batch made by hand."""

from __future__ import annotations

from functools import partial

import torch
from parity_sides import PAIR, Case, Measured, Setting, differentiated, learned, module, packed, trainer_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from coalign.data.batch import Batch

LENGTH = 40  # what Dr. GRPO divides by


def online(setting: Setting, case: Case) -> tuple[Measured, Measured]:
    """Two responses to each prompt, sampled by a policy a little away from the one that learns; every third response
    holds tokens of a tool. ``trl`` may have `weights`: (its mode, lowest, highest)."""
    from trl import GRPOConfig, GRPOTrainer

    batch = drawn(setting, case)
    arguments = {k: v for k, v in case.trl.items() if k != "weights"}
    trainer = trainer_of(
        partial(GRPOTrainer, reward_funcs=no_reward),
        GRPOConfig,
        setting,
        {"prompt": PAIR["prompt"]},
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=LENGTH,
        **arguments,
    )
    trainer.current_gradient_accumulation_steps = 1
    inputs = padded(batch)
    if "weights" in case.trl:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        inputs["importance_sampling_ratio"] = correction(inputs, *case.trl["weights"])
    return differentiated(trainer, inputs), learned(module(setting.policy, case.coalign), batch)


def no_reward(completions: list, **_) -> list[float]:
    return [0.0] * len(completions)


def drawn(setting: Setting, case: Case) -> Batch:
    rows = setting.rows[case.rows]
    batch = packed(
        [(row.prompt, response) for row in rows for response in (row.chosen, row.rejected)],
        group=torch.arange(len(rows)).repeat_interleave(2),
    )
    mask = batch["loss_mask"].clone()
    for start, length, prompt in zip(
        batch.offsets[:-1:3], batch.lengths[::3], batch["prompt_length"][::3], strict=True
    ):
        middle = int(start + (prompt + length) // 2)
        mask[middle : middle + 3] = False
        mask[int(start + length) - 1] = True
    batch = batch.with_(loss_mask=mask)
    policy, reference = (
        module(path).forward_step(batch)["ref_logprobs"] for path in (setting.policy, setting.reference)
    )
    generator = torch.Generator().manual_seed(2)
    noise = lambda scale: torch.where(mask, scale * torch.randn(len(mask), generator=generator), 0.0)  # noqa: E731
    old = policy + noise(0.2)
    advantages = torch.randn(len(batch), generator=generator)
    return batch.with_(
        old_logprobs=old,
        rollout_logprobs=old + noise(0.3),
        ref_logprobs=reference,
        advantages=advantages[batch.segment] * mask,
    )


def padded(batch: Batch) -> dict[str, Tensor]:
    """The batch as the trainer keeps it: prompts padded on the left, responses on the right."""
    rows, cuts = list(batch.rows()), batch["prompt_length"].tolist()
    answers = lambda name: _right([row[name][cut:] for row, cut in zip(rows, cuts, strict=True)])  # noqa: E731
    prompts = [row["tokens"][:cut].long() for row, cut in zip(rows, cuts, strict=True)]
    mask = answers("loss_mask").long()
    return {
        "prompt_ids": _right([p.flip(0) for p in prompts]).flip(1),
        "prompt_mask": _right([torch.ones_like(p) for p in prompts]).flip(1),
        "completion_ids": answers("tokens").long(),
        "completion_mask": _right(
            [torch.ones_like(row["tokens"][cut:]).long() for row, cut in zip(rows, cuts, strict=True)]
        ),
        "tool_mask": mask,
        "advantages": torch.stack([row["advantages"][row["loss_mask"]][0] for row in rows]),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": answers("old_logprobs"),
        "ref_per_token_logps": answers("ref_logprobs"),
        "sampling_per_token_logps": answers("rollout_logprobs"),
    }


def correction(inputs: dict[str, Tensor], mode: str, low: float, high: float) -> Tensor:
    """The weights that TRL takes between generation and loss, where no trainer without vLLM comes along."""
    logs = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]) * inputs["tool_mask"]
    ratios = logs.sum(1, keepdim=True).exp() if mode.startswith("sequence") else logs.exp()
    return ratios.clamp(low, high) if mode.endswith("truncate") else ratios * ((ratios >= low) & (ratios <= high))


def _right(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)
