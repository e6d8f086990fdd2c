"""Small batches: prompts, and what a rollout would make of some."""

from __future__ import annotations

from typing import Any

import torch

from coalign.data.batch import Batch


def prompts(*lengths: int) -> Batch:
    """Prompts of the given lengths, a group each."""
    tokens = torch.arange(40, 40 + sum(lengths), dtype=torch.int32)
    return Batch(torch.tensor(lengths), {"tokens": tokens}).with_(
        group=torch.arange(len(lengths)), rows=[{} for _ in lengths]
    )


def answered(prompts: list[list[int]], answers: list[list[int]], **columns: Any) -> Batch:
    """Prompts and answers as token ids, of which the answers are trained on; ``columns`` are of sequences."""
    pairs = list(zip(prompts, answers, strict=True))
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in pairs])
    tokens = torch.tensor([token for pair in pairs for ids in pair for token in ids], dtype=torch.int32)
    mask = [trained for prompt, answer in pairs for trained in [False] * len(prompt) + [True] * len(answer)]
    own = {"prompt_length": torch.tensor([len(prompt) for prompt, _ in pairs], dtype=torch.int32)}
    return Batch(lengths, {"tokens": tokens, "loss_mask": torch.tensor(mask)}, own | columns)


def rollout(
    prompts: tuple[int, ...] = (5, 9), samples: int = 3, *, longest: int = 8, vocab: int = 259, seed: int = 0
) -> Batch:
    """``samples`` responses of 1..longest tokens to each prompt of the given lengths, with random advantages."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, vocab, (n,), generator=generator)  # noqa: E731
    tokens, mask, lengths = [], [], []
    for length in prompts:
        prompt = draw(length)
        for _ in range(samples):
            response = draw(int(torch.randint(1, longest + 1, (1,), generator=generator)))
            tokens += [prompt, response]
            mask += [torch.zeros(length, dtype=torch.bool), torch.ones(len(response), dtype=torch.bool)]
            lengths.append(length + len(response))
    return Batch(
        torch.tensor(lengths),
        {"tokens": torch.cat(tokens).int(), "loss_mask": torch.cat(mask), **_draw_noise(sum(lengths), generator)},
        {
            "group": torch.arange(len(prompts)).repeat_interleave(samples),
            "prompt_length": torch.tensor(prompts).repeat_interleave(samples),
        },
    )


# Groups of episodes, of which each row is runs of tokens. Those with a capital are sampled.
EPISODES = (
    (("pAbC", "pAbDeF", "pAgH", "qI", "qIjK"), ("qL", "qMnO")),
    (("pA",), ("pB",), ("pC",)),
    (("pA",), ("pB", "pBcD", "pBcE")),
    (("pA",), ("pB",)),
)


def branched(*, longest: int = 8, vocab: int = 259, seed: int = 0) -> Batch:
    """EPISODES with 1..longest tokens a run, each sampled run trained in the first row that has it."""
    generator = torch.Generator().manual_seed(seed)
    rows, mask, columns = [], [], []
    for group, episodes in enumerate(EPISODES):
        runs: dict[str, torch.Tensor] = {}
        for index, episode in enumerate(episodes):
            trained = set()
            for branch, names in enumerate(episode):
                for name in names:
                    size = int(torch.randint(1, longest + 1, (1,), generator=generator))
                    runs.setdefault(name, torch.randint(0, vocab, (size,), generator=generator))
                rows.append(torch.cat([runs[name] for name in names]))
                mask += [torch.full(runs[name].shape, name.isupper() and name not in trained) for name in names]
                columns.append([group, index, branch, len(runs[names[0]])])
                trained |= {*names}
    lengths = torch.tensor([len(row) for row in rows])
    group, index, branch, prompt_length = (torch.tensor(column) for column in zip(*columns, strict=True))
    return Batch(
        lengths,
        {
            "tokens": torch.cat(rows).int(),
            "loss_mask": torch.cat(mask),
            **_draw_noise(int(lengths.sum()), generator),
        },
        {"group": group, "index": index.int(), "branch": branch.int(), "prompt_length": prompt_length.int()},
    )


def _draw_noise(total: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    advantages, returns, logprobs = (torch.randn(total, generator=generator) for _ in range(3))
    return {"advantages": advantages, "returns": returns, "rollout_logprobs": -logprobs.abs()}
