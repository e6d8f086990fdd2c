"""Graphs: those of the simulated device, and the native engine's decode step in them."""

import gc
import logging
from functools import partial

import pytest
import torch

from coalign.backends.engines.native import graphs
from coalign.backends.engines.native.graphs import _round_rows
from coalign.backends.engines.request import Request
from coalign.config.schema import SamplingConfig
from coalign.devices import capture_graph, has_graphs
from coalign.roles import Context
from tests.backends.batches import rollout
from tests.conformance.engines import build, model_dir, prompts
from tests.standin.device import counting
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.device
CARD = "standin:0"


def is_garbage(x):
    return bool(x.cpu().isnan().all())


# ---- the device


@pytest.mark.quick
def test_a_graph_runs_when_it_is_replayed_and_not_when_it_is_captured():
    x, y = torch.arange(3.0, device=CARD), torch.zeros(3, device=CARD)

    def compute():
        x.add_(1)
        y.copy_(x * 2)
        return x * 10

    with counting() as counts:
        graph, out = capture_graph(compute, torch.device(CARD))
    assert has_graphs(CARD) and counts.launched == 0
    assert x.tolist() == [0, 1, 2] and y.tolist() == [0, 0, 0] and is_garbage(out)
    with counting() as counts:
        graph.replay()
        graph.replay()
    assert counts.kernels == {"graph": 2}
    assert x.tolist() == [2, 3, 4] and y.tolist() == [4, 6, 8] and out.tolist() == [20, 30, 40]


@pytest.mark.quick
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x + torch.ones(3).to(CARD),
        lambda x: torch.rand(3, device=CARD),
        lambda x: torch.accelerator.synchronize(),
    ],
)
def test_a_graph_that_waits_copies_or_draws_is_refused(compute):
    x = torch.zeros(3, device=CARD)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        capture_graph(lambda: compute(x.add_(1)), torch.device(CARD))
    assert x.tolist() == [0, 0, 0]
    graph, _ = capture_graph(lambda: x.add_(1), torch.device(CARD))
    graph.replay()
    assert x.tolist() == [1, 1, 1]


@pytest.mark.quick
def test_a_graph_on_memory_that_was_freed_is_refused():
    x, y = torch.zeros(3, device=CARD), torch.zeros(3, device=CARD)
    graph, _ = capture_graph(partial(y.add_, x), torch.device(CARD))
    del x
    there = torch.zeros(3, device=CARD)  # at the same address
    with pytest.raises(RuntimeError, match="on memory that was freed"):
        graph.replay()
    assert there.tolist() == [0, 0, 0]


# ---- the engine


@pytest.mark.quick
def test_rows_are_rounded_up_by_half_at_most():
    found = [_round_rows(count) for count in (1, 8, 9, 17, 25, 33, 49, 65, 100, 129, 200, 256)]
    assert found == [8, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 256]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return model_dir(tmp_path_factory.mktemp("model"))


def generate(directory, device=CARD, **native):
    context = Context(model="policy", device=device, samples_per_prompt=3, seed=5)
    return build("native", directory, context, native=native)


SAMPLINGS = [
    pytest.param({"temperature": 0.0}, marks=pytest.mark.quick),
    {"temperature": 1.0, "top_k": 0},
    {"top_p": 0.9, "top_k": 20},
    {"min_p": 0.05, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "plain", "truncated", "penalised"])
