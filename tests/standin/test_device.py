"""The simulated device itself: each property that the other tests rely on."""

import ctypes
import faulthandler
import os
import signal
import threading

import pytest
import torch
import torch.nn.functional as F

from tests.standin import device
from tests.standin.device import counting, memory_limit

pytestmark = [pytest.mark.device, pytest.mark.quick]
races = pytest.mark.races
CARD, OTHER = "standin:0", "standin:1"
MIB = 2**20


def in_a_fork(function):
    """How a fork of this process ends that calls ``function``: the status of waitpid."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        try:
            function()
        finally:
            os._exit(7)
    return os.waitpid(child, 0)[1]


def is_garbage(x):
    return bool(x.isnan().all())


# ---- memory


def test_the_host_cannot_touch_the_memory():
    x = torch.ones(8, device=CARD)
    there = torch.ones(8)
    assert os.WTERMSIG(in_a_fork(lambda: ctypes.string_at(x.data_ptr(), 4))) == signal.SIGSEGV
    assert os.WTERMSIG(in_a_fork(lambda: ctypes.memset(x.data_ptr(), 0, 4))) == signal.SIGSEGV
    assert os.WEXITSTATUS(in_a_fork(lambda: ctypes.string_at(there.data_ptr(), 4))) == 7
    assert x.cpu().tolist() == [1.0] * 8


def test_fresh_memory_holds_garbage():
    assert is_garbage(torch.empty(1000, device=CARD).cpu())
    torch.ones(1000, device=CARD)
    assert is_garbage(torch.empty(1000, device=CARD).cpu())  # of a block that was used before
    assert torch.empty(3, dtype=torch.int64, device=CARD).tolist() == [-1, -1, -1]


def test_a_storage_that_is_resized_keeps_what_fits():
    x = torch.arange(4.0, device=CARD)
    storage = x.untyped_storage()
    storage.resize_(32)
    assert x.new_empty(0).set_(storage).tolist()[:4] == [0.0, 1.0, 2.0, 3.0]
    allocated = torch.accelerator.memory_allocated(0)
    storage.resize_(0)
    assert torch.accelerator.memory_allocated(0) == allocated - 512
    with pytest.raises(RuntimeError, match="memory was freed"):
        x.sum()


def test_allocated_bytes_and_their_peak_are_counted_by_card():
    before = [torch.accelerator.memory_allocated(card) for card in (0, 1)]
    torch.accelerator.reset_peak_memory_stats(0)
    x = torch.empty(MIB, dtype=torch.uint8, device=CARD)
    y = torch.empty(MIB, dtype=torch.uint8, device=CARD)
    assert torch.accelerator.memory_allocated(0) == before[0] + 2 * MIB
    del x, y
    assert torch.accelerator.memory_allocated(0) == before[0]
    assert torch.accelerator.max_memory_allocated(0) == before[0] + 2 * MIB
    torch.accelerator.reset_peak_memory_stats(0)
    assert torch.accelerator.max_memory_allocated(0) == before[0]
    assert torch.accelerator.memory_allocated(1) == before[1]


def test_memory_ends_at_the_limit():
    used = torch.accelerator.memory_allocated(0)
    with memory_limit(used + 3 * MIB):
        kept = torch.zeros(2 * MIB, dtype=torch.uint8, device=CARD)
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 MiB.*1\.00 MiB is free"):
            torch.zeros(2 * MIB, dtype=torch.uint8, device=CARD)
        torch.zeros(2 * MIB, dtype=torch.uint8, device=OTHER)
        assert torch.accelerator.get_memory_info(0) == (MIB, used + 3 * MIB)
        del kept
        torch.zeros(2 * MIB, dtype=torch.uint8, device=CARD)
    torch.zeros(8 * MIB, dtype=torch.uint8, device=CARD)


def test_holes_are_used_again():
    parts = [torch.empty(MIB, dtype=torch.uint8, device=CARD) for _ in range(6)]
    addresses = [part.data_ptr() for part in parts]
    del parts[1:5], parts
    whole = torch.empty(4 * MIB, dtype=torch.uint8, device=CARD)
    assert whole.data_ptr() <= addresses[1]


def test_a_forked_process_cannot_use_the_device():
    def use():
        try:
            torch.ones(3, device=CARD)
        except RuntimeError as error:
            os._exit(3 if "in forked subprocess" in str(error) else 4)

    assert os.WEXITSTATUS(in_a_fork(use)) == 3


# ---- cards


def test_there_are_several_cards():
    assert torch.accelerator.current_accelerator() == torch.device("standin")
    assert torch.accelerator.device_count() == 4
    x = torch.arange(3.0, device=OTHER)
    assert (x + 1).device == torch.device(OTHER)
    assert x.to(CARD).device == torch.device(CARD) and x.to(CARD).tolist() == [0.0, 1.0, 2.0]
    with torch.accelerator.device_index(2):
        assert torch.ones(1, device="standin").device.index == 2
    assert torch.ones(1, device="standin").device.index == 0
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="standin:4")


def test_the_current_card_belongs_to_a_thread():
    seen = []
    with torch.accelerator.device_index(3):
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_device_index()))
        thread.start()
        thread.join()
    assert seen == [0]


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x + y,
        lambda x, y: y + x,
        lambda x, y: x @ y,
        lambda x, y: x.add_(y),
        lambda x, y: y.add_(x),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: F.embedding(y.long(), x),
        lambda x, y: x.index_select(0, y[0].long()),
        lambda x, y: torch.add(x, x, out=y),
    ],
)
@pytest.mark.parametrize("place", ["cpu", OTHER])
def test_tensors_of_different_devices_are_refused_as_by_cuda(operation, place):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but found at least two"):
        operation(torch.ones(2, 2, device=CARD), torch.ones(2, 2, device=place))


def test_a_number_and_indices_may_be_on_the_host():
    x = torch.arange(4.0, device=CARD)
    assert (x + torch.tensor(2.0)).tolist() == [2.0, 3.0, 4.0, 5.0]
    with counting() as counts:
        y = x[torch.tensor([3, 1])]
    assert counts.host_to_device == 1 and y.tolist() == [3.0, 1.0]
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        torch.arange(4.0)[torch.tensor([1], device=CARD)]


# ---- streams


@races
def test_who_has_not_waited_for_a_stream_reads_garbage():
    x = torch.ones(100, device=CARD)
    side = torch.Stream(device=CARD)
    with side:
        early = x * 2
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x * 2
    torch.accelerator.synchronize()
    assert is_garbage(early.cpu())
    assert y.tolist() == [2.0] * 100
    [race] = device.read_races()
    assert "reads on stream 1" in race or "reads on stream" in race


@races
def test_who_writes_what_another_stream_still_reads_spoils_it():
    x = torch.ones(100, device=CARD)
    torch.accelerator.synchronize()
    side = torch.Stream(device=CARD)
    with side:
        y = x * 2
    x.fill_(3)
    torch.accelerator.synchronize()
    assert y.tolist() == [2.0] * 100
    assert is_garbage(x.cpu())
    with side:
        y = x * 2
    torch.accelerator.current_stream().wait_stream(side)
    x.fill_(3)
    assert x.tolist() == [3.0] * 100


@races
def test_the_result_of_another_stream_is_garbage_until_it_was_waited_for():
    side = torch.Stream(device=CARD)
    with side:
        x = torch.ones(100, device=CARD)
    assert is_garbage(x.cpu())
    side.synchronize()
    assert x.tolist() == [1.0] * 100


@races
def test_parts_of_a_tensor_are_apart():
    x = torch.zeros(100, device=CARD)
    torch.accelerator.synchronize()
    side = torch.Stream(device=CARD)
    with side:
        x[:50].fill_(1)
    x[50:].fill_(2)
    assert not device.read_races()
    assert is_garbage(x.cpu())
    side.synchronize()
    assert x.tolist() == [1.0] * 50 + [2.0] * 50


def test_a_copy_to_the_host_is_made_when_somebody_waits():
    x = torch.ones(100, device=CARD)
    there = torch.zeros(100)
    there.copy_(x, non_blocking=True)
    assert is_garbage(there)
    torch.accelerator.current_stream().synchronize()
    assert there.tolist() == [1.0] * 100
    later = x.to("cpu", non_blocking=True)
    x.fill_(2)  # comes after the copy
    assert is_garbage(later)
    torch.accelerator.synchronize()
    assert later.tolist() == [1.0] * 100


def test_a_copy_from_pinned_memory_reads_it_when_somebody_waits():
    pinned = torch.ones(100, pin_memory=True)
    assert pinned.is_pinned() and pinned[50:].is_pinned() and not torch.ones(100).is_pinned()
    x = pinned.to(CARD, non_blocking=True)
    pinned.fill_(5)
    assert x.tolist() == [5.0] * 100
    y = pinned.to(CARD, non_blocking=True)
    torch.accelerator.synchronize()
    pinned.fill_(6)
    assert y.tolist() == [5.0] * 100
    pageable = torch.ones(100)
    z = pageable.to(CARD, non_blocking=True)
    pageable.fill_(5)
    assert z.tolist() == [1.0] * 100


@races
def test_copies_between_cards_wait_for_both():
    x = torch.ones(100, device=CARD)
    y = x.to(OTHER)
    x.fill_(2)
    assert (y + 1).tolist() == [2.0] * 100
    assert not device.read_races()
    with torch.Stream(device=CARD):
        y = x.to(OTHER)
    assert is_garbage(y.cpu())


def test_events():
    x, side = torch.ones(100, device=CARD), torch.Stream(device=CARD)
    with side:
        y = torch.ones(100, device=CARD)
        done = torch.Event(device=CARD, enable_timing=True)
        side.record_event(done)
    assert not done.query()
    assert not side.query()
    torch.accelerator.current_stream().wait_event(done)
    assert (x + y).tolist() == [2.0] * 100
    begun, ended = (torch.Event(device=CARD, enable_timing=True) for _ in range(2))
    begun.record()
    y = x * 2
    ended.record()
    assert not ended.query()
    ended.synchronize()
    assert ended.query() and begun.elapsed_time(ended) >= 0
    x * 3
    stream = torch.accelerator.current_stream()
    assert [stream.query() for _ in range(4)] == [False, False, True, True]


def test_threads_have_their_own_current_stream():
    side, seen = torch.Stream(device=CARD), []
    with side:
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream(0)))
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream(0) == side
    assert seen == [torch.accelerator.current_stream(0)]


# ---- random numbers


def test_every_card_has_its_own_generator():
    torch.manual_seed(3)
    first = torch.rand(4, device=CARD)
    assert torch.equal(first.cpu(), torch.rand(4, device=OTHER).cpu())
    state = torch.standin.get_rng_state(CARD)
    second = torch.rand(4, device=CARD)
    assert not torch.equal(first, second)
    torch.rand(4, device=OTHER)
    torch.rand(4)
    torch.standin.set_rng_state(state, CARD)
    assert torch.equal(torch.rand(4, device=CARD), second)
    with torch.accelerator.device_index(1):
        torch.standin.manual_seed(3)
    assert torch.equal(torch.rand(4, device=OTHER).cpu(), first.cpu())
    assert not torch.equal(torch.rand(4, device=CARD), first)


def test_generators_of_ones_own():
    own = torch.Generator(device=CARD).manual_seed(5)
    x = torch.randn(4, device=CARD, generator=own)
    assert torch.equal(x.cpu(), torch.randn(4, generator=torch.Generator().manual_seed(5)))
    torch.manual_seed(5)
    assert torch.equal(torch.randn(4, device=CARD), x)
    with pytest.raises(RuntimeError, match="Expected a 'standin' device type for generator but found 'cpu'"):
        torch.empty(4, device=CARD).normal_(generator=torch.Generator())


# ---- counters


def test_kernels_copies_and_waits_are_counted():
    there = torch.ones(2, 2)
    with counting() as counts:
        x = there.to(CARD)
        y = x @ x + x
        z = y.t()[0].view(2, 1)
        w = z.clone()
    assert counts.kernels == {"aten::mm.out": 1, "aten::add.out": 1}
    assert (counts.host_to_device, counts.device_to_device, counts.device_to_host, counts.waits) == (1, 1, 0, 1)
    with counting() as counts:
        w.sum().item()
        y.nonzero()
        y[y > 0]
        bool((y > 0).all())
        torch.equal(y, x)
    assert counts.waits == 5 and counts.device_to_host == 2
    with counting() as counts:
        x.to("cpu", non_blocking=True)
        x + 1
    assert counts.waits == 0
    torch.accelerator.synchronize()


# ---- computation


def compute(place):
    """A small network of many operations: its loss and gradients."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).double().to(place).requires_grad_()  # noqa: E731
    table, weight, bias, norm = draw(11, 16), draw(16, 16), draw(16), draw(16)
    tokens = torch.randint(0, 11, (2, 7), generator=generator).to(place)
    x = F.embedding(tokens, table)
    x = F.rms_norm(x, (16,), norm) + F.layer_norm(x, (16,), norm, bias)
    q = F.linear(x, weight, bias).unflatten(-1, (4, 4)).transpose(1, 2)
    x = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
    x = F.silu(x) * F.gelu(x).softmax(-1).cumsum(-1)
    logits = x @ table.t()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss = loss + logits.topk(3).values.sum() + logits.gather(-1, tokens[..., None]).logsumexp(0).mean()
    loss = loss + torch.where(logits > 0, logits, -logits).sort(-1).values.std()
    loss.backward()
    return [loss, *(t.grad for t in (table, weight, bias, norm))]


