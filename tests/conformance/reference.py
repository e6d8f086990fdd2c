"""What any backend must agree with: the same training written down plainly, one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM

from coalign.data.batch import Batch

LR, CLIP, LOW, HIGH = 1e-2, 1.0, 0.2, 0.3


@dataclass
class Report:
    """What a backend did with three training steps on one batch."""

    before: dict[str, torch.Tensor]  # exported weights
    logprobs: torch.Tensor  # of the loss mask, before training
    losses: list[float]
    norms: list[float]
    after: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first step, before clipping


def logprobs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """f32[trained tokens]."""
    out = []
    for row in batch.rows():
        tokens = row["tokens"].long()
        logits = model(input_ids=tokens[None]).logits[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        out.append(chosen[row["loss_mask"][1:]])
    return torch.cat(out)


def train(path: str, batch: Batch, old: torch.Tensor | None = None) -> Report:
    """Three steps of the clipped policy gradient with token mean, AdamW and clipping of the gradient's norm."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=LR, weight_decay=0.1)
    clone = lambda: {name: p.detach().clone() for name, p in model.named_parameters()}  # noqa: E731
    report = Report(before=clone(), logprobs=logprobs(model, batch).detach(), losses=[], norms=[], after={})
    advantages = batch["advantages"][batch["loss_mask"]]
    for _ in range(3):
        new = logprobs(model, batch)
        ratio = (new - batch["old_logprobs"][batch["loss_mask"]]).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)
        loss = -surrogate.mean()
        loss.backward()
        report.gradients = report.gradients or {n: p.grad.detach().clone() for n, p in model.named_parameters()}
        report.losses.append(loss.item())
        report.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    report.after = clone()
    return report
