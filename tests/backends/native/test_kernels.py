"""Kernels of linear layers: each computes the product, the fastest invariant one is chosen, and the choice is kept."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import torch.nn.functional as F

from coalign.backends.engines.native import kernels
from tests.backends.native import helpers
from tests.runs import run, settings

SHAPES = [(48, 48), (56, 104), (384, 1000)]
LAYERS = tuple((shape, 1) for shape in SHAPES)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COALIGN_CACHE", str(tmp_path / "cache"))
    for cached in (kernels.choose_kernel, kernels.has_bf16, kernels.multiplies_bf16):
        cached.cache_clear()
    yield
    for cached in (kernels.choose_kernel, kernels.has_bf16, kernels.multiplies_bf16):
        cached.cache_clear()


def available():
    for dtype in kernels.KERNELS:
        chosen = kernels._measure_kernels({(48, 48): 1}, dtype)
        yield from ((dtype, name) for name in chosen.gflops)


@pytest.mark.parametrize(("dtype", "name"), list(available()))
@pytest.mark.parametrize("with_bias", [True, False])
def test_every_kernel_computes_the_product(dtype, name, with_bias):
    for inputs, outputs in SHAPES:
        weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype) if with_bias else None
        product = kernels.KERNELS[dtype][name](weight, bias)
        for count in (8, 64, 136):
            rows = torch.randn(count, inputs).to(dtype)
            exact = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
            tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]
            torch.testing.assert_close(product(rows).double(), exact, rtol=0, atol=tolerance)


def by_hand(**products):
    """Kernels that take a stated time (in units of the clock that `clock` makes) and may depend on the row count.

    What they compute is no product: some libraries' products depend on the row count by themselves.
    """
    return {
        name: lambda weight, bias, product=product: lambda rows: product(rows, rows[..., :1] * weight[:, 0])
        for name, product in products.items()
    }


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(kernels.time, "thread_time", lambda: now[0])

    def taking(seconds, depends=False):
        def product(rows, out):
            now[0] += seconds
            return out + len(rows) if depends else out

        return product

    return taking


def test_the_fastest_is_chosen_but_none_whose_rows_depend_on_their_batch(clock, monkeypatch):
    made = by_hand(first=clock(1.0), nearly=clock(0.95), faster=clock(0.5), fastest=clock(0.1, depends=True))
    monkeypatch.setitem(kernels.KERNELS, torch.float32, made)
    chosen = kernels._measure_kernels({(4, 4): 2, (4, 8): 1}, torch.float32)
    assert (chosen.name, chosen.variant, chosen.is_invariant) == ("faster", ("fastest",), True)
    assert chosen.gflops["first"] * 2 == pytest.approx(chosen.gflops["faster"], abs=0.2)
    assert "fastest" in str(chosen) and "rows depend on their batch" in str(chosen)


def test_a_little_faster_is_not_enough(clock, monkeypatch):
    """Otherwise the load of the moment would decide, and with it the last bits."""
    monkeypatch.setitem(kernels.KERNELS, torch.float32, by_hand(first=clock(1.0), nearly=clock(0.95)))
    assert kernels._measure_kernels({(4, 4): 1}, torch.float32).name == "first"


def test_a_busy_moment_does_not_decide(clock, monkeypatch):
    """Other work makes every call of a round ten times as slow, whichever kernel's turn it is."""
    calls = []

    def busy(seconds, rounds):
        def taking(rows, out):
            calls.append(None)
            return clock(seconds * (10 if len(calls) % 97 < rounds else 1))(rows, out)

        return taking

    monkeypatch.setitem(kernels.KERNELS, torch.float32, by_hand(first=busy(1.0, 0), faster=busy(0.5, 60)))
    assert kernels._measure_kernels({(4, 4): 1}, torch.float32).name == "faster"


