"""Reward functions, in a module that imports nothing: their processes load it."""


def as_number(sample):
    return float(sample.response)


def fails_on_words(sample):
    return {"reward": float(sample.response), "length": len(sample.response)}


async def group_rank(group, *, scale=1.0):
    return [scale * sum(other.response < s.response for other in group) for s in group]
