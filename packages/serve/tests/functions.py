"""Reward functions of command tests, in a module that imports nothing: their processes load it."""

from tests.digits import digits


def by_length(sample):
    return float(len(sample.response))


def rank_in_group(group):
    """Only right for a whole group: the longest response is worth 1."""
    longest = max(len(sample.response) for sample in group)
    return [float(len(group)) + (len(sample.response) == longest) for sample in group]


def fails_on_empty(sample):
    if not sample.response:
        raise ValueError("nothing to read")
    return 1.0


def sees(sample):
    assert sample.messages[-1]["content"] == sample.response
    return {"reward": float(sample.meta["gold"]), "trained": int(sample.loss_mask.sum())}


def picky(sample):
    if sample.response == "no":
        raise KeyError("nothing for this one")
    return 1.0


def rank(group):
    return [0.0] * len(group)


def partly_digits(sample):
    if "5" in sample.prompt:
        raise ValueError("cannot read a five")
    return digits(sample)


def never(sample):
    raise ValueError("no")
