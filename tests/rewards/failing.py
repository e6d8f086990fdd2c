"""Reward functions that fail on most samples. They need no package."""


def forgets_zero(sample):
    if sample.index == 0:
        return 1.0


def misspells(sample):
    return float(sample.response == sample.meta["anwser"])


def misspells_if_wrong(sample):
    return 1.0 if sample.index == 0 else sample.meta["anwser"]


def is_away_if_wrong(sample):
    if sample.index:
        raise ValueError("could not reach it")
    return 1.0


def says_too_much(sample):
    return {"reward": 0.5 + sample.index, "ratio": float("nan"), "text": sample.response, "index": sample.index}


def counts_a_group(group):
    return [float(len(group))] * len(group)


def depends_on_the_prompt(sample):
    return float(len(sample.prompt) + sample.group)