def test_results_and_gradients_are_those_of_the_cpu():
    for own, other in zip(compute(CARD), compute("cpu"), strict=True):
        assert own.device == torch.device(CARD)
        torch.testing.assert_close(own.cpu(), other, rtol=1e-9, atol=1e-9)


def test_backward_on_another_stream_waits():
    x = torch.ones(10, device=CARD, requires_grad=True)
    side = torch.Stream(device=CARD)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = (x * 2).sum()
    torch.accelerator.current_stream().wait_stream(side)
    y.backward()
    assert x.grad.tolist() == [2.0] * 10


def test_autocast_computes_products_in_half_precision():
    x = torch.ones(4, 4, device=CARD)
    with torch.autocast("standin", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert F.linear(x, x).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32


def test_dropout_draws_from_the_card():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    kept = F.dropout(torch.ones(1000, device=CARD)).count_nonzero().item()
    assert 400 < kept < 600
    assert torch.equal(torch.get_rng_state(), state)


def test_saving_and_loading(tmp_path):
    x = torch.arange(3.0, device=OTHER)
    torch.save(x, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt").device == torch.device(OTHER)
    assert torch.load(tmp_path / "x.pt", map_location="cpu").tolist() == [0.0, 1.0, 2.0]


def test_many_threads_compute_on_their_cards():
    results = {}

    def work(card):
        results[card] = compute(f"standin:{card}")

    threads = [threading.Thread(target=work, args=(card,)) for card in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for card in range(4):
        for own, other in zip(results[card], compute("cpu"), strict=True):
            torch.testing.assert_close(own.cpu(), other, rtol=1e-9, atol=1e-9)
