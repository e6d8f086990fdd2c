"""The two sides of parity_trl.py: one loss and its gradient by TRL's trainer, and by Coalign, on the same token ids."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from coalign.backends.base import build_objective
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import LossConfig, ModelConfig
from coalign.data.batch import Batch
from coalign.roles import Context

MICRO = 200  # tokens of a micro-batch: an update is several

Measured = tuple[float, dict[str, torch.Tensor]]  # the loss and the gradients by name


@dataclass(frozen=True)
class Row:
    """A prompt with two responses, as token ids."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


@dataclass(frozen=True)
class Setting:
    """What every comparison uses: directories of the models, and the rows in the shape that a comparison asks for."""

    policy: str
    reference: str
    teacher: str
    reward: str
    rows: dict[str, list[Row]]  # free; equal: winners of one length; bare: and prompts of one token


@dataclass(frozen=True)
class Case:
    """One loss. ``trl`` and ``coalign`` are configurations, ``compare`` runs both sides, ``note`` says what differs."""

    name: str
    compare: Callable[[Setting, Case], tuple[Measured, Measured]]
    trl: dict
    coalign: dict
    rows: str = "free"
    note: str = ""


# ---- Coalign's side


class Observed(FSDPModule):
    """Keeps the gradient of its last update."""

    def optimizer_step(self) -> float:
        named = self.model.model.named_parameters()
        self.gradient = {name: p.grad.clone() for name, p in named if p.grad is not None}
        return super().optimizer_step()


def module(load: str, loss: dict | None = None, **config) -> Observed:
    made = Observed(
        ModelConfig(load=load, frozen=loss is None, max_tokens_per_micro=MICRO, **config),
        Context(loss=build_objective(LossConfig(**loss)) if loss else None),
    )
    made.setup()
    return made


def packed(sequences: list[tuple[list[int], list[int]]], **columns) -> Batch:
    """Sequences of (prompt, response), trained on the responses."""
    lengths = [len(p) + len(r) for p, r in sequences]
    tokens = [token for p, r in sequences for token in p + r]
    mask = [trained for p, r in sequences for trained in [False] * len(p) + [True] * len(r)]
    return Batch(
        torch.tensor(lengths),
        {"tokens": torch.tensor(tokens, dtype=torch.int32), "loss_mask": torch.tensor(mask)},
        {"prompt_length": torch.tensor([len(p) for p, _ in sequences], dtype=torch.int32), **columns},
    )


def pairs_batch(rows: list[Row]) -> Batch:
    sequences = [(row.prompt, response) for row in rows for response in (row.chosen, row.rejected)]
    return packed(
        sequences,
        group=torch.arange(len(rows)).repeat_interleave(2),
        preference=torch.tensor([1.0, 0.0] * len(rows)),
        margin=torch.tensor([m for row in rows for m in (row.margin, 0.0)]),
    )


def learned(model: Observed, batch: Batch) -> Measured:
    return model.train_step(batch)["loss/value"].value, model.gradient


def coalign(setting: Setting, loss: dict, batch: Batch, *, reference: bool = True) -> Measured:
    if reference:
        batch = batch.with_(**module(setting.reference).forward_step(batch))
    return learned(module(setting.policy, loss), batch)


# ---- TRL's side


def model_of(path: str, kind=AutoModelForCausalLM):
    return kind.from_pretrained(path, dtype=torch.float32)


def trainer_of(kind, config, setting: Setting, example: dict, *, model=None, reference: bool = False, **arguments):
    """A trainer of TRL around one example; what it computes on is collated by hand, from token ids."""
    args = config(
        output_dir=tempfile.mkdtemp(),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **arguments,
    )
    extra = {"ref_model": model_of(setting.reference)} if reference else {}
    return kind(
        model=model or model_of(setting.policy),
        args=args,
        train_dataset=Dataset.from_list([example] * 2),
        processing_class=AutoTokenizer.from_pretrained(setting.policy),
        **extra,
    )


def differentiated(trainer, inputs, **arguments) -> Measured:
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs, **arguments)
    loss.backward()
    named = trainer.model.named_parameters()
    return loss.item(), {name: p.grad for name, p in named if p.grad is not None}


PAIR = {"prompt": "What is 1 + 1?", "chosen": " It is 2.", "rejected": " It is 3."}


def dpo(setting: Setting, case: Case) -> tuple[Measured, Measured]:
    from trl import DPOConfig, DPOTrainer

    rows = setting.rows[case.rows]
    trainer = trainer_of(DPOTrainer, DPOConfig, setting, PAIR, reference=True, max_length=None, **case.trl)
    inputs = trainer.data_collator(
        [{"prompt_ids": r.prompt, "chosen_ids": r.chosen, "rejected_ids": r.rejected} for r in rows]
    )
    return differentiated(trainer, inputs), coalign(setting, case.coalign, pairs_batch(rows))


