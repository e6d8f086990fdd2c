"""Losses and gradients: Coalign against TRL's own trainers on one model and the same tokens, in float32.

    python benchmarks/parity_trl.py [--pairs 6] [--solutions ../shared/data/gsm8k_model_solutions.jsonl] [--only dpo]

For each loss: TRL's trainer collates the batch and computes its loss, Coalign's FSDPModule takes a train_step on the
same token ids in micro-batches of its own. Prints both losses, their relative difference and that of the gradients (the
L2 norm over all parameters), and leaves with status 1 if one exceeds 1e-5. Where the two define a loss differently, the
data are such that both definitions coincide, and the last column says how they differ.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from common import GSM8K, make_model, prompts
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.modules.fsdp import FSDPModule
from coalign.types import Context

TOLERANCE = 1e-5
MICRO = 700  # tokens of a micro-batch: an update is several

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
        ModelConfig(load=load, frozen=loss is None, max_tokens_per_micro=MICRO, **config), Context(loss=loss)
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


# ---- what is compared

EQUAL = "TRL: NLL is a mean over the batch's tokens; here a mean per response, which no cut of the batch changes"
SMOOTH = {"label_smoothing": 0.1}
CASES = [
    Case("SFT", sft, {}, {"fn": "sft"}),
    Case("DPO", dpo, {}, {"fn": "dpo"}),
    Case("rDPO (robust)", dpo, {"loss_type": "robust", **SMOOTH}, {"fn": "dpo", "robust": True, **SMOOTH}),
    Case("DPO sigmoid_norm", dpo, {"loss_type": "sigmoid_norm"}, {"fn": "dpo", "length_normalised": True}),
    *(
        Case(f"DPO {theirs}", dpo, {"f_divergence_type": theirs}, {"fn": "dpo", "divergence": ours})
        for theirs, ours in (("forward_kl", "forward_kl"), ("js_divergence", "js"), ("alpha_divergence", "alpha"))
    ),
    Case("LD-DPO", dpo, {"ld_alpha": 0.3}, {"fn": "dpo", "ld_alpha": 0.3}),
    Case("WPO", dpo, {"use_weighting": True}, {"fn": "dpo", "weighted": True}),
    Case(
        "RPO (DPO + NLL)",
        dpo,
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        {"fn": "dpo", "nll_coef": 0.5},
        rows="equal",
        note=EQUAL,
    ),
    Case("IPO", dpo, {"loss_type": "ipo"}, {"fn": "ipo"}),
    Case("hinge", dpo, {"loss_type": "hinge"}, {"fn": "hinge"}),
    Case("EXO", dpo, {"loss_type": "exo_pair", "label_smoothing": 1e-3}, {"fn": "exo_pair"}),
    *(
        Case(name, dpo, {"loss_type": name}, {"fn": name})
        for name in ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")
    ),
    *(Case(name, dpo, {"loss_type": name, **SMOOTH}, {"fn": name, **SMOOTH}) for name in ("aot", "aot_unpaired")),
    Case(
        "KTO",
        kto,
        {"undesirable_weight": 1.2},
        {"fn": "kto", "undesirable_weight": 1.2},
        note="TRL: z0 of each micro-batch; here of the whole batch (compared on one TRL batch)",
    ),
    Case("KTO apo_zero_unpaired", kto, {"loss_type": "apo_zero_unpaired"}, {"fn": "apo_zero_unpaired"}),
    Case(
        "ORPO",
        odds,
        {"beta": 0.1},
        {"fn": "orpo"},
        rows="bare",
        note="TRL: NLL over prompt and response, a mean over the batch's tokens; the paper and here: the response's",
    ),
    Case(
        "SimPO",
        odds,
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0},
        {"fn": "simpo", "beta": 2.0, "gamma": 0.5},
    ),
    Case(
        "AlphaPO",
        odds,
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0, "alpha": 0.25},
        {"fn": "simpo", "beta": 2.0, "gamma": 0.5, "alpha": 0.25},
    ),
    Case("CPO", odds, {"loss_type": "sigmoid", **SMOOTH}, {"fn": "cpo", **SMOOTH}, rows="equal", note=EQUAL),
    Case("reward", reward, {}, {"fn": "bradley_terry"}),
    Case("reward, margin", reward, {}, {"fn": "bradley_terry"}),
    Case("reward, centred", reward, {"center_rewards_coefficient": 0.01}, {"fn": "bradley_terry", "centre_coef": 0.01}),
    Case("KD forward (GKD)", distillation, {"beta": 0.0}, {"fn": "distillation"}),
    Case("KD reverse (GKD)", distillation, {"beta": 1.0}, {"fn": "distillation", "divergence": "reverse"}),
    Case("KD jsd (GKD)", distillation, {"beta": 0.3}, {"fn": "distillation", "divergence": "jsd", "jsd_beta": 0.3}),
]


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The L2 norm over all parameters of the difference of two gradients, by that of the second."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"parameters of one side only: {sorted(ours.keys() ^ theirs.keys())}")
    error = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in theirs)
    return (error / sum(float(grad.double().square().sum()) for grad in theirs.values())) ** 0.5


# ---- models and data


def texts(n: int, solutions: Path | None) -> list[tuple[str, str, str]]:
    """(question, better, worse): of a file of judged solutions, or GSM8K's answers against those of other questions."""
    if solutions is None:
        rows = prompts(n + 1)
        return [(rows[i]["question"], rows[i]["answer"], rows[i + 1]["answer"]) for i in range(n)]
    found = []
    for line in solutions.read_text().splitlines():
        row = json.loads(line)
        judged = [v for v in row.values() if isinstance(v, dict)]
        right, wrong = ([v["solution"] for v in judged if v["is_correct"] is value] for value in (True, False))
        if right and wrong:
            found.append((row["question"], right[0], wrong[0]))
    return found[:n]