def test_graphs_choose_the_tokens_of_the_cpu(directory, sampling):
    """Requests come and go, so that rows are idle; the cache grows; a second call has a cache of its own."""
    there, plain = generate(directory), generate(directory, graphs=False)
    for count in (2, 4):
        batch = prompts(count)
        expected = generate(directory, "cpu").generate(batch, **sampling)
        with counting() as counts:
            found = there.generate(batch, **sampling)
        assert counts.kernels["graph"] >= 4
        with counting() as counts:
            plain.generate(batch, **sampling)
        assert "graph" not in counts.kernels
        assert torch.equal(found["tokens"], expected["tokens"])
        torch.testing.assert_close(found["rollout_logprobs"], expected["rollout_logprobs"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recomputes", [True, False])
@pytest.mark.parametrize("adopt", [True, False])
def test_new_weights_in_the_middle_are_the_graphs(tmp_path, adopt, recomputes):
    """Adopted weights are other tensors, so graphs are captured again; copied ones stay where the first copy is."""
    moved = {8, 14} if adopt else {8}
    path = tiny_model_dir(tmp_path, vocab=512)
    sampling = SamplingConfig(max_new_tokens=24, temperature=0.0)

    def choose(device):
        """What is chosen, token by token, where weights change twice."""
        module, chosen = generate(path, device), []
        module.engine.recomputes_kv = recomputes
        module.generate(rollout((3, 4), 1).with_(rows=[{}, {}]).without("loss_mask"))  # loads the weights
        with module.engine.open(sampling, lambda *choice: chosen.append(choice[:3])) as session:
            for group in range(3):
                session.submit(Request([1, 2, 3, 4 + group], group, 2), lambda *_: None)
            for step in range(24):
                if step in (8, 14):
                    own = [(name, tensor * 1.5 + 0.1) for name, tensor in module.engine.model.weights()]
                    module.engine.load_weights(own, version=step, adopt=adopt)
                    del own
                with module.engine.stepping(), counting() as counts:
                    session.step()
                if device == CARD and 2 < step < 20:
                    assert counts.kernels.get("graph", 0) == (step not in moved)
        return chosen

    assert choose(CARD) == choose("cpu")


def test_rows_that_are_idle_for_longer_than_the_cache_do_no_harm(tmp_path):
    """One request after the other, in a cache of eight sequences whose slots hold fewer tokens than there are steps."""
    path = tiny_model_dir(tmp_path)
    sampling, chosen = SamplingConfig(max_new_tokens=12), {"cpu": [], CARD: []}
    for device, own in chosen.items():
        module = generate(path, device)
        module.generate(rollout((3, 4), 1).with_(rows=[{}, {}]).without("loss_mask"))  # loads the weights
        with module.engine.open(sampling) as session:
            for group in range(12):
                session.submit(Request([1, 2, 3, 4 + group], group), lambda _, response, own=own: own.append(response))
                while session.unfinished:
                    with module.engine.stepping():
                        session.step()
        assert session.slots.cache.length < 12 * 11
    there, here = ([response.tokens.tolist() for response in chosen[device]] for device in (CARD, "cpu"))
    assert there == here and len(here) == 12


def test_a_call_leaves_no_memory_behind(directory):
    """At once: a KV cache that waits for the garbage collector may be there when the next one needs its place."""
    module = generate(directory)
    module.generate(prompts())
    gc.collect()
    before = torch.accelerator.memory_allocated(0)
    gc.disable()
    try:
        with counting() as counts:
            module.generate(prompts())
        assert torch.accelerator.memory_allocated(0) == before
    finally:
        gc.enable()
    assert counts.kernels["graph"]


def test_a_step_that_waits_is_computed_kernel_by_kernel(tmp_path, monkeypatch, caplog):
    path = tiny_model_dir(tmp_path)
    expected = generate(path, "cpu").generate(prompts())
    module = generate(path)
    forbid = module.engine.model.forbid
    monkeypatch.setattr(module.engine.model, "forbid", lambda logits: forbid(logits + 0 * logits.sum().item()))
    with caplog.at_level(logging.WARNING, graphs.__name__), counting() as counts:
        found = module.generate(prompts())
    assert "graph" not in counts.kernels and torch.equal(found["tokens"], expected["tokens"])
    [line] = [each.getMessage() for each in caplog.records if "kernel by kernel" in each.getMessage()]
    assert "Qwen2ForCausalLM" in line and "not permitted when stream is capturing" in line