def odds(setting: Setting, case: Case) -> tuple[Measured, Measured]:
    """ORPO and CPO (with SimPO), which read no reference."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    rows = setting.rows[case.rows]
    kind, config = (ORPOTrainer, ORPOConfig) if case.coalign["fn"] == "orpo" else (CPOTrainer, CPOConfig)
    trainer = trainer_of(kind, config, setting, PAIR, max_length=1024, **case.trl)
    trainer._peft_has_been_casted_to_bf16 = False
    features = []
    for row in rows:
        feature = {"prompt_input_ids": row.prompt, "prompt_attention_mask": [1] * len(row.prompt)}
        for side, response in (("chosen", row.chosen), ("rejected", row.rejected)):
            feature[f"{side}_input_ids"] = row.prompt + response
            feature[f"{side}_attention_mask"] = [1] * (len(row.prompt) + len(response))
            feature[f"{side}_labels"] = [-100] * len(row.prompt) + response
        features.append(feature)
    theirs = differentiated(trainer, trainer.data_collator(features))
    return theirs, coalign(setting, case.coalign, pairs_batch(rows), reference=False)


def kto(setting: Setting, case: Case) -> tuple[Measured, Measured]:
    from trl import KTOConfig, KTOTrainer

    # Neighbouring prompts differ; kinds alternate, the last is desirable, so the kinds are not equally many.
    rows = setting.rows[case.rows]
    wanted = [i % 2 == 0 or i == len(rows) - 1 for i in range(len(rows))]
    sequences = [(r.prompt, r.chosen if good else r.rejected) for r, good in zip(rows, wanted, strict=True)]
    responses = [response for _, response in sequences]
    mismatched = [(prompt, responses[i - 1]) for i, (prompt, _) in enumerate(sequences)]
    example = {"prompt": PAIR["prompt"], "completion": PAIR["chosen"], "label": True}
    trainer = trainer_of(KTOTrainer, KTOConfig, setting, example, reference=True, max_length=None, **case.trl)
    inputs = trainer.data_collator(
        [
            {"prompt_ids": p, "completion_ids": r, "KL_completion_ids": other, "label": good}
            for (p, r), (_, other), good in zip(sequences, mismatched, wanted, strict=True)
        ]
    )
    theirs = differentiated(trainer, inputs)
    away = packed(mismatched)
    reference, policy = (
        module(path).forward_step(away)["ref_logprobs"] for path in (setting.reference, setting.policy)
    )
    point = ((policy.double() - reference.double()).sum() / len(rows)).clamp(min=0)
    batch = packed(
        sequences,
        preference=torch.tensor(wanted).float(),
        reference_point=torch.full((len(rows),), float(point)),
    )
    return theirs, coalign(setting, case.coalign, batch)


def reward(setting: Setting, case: Case) -> tuple[Measured, Measured]:
    from trl import RewardConfig, RewardTrainer

    rows = setting.rows[case.rows]
    model = model_of(setting.reward, AutoModelForSequenceClassification)
    trainer = trainer_of(
        RewardTrainer,
        RewardConfig,
        setting,
        {side: PAIR["prompt"] + PAIR[side] for side in ("chosen", "rejected")},
        model=model,
        max_length=None,
        **case.trl,
    )
    examples = [{"chosen_ids": r.prompt + r.chosen, "rejected_ids": r.prompt + r.rejected} for r in rows]
    batch = pairs_batch(rows)
    if "margin" in case.name:
        examples = [example | {"margin": row.margin} for example, row in zip(examples, rows, strict=True)]
    else:
        batch = batch.without("margin")
    ours = module(setting.reward, case.coalign, head="reward")
    return differentiated(trainer, trainer.data_collator(examples)), learned(ours, batch)


def sft(setting: Setting, case: Case) -> tuple[Measured, Measured]:
    from trl import SFTConfig, SFTTrainer

    rows = setting.rows[case.rows]
    trainer = trainer_of(SFTTrainer, SFTConfig, setting, {"text": PAIR["prompt"]}, max_length=None, **case.trl)
    inputs = trainer.data_collator(
        [{"input_ids": r.prompt + r.chosen, "labels": [-100] * len(r.prompt) + r.chosen} for r in rows]
    )
    tokens = sum(len(r.chosen) for r in rows)
    theirs = differentiated(trainer, inputs, num_items_in_batch=torch.tensor(tokens))
    batch = packed([(r.prompt, r.chosen) for r in rows])
    return theirs, coalign(setting, case.coalign, batch, reference=False)


def distillation(setting: Setting, case: Case) -> tuple[Measured, Measured]:
    """TRL's loss function on the logits of whole models, without a trainer: its own generates and pads."""
    from torch.nn.utils.rnn import pad_sequence
    from trl.experimental.gkd import GKDTrainer

    rows = setting.rows[case.rows]
    student, teacher = model_of(setting.policy), model_of(setting.teacher)
    tokens = pad_sequence([torch.tensor(r.prompt + r.chosen) for r in rows], batch_first=True)
    labels = pad_sequence(
        [torch.tensor([-100] * len(r.prompt) + r.chosen) for r in rows], batch_first=True, padding_value=-100
    )
    with torch.no_grad():
        told = teacher(tokens).logits[:, :-1]
    loss = GKDTrainer.generalized_jsd_loss(student(tokens).logits[:, :-1], told, labels[:, 1:], **case.trl)
    loss.backward()
    theirs = loss.item(), {name: p.grad for name, p in student.named_parameters()}
    batch = packed([(r.prompt, r.chosen) for r in rows])
    batch = batch.with_(**module(setting.teacher, candidates=student.vocab_size).top_logprobs(batch))
    return theirs, coalign(setting, case.coalign, batch, reference=False)