def learn(source: str, target: str, batch: Batch, *, steps: int, lr: float) -> None:
    """Some steps of SFT, from the model in one directory to another."""
    model = module(source, {"fn": "sft"}, optimizer={"lr": lr})
    for _ in range(steps):
        model.train_step(batch)
    model.save_hf(target)


def prepare(work: Path, count: int, length: int, solutions: Path | None) -> Setting:
    reference, policy, teacher, score = (str(work / name) for name in ("reference", "policy", "teacher", "reward"))
    make_model(Path(reference), hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, vocab=1024)
    tokenizer = AutoTokenizer.from_pretrained(reference)

    def encode(text: str, cut: int = 0) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"][: length - cut]

    # Responses of different lengths, the better one now longer, now shorter.
    free = [
        Row(encode(question), encode(better, 5 * (i % 3)), encode(worse, 3 * (i % 4)), 0.1 * i)
        for i, (question, better, worse) in enumerate(texts(count, solutions))
    ]
    equal = [Row(r.prompt, r.chosen[: length // 2], r.rejected) for r in free]
    bare = [Row(r.prompt[:1], r.chosen[: length // 2], r.rejected) for r in free]
    # A reference that has learned to write, as in life: sums of log-probs stay small, and TRL's float32 sums accurate.
    # The policy has learned on, so that it differs from its reference and z0 is above 0.
    responses = packed([(r.prompt, response) for r in free for response in (r.chosen, r.rejected)])
    learn(reference, reference, responses, steps=40, lr=3e-3)
    learn(reference, policy, responses, steps=4, lr=1e-3)
    torch.manual_seed(1)
    noisy = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    noisy.save_pretrained(teacher)
    classifier = AutoModelForSequenceClassification.from_pretrained(reference, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(classifier.score.weight, std=0.1)
    classifier.save_pretrained(score)
    tokenizer.save_pretrained(score)
    return Setting(policy, reference, teacher, score, {"free": free, "equal": equal, "bare": bare})


def quiet() -> None:
    """TRL and datasets tell of every trainer that is made."""
    os.environ |= {"TQDM_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--length", type=int, default=32, help="cut prompts and responses after so many tokens")
    parser.add_argument("--solutions", type=Path, help="JSONL of judged solutions; default: answers of GSM8K")
    parser.add_argument("--only", default="", help="compare the losses whose name contains this")
    options = parser.parse_args()
    quiet()
    print(f"data: {options.solutions or (GSM8K if GSM8K.exists() else 'synthetic')}, {options.pairs} pairs")
    print(f"{'loss':24} {'TRL':>12} {'Coalign':>12} {'loss diff':>10} {'grad diff':>10}  differs by definition")
    worst = 0.0
    with tempfile.TemporaryDirectory() as work:
        setting = prepare(Path(work), options.pairs, options.length, options.solutions)
        for case in (case for case in CASES if options.only.lower() in case.name.lower()):
            (theirs, their_gradient), (ours, our_gradient) = case.compare(setting, case)
            loss, gradient = abs(ours - theirs) / abs(theirs), difference(our_gradient, their_gradient)
            worst = max(worst, loss, gradient)
            print(f"{case.name:24} {theirs:12.7f} {ours:12.7f} {loss:10.1e} {gradient:10.1e}  {case.note}", flush=True)
    print(f"worst: {worst:.1e} (at most {TOLERANCE:.0e})")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
