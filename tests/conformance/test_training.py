"""Any trainable backend against a plain Hugging Face training loop."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.backends.batches import branched
from tests.conformance import reference
from tests.conformance.backends import BACKENDS, DEEPSPEED, MEGATRON, Backend, relative, train
from tests.tiny import tiny_model_dir

TIED = {"tied": True, "untied": False}
NEEDS = {"deepspeed": [DEEPSPEED], "megatron": [MEGATRON], "fsdp": []}
# What needs two ranks shares one start of them.
TWO = {"fsdp": [], "deepspeed": [pytest.mark.backends], "megatron": [pytest.mark.backends]}


@cache
def case(tied: bool, folder: Path):
    """(model directory, batch, what the reference made of them)."""
    path = str(tiny_model_dir(folder / f"tied-{tied}", tied=tied))
    batch = branched()
    noise = 0.1 * torch.randn(batch.tokens_total, generator=torch.Generator().manual_seed(1))
    model = reference.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    old = torch.zeros(batch.tokens_total)
    old[batch["loss_mask"]] = reference.logprobs(model, batch).detach()
    batch = batch.with_(old_logprobs=old + noise)
    return path, batch, reference.train(path, batch)


def check(backend: Backend, got: reference.Report, expected: reference.Report) -> None:
    """The weights it starts from, log-probs, losses, gradient norms, and the weights after three steps."""
    tolerance = backend.tolerance
    assert got.before.keys() == expected.before.keys()
    assert all(torch.equal(got.before[name], t.to(got.before[name].dtype)) for name, t in expected.before.items())
    assert relative(got.logprobs, expected.logprobs) < tolerance
    assert got.losses == pytest.approx(expected.losses, rel=100 * tolerance, abs=10 * tolerance)
    assert got.norms[0] == pytest.approx(expected.norms[0], rel=2 * tolerance)
    if tolerance < 1e-3:  # a coarser backend is at other weights by now
        assert got.norms == pytest.approx(expected.norms, rel=20 * tolerance)
    # AdamW's first steps are of the size of lr, whatever the gradient: where that is near 0, rounding decides the sign.
    moves = ({name: tensor - each.before[name] for name, tensor in each.after.items()} for each in (got, expected))
    assert relative(*moves) < max(1e-4, 10 * tolerance)


def list_cases():
    """Yield every backend with both models. Only the slow suite has the tied one where a module has other cases."""
    for each in BACKENDS:
        for tied in TIED if each.ranks == 1 else ():
            again = tied == "tied" and each.name not in ("fsdp", "deepspeed-3", "megatron")
            marks = [*NEEDS[each.module], *([pytest.mark.backends] if again else [])]
            yield pytest.param(each, tied, id=f"{each.name}-{tied}", marks=marks)


@pytest.mark.parametrize(("backend", "tied"), list_cases())
def test_a_backend_learns_what_the_reference_does(backend, tied, tmp_path_factory):
    path, batch, expected = case(TIED[tied], tmp_path_factory.getbasetemp())
    [got] = train([(backend, path, batch)], tmp_path_factory.mktemp(backend.name))
    check(backend, got, expected)


@pytest.mark.parametrize("module", [pytest.param(name, marks=NEEDS[name] + marks) for name, marks in TWO.items()])
def test_two_ranks_learn_what_the_reference_does(module, tmp_path, subtests):
    given = {tied: case(TIED[tied], tmp_path) for tied in TIED}
    runs = [(each, tied) for each in BACKENDS if (each.module, each.ranks) == (module, 2) for tied in TIED]
    reports = train([(backend, *given[tied][:2]) for backend, tied in runs], tmp_path)
    for (backend, tied), got in zip(runs, reports, strict=True):
        with subtests.test(f"{backend.name}-{tied}"):
            check(backend, got, given[tied][2])