def test_rounds_are_repeated_while_they_are_far_slower_than_the_best(clock):
    rounds = [5.0] * 1 + [1.0] * 3 + [4.0, 4.0] + [1.0] * 99
    times = iter(seconds for seconds in rounds for _ in range(4))  # a call that warms up, and three that are timed

    def call():
        clock(next(times))(torch.zeros(1), 0)

    assert kernels._time_in_turns({"one": [call]}) == {"one": 1.0}
    assert len(list(times)) == 4 * (len(rounds) - 3)  # the third round was calm

    def slower():
        clock(next(slow))(torch.zeros(1), 0)

    slow = iter(seconds for seconds in [1.0, 3.0, 3.0, 3.0, 1.0] for _ in range(4))
    assert kernels._time_in_turns({"one": [slower]}) == {"one": 1.0} and not list(slow)


def test_one_thread_is_timed_and_the_others_come_back(clock):
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        kernels._time_in_turns({"one": [lambda: seen.append(torch.get_num_threads())]})
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_run_chooses_before_it_starts_processes(tmp_path, monkeypatch):
    from coalign.launch import run as launch

    def start(*_):
        raise KeyboardInterrupt(sorted(path.name for path in (tmp_path / "cache" / "kernels").glob("*.json")))

    monkeypatch.setattr(launch, "start_cluster", start)
    kernels.is_onednn_faster.cache_clear()
    with pytest.raises(KeyboardInterrupt) as ended:
        run(settings(tmp_path, "grpo"))
    assert len(ended.value.args[0]) == 2  # of the policy's layers, and of the trainer's


def test_where_all_kernels_depend_on_the_batch_the_engine_says_so(clock, monkeypatch, caplog):
    made = by_hand(only=clock(1.0, depends=True))
    monkeypatch.setitem(kernels.KERNELS, torch.float32, made)
    monkeypatch.setattr("coalign.backends.engines.native.native_model.check_against_transformers", lambda model: None)
    with caplog.at_level(logging.WARNING):
        engine = helpers.engine(helpers.reference(helpers.qwen2()))
    assert not engine.is_invariant
    assert "Qwen2ForCausalLM may depend on their batch in their last bits (linear layers by only)" in (caplog.text)


def test_the_choice_is_kept_for_later_processes(tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        first = kernels.choose_kernel(LAYERS, torch.float32)
    assert f"float32 linear layers by {first.name}" in caplog.text
    [file] = (tmp_path / "cache" / "kernels").iterdir()
    monkeypatch.setattr(kernels, "_measure_kernels", None)
    kernels.choose_kernel.cache_clear()
    assert kernels.choose_kernel(LAYERS, torch.float32) == first
    other = "plain" if first.name != "plain" else "mkl"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"name": other}))
    kernels.choose_kernel.cache_clear()
    assert kernels.choose_kernel(LAYERS, torch.float32).name == other


def test_of_two_processes_the_first_one_decides(tmp_path):
    file = tmp_path / "kernels" / "key.json"
    mine, theirs = (kernels.KernelChoice(name, "float32", {name: 1.0}) for name in ("mkl", "onednn"))

    def make_late():
        assert kernels._keep(file, lambda: theirs) == theirs
        return mine

    assert kernels._keep(file, make_late) == theirs
    assert [path.name for path in file.parent.iterdir()] == ["key.json"]


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("COALIGN_CACHE", str(tmp_path / "file"))
    assert kernels.choose_kernel(LAYERS, torch.float32).name in kernels.KERNELS[torch.float32]
    assert "COALIGN_CACHE" in caplog.text


@pytest.mark.parametrize(("rate", "found"), [(10.0, True), (0.4, False)])
def test_bfloat16_is_computed_in_float32_where_it_is_slow(rate, found, tmp_path, monkeypatch, caplog):
    kept = kernels.KernelChoice("bfloat16" if found else "float32", "bfloat16", {"float32": 1.0, "bfloat16": rate})
    monkeypatch.setattr(kernels, "_read", lambda file: kept)
    expected = torch.bfloat16 if found else torch.float32
    assert kernels.choose_compute_dtype(torch.bfloat16, torch.device("cpu")) == expected
    assert kernels.choose_compute_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    assert kernels.choose_compute_dtype(torch.float32, torch.device("cpu")) == torch.float32
    assert ("no fast bfloat16" in caplog.text) is not found
