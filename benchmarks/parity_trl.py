"""Losses and gradients: Coalign against TRL's own trainers on one model and the same tokens, in float32.

    python benchmarks/parity_trl.py [--pairs 6] [--solutions FILE.jsonl] [--only dpo]

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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from common import GSM8K, make_model, prompts
from datasets import disable_progress_bars
from parity_policy import LENGTH, online
from parity_sides import Case, Row, Setting, distillation, dpo, kto, module, odds, packed, reward, sft
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from coalign.data.batch import Batch

TOLERANCE = 1e-5

# ---- what is compared

EQUAL = "TRL: NLL is a mean over the batch's tokens; here a mean per response, which no cut of the batch changes"
SMOOTH = {"label_smoothing": 0.1}
POLICY = {"fn": "policy_gradient"}


def weights(mode: str, low: float, high: float) -> dict:
    """Coalign's name for a mode of TRL, whose weight of a sequence is the product of its tokens'."""
    level, mode = mode.split("_")
    return {"is_level": "product" if level == "sequence" else level, "is_mode": mode, "is_low": low, "is_high": high}


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
    *(
        Case(
            name,
            online,
            {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": corrected},
            POLICY | {"kl_coef": 0.04, "kl_corrected": corrected, "aggregation": "sequence_mean_token_mean"},
        )
        for name, corrected in (("GRPO", False), ("GRPO, corrected KL", True))
    ),
    Case(
        "GRPO, drift limit",
        online,
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.02},
        POLICY | {"drift_limit": 0.02},
    ),
    Case(
        "DAPO clip-higher",
        online,
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28},
        POLICY | {"clip_low": 0.1, "clip_high": 0.28},
    ),
    Case("BNPO, entropy", online, {"loss_type": "bnpo", "entropy_coef": 0.01}, POLICY | {"entropy_coef": 0.01}),
    Case("Dr. GRPO", online, {"loss_type": "dr_grpo"}, POLICY | {"aggregation": "constant", "constant_length": LENGTH}),
    Case("PPO dual clip", online, {"loss_type": "dapo", "delta": 1.3}, POLICY | {"dual_clip": 1.3}),
    *(
        Case(
            name,
            online,
            {"loss_type": theirs, "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
            {"fn": "gspo", "clip_low": 0.02, "clip_high": 0.03, "aggregation": aggregation, **form},
        )
        for name, theirs, aggregation, form in (
            ("GSPO", "grpo", "sequence_mean_token_mean", {}),
            ("GSPO-token", "grpo", "sequence_mean_token_mean", {"form": "token"}),
            ("LUSPO", "luspo", "sequence_mean_token_sum", {}),
        )
    ),
    Case("CISPO", online, {"loss_type": "cispo", "epsilon_high": 1.2}, {"fn": "cispo", "clip_high": 0.2}),
    *(
        Case(
            f"IS {mode}",
            online,
            {"loss_type": "dapo", "weights": (mode, low, high)},
            POLICY | weights(mode, low, high),
        )
        for mode, low, high in (
            ("token_truncate", 0.0, 1.2),
            ("token_mask", 0.8, 1.3),
            ("sequence_truncate", 0.5, 1.5),
            ("sequence_mask", 0.2, 3.0),
        )
    ),
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
    for line in solutions.read_bytes().splitlines():
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
    # The policy has learned on from the winners, so that it differs from its reference and z0 is above 0.
    responses = packed([(r.prompt, response) for r in free for response in (r.chosen, r.rejected)])
    learn(reference, reference, responses, steps=40, lr=3e-3)
    learn(reference, policy, packed([(r.prompt, r.chosen) for r in free]), steps=6, lr=1e-3)
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
    transformers_logging.disable_progress_bar()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--length", type=int, default=32, help="cut prompts and responses after so many tokens")
    parser.add_argument("--solutions", type=Path, help="JSONL of judged solutions; default: answers of GSM8K")
    parser.add_argument("--only", default="", help="compare the losses whose name contains this")
    options = parser.parse_args()
    quiet()
    print(f"data: {options.solutions or GSM8K or 'synthetic'}, {options.pairs} pairs")
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
