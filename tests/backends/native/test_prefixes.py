"""Samples of one prompt read its keys and values in one slot, and nothing of a response changes by it."""

from __future__ import annotations

import pytest
import torch

from coalign.backends.engines.native.native_engine import _ActiveSequence, _QueuedRequest, _SequenceSlots
from coalign.backends.engines.session_driver import generate_responses
from coalign.types import Response
from coalign_cpu.library import load_kernels
from tests.backends.native import helpers

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler")


def generate(
    monkeypatch, shared: bool, slots: int, recomputes: bool
) -> tuple[list[list[Response]], list[torch.Tensor]]:
    """The responses of three prompts, five samples each, that end at different lengths, with new weights after forty
    tokens; and which slots shared what."""
    found: list[torch.Tensor] = []
    find = _SequenceSlots.find_prefixes

    def note(slots: _SequenceSlots, rows: int) -> torch.Tensor:
        homes = find(slots, rows)
        found.append(homes.clone())
        return homes if shared else torch.stack([torch.arange(rows), torch.zeros(rows, dtype=torch.int64)])

    monkeypatch.setattr(_SequenceSlots, "find_prefixes", note)
    model = helpers.reference(helpers.qwen2())
    made = helpers.engine(model, end_tokens=range(0, helpers.VOCABULARY, 12), max_sequences=slots)
    made.recomputes_kv = recomputes
    later = {name: tensor * 1.1 for name, tensor in model.state_dict().items()}
    sampling = helpers.replace(helpers.SAMPLING, max_new_tokens=24)

    def sync(finished: int, total: int, tokens: int) -> None:
        if made.version == 0 and tokens >= 40:
            made.load_weights(later.items(), version=1, adopt=False)

    answers = generate_responses(made, helpers.requests(3, samples=5), sampling, sync)
    assert made.version == 1
    return answers, found


@pytest.mark.parametrize("slots", [64, 4])
@pytest.mark.parametrize("recomputes", [False, True])
def test_responses_do_not_change_by_a_bit(monkeypatch, slots, recomputes):
    """With four slots most samples begin later than others of their prompt, some with other weights."""
    with monkeypatch.context() as patch:
        alone, _ = generate(patch, False, slots, recomputes)
    together, homes = generate(monkeypatch, True, slots, recomputes)
    helpers.check_same(helpers.flat(alone), helpers.flat(together))
    rows = torch.arange(64)
    assert any((home[0] != rows[: home.shape[1]]).any() for home in homes)
    assert len({len(r.tokens) for r in helpers.flat(together)}) > 3  # so slots were given away


def test_a_prompt_is_read_in_the_first_slot_that_has_it():
    model = helpers.engine(helpers.reference(helpers.qwen2())).model
    made = _SequenceSlots(model, note_seen=False, reserve=lambda size: None)
    made.resize(8, 64)
    first, second = (
        _QueuedRequest.plan(r, helpers.SAMPLING, lambda *_: None, vocabulary=helpers.VOCABULARY, context=None)
        for r in helpers.requests(2, samples=3)
    )
    order = [(first, 1), (first, 1), (second, 1), (first, 2), (first, 2)]
    sequences = [_ActiveSequence(queued, place, None, prefill=n) for place, (queued, n) in enumerate(order)]
    for sequence in sequences:
        made.add(sequence, 0)
    lengths = [len(queued.request.prompt) for queued, _ in order]
    assert made.find_prefixes(8).tolist() == [[0, 0, 2, 3, 3, 5, 6, 7], [*lengths, 0, 0, 0]]
    made.remove(sequences[0])  # the last one takes its place
    assert made.find_prefixes(8)[0].tolist() == [0, 1, 2, 0, 4, 5, 6, 7]
    made.clear()
    assert made.find_prefixes(8).tolist() == [list(range(8)), [0] * 8]
