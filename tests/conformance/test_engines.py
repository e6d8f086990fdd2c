"""What every generation engine has to do, whatever computes its tokens. An engine that passes can serve a policy."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from coalign.backends.engines.episodes import EpisodeRunner
from coalign.backends.engines.request import Request, begin_samples
from coalign.config.schema import RolloutConfig, SamplingConfig
from coalign.data.batch import Batch
from coalign.environments.conversation import find_environments
from coalign.environments.episode import Episode
from coalign.types import SEQUENCE_COLUMNS, TOKEN_COLUMNS, Status
from tests.backends.native.helpers import step
from tests.conformance.engines import build, load, mismatch, prompts

COLUMNS = ("tokens", "loss_mask", "versions", "index", "prompt_length", "status", "group")
pytestmark = pytest.mark.timeout(600)  # vLLM is slow to import where others compute


@pytest.fixture
def policy(engine, directory):
    """The engine with version 0 of the weights."""
    engine.load_weights(load(directory).named_parameters(), version=0)
    return engine


def same(first: Batch, second: Batch) -> None:
    """Equal tokens; log-probs as close as kernels that round in another order come."""
    for name in COLUMNS:
        assert torch.equal(first[name], second[name]), name
    torch.testing.assert_close(first["rollout_logprobs"], second["rollout_logprobs"], rtol=0, atol=1e-5)


def responses(batch: Batch, column: str = "tokens") -> list[list]:
    return [row[column][row["loss_mask"]].tolist() for row in batch.rows()]


def other_weights(directory):
    model = load(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


# ---- what a batch looks like


def test_columns_order_and_kinds(policy):
    out = policy.generate(prompts())
    assert set(out.token) == {"tokens", "loss_mask", "rollout_logprobs", "versions"}
    assert set(out.sequence) == {"group", "index", "prompt_length", "status", "rows"}
    for name, dtype in {**TOKEN_COLUMNS, **SEQUENCE_COLUMNS}.items():
        assert name not in out or out[name].dtype == dtype, name
    assert out["group"].tolist() == [10] * 3 + [11] * 3 + [12] * 3 + [13] * 3
    assert out["index"].tolist() == [0, 1, 2] * 4
    for i, row in enumerate(out.rows()):
        prompt = prompts().slice(i // 3, i // 3 + 1)["tokens"].tolist()
        assert row["tokens"][: len(prompt)].tolist() == prompt and row["rows"] == {"answer": str(i // 3)}
        new = len(row["tokens"]) - len(prompt)
        assert row["loss_mask"].tolist() == [False] * len(prompt) + [True] * new
        assert row["versions"].tolist() == [-1] * len(prompt) + [0] * new and row["prompt_length"] == len(prompt)
        logprobs = row["rollout_logprobs"]
        assert (logprobs[: len(prompt)] == 0).all() and (logprobs[len(prompt) :] < 0).all()


def test_no_prompts(policy):
    assert len(policy.generate(prompts().slice(0, 0))) == 0


def test_the_engine_of_another_kind_draws_the_same_tokens(policy, directory):
    settings = {"top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
    reference = build("native", directory)
    same(policy.generate(prompts(), **settings), reference.generate(prompts(), **settings))


# ---- log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_hugging_face(policy, directory, temperature):
    out = policy.generate(prompts(), temperature=temperature)
    assert mismatch(load(directory), out, temperature) < 1e-5


def test_greedy_is_the_most_likely_token_at_temperature_one(policy, directory):
    out, model = policy.generate(prompts(), temperature=0.0, top_k=0, samples=1), load(directory)
    assert mismatch(model, out, 0.0) < 1e-5
    for row in out.rows():
        with torch.no_grad():
            likeliest = model(row["tokens"].long()[None], use_cache=False).logits[0, :-1].argmax(-1)
        assert torch.equal(likeliest[row["loss_mask"][1:]], row["tokens"][row["loss_mask"]].long())


# ---- random numbers


def test_a_sample_depends_on_neither_batch_nor_order(policy):
    whole = policy.generate(prompts())
    reverse = policy.generate(prompts().select(torch.tensor([3, 2, 1, 0])))
    same(whole, reverse.select(torch.tensor([9, 10, 11, 6, 7, 8, 3, 4, 5, 0, 1, 2])))
    same(whole, Batch.concat([policy.generate(part) for part in prompts().split(2, by="sequences")]))
    first = policy.generate(prompts(), samples=1)
    same(first, whole.select(torch.tensor([0, 3, 6, 9])))


def test_samples_of_a_prompt_and_groups_differ(policy):
    twice = Batch.concat([prompts(1), prompts(1).with_(group=torch.tensor([99]))])
    drawn = responses(policy.generate(twice))
    assert len({tuple(tokens) for tokens in drawn}) == 6


# ---- ends


def test_end_tokens_limits_and_stop_strings(policy):
    free = policy.generate(prompts().with_(max_new_tokens=torch.tensor([2, 7, 100, 24])), samples=1)
    assert [len(tokens) for tokens in responses(free)] == [2, 7, 24, 24]
    assert free["status"].tolist() == [Status.TRUNCATED] * 4
    end, engine = responses(free)[3][5], policy.engine
    before, engine.end_tokens = engine.end_tokens, frozenset({end})
    try:
        ended = policy.generate(prompts(), samples=1)
    finally:
        engine.end_tokens = before
    cut = responses(free)[3].index(end) + 1
    assert responses(ended)[3] == responses(free)[3][:cut] and ended["status"][3] == Status.OK
    read = policy.decoder(["x"])
    stop = read(responses(free)[2])[4:6]
    stopped = responses(policy.generate(prompts(), samples=1, stop=[stop]))[2]
    assert stop in read(stopped) and stop not in read(stopped[:-1])
    assert stopped == responses(free)[2][: len(stopped)]


def test_what_can_never_fit_is_refused_and_nothing_is_left_behind(policy):
    before = policy.generate(prompts())
    for tokens, message in (([1] * 2048, "context is 2048"), ([5, 400], "outside of 0..319")):
        bad = Batch(torch.tensor([len(tokens)]), {"tokens": torch.tensor(tokens)}, {"group": torch.tensor([7])})
        with pytest.raises(ValueError, match=f"group 7.*{message}"):
            policy.generate(bad)
    same(before, policy.generate(prompts()))


def test_an_error_of_the_listener_ends_the_call_alone(policy):
    def listen(group, index, token, logprob):
        raise KeyError("listener")

    with pytest.raises(KeyError, match="listener"):
        policy.generate(prompts(), on_token=listen)
    heard = []
    out = policy.generate(prompts(), on_token=lambda *told: heard.append(told))
    assert len(heard) == int(out["loss_mask"].sum())
    assert [token for group, index, token, _ in heard if (group, index) == (12, 1)] == responses(out)[7]
    assert sum(logprob for *_, logprob in heard) == pytest.approx(float(out["rollout_logprobs"].sum()), abs=1e-3)


def test_what_prompts_and_turns_have_in_common_is_computed_once(policy):
    sampling = SamplingConfig(max_new_tokens=8)
    prompt, answers = prompts()["tokens"][-45:].tolist(), []

    def ask(run, request):
        before = run.tokens_prefilled
        run.submit(request, lambda place, response: answers.append(response.tokens.tolist()))
        step(policy.engine, run)
        return run.tokens_prefilled - before

    with policy.engine.open(sampling) as run:
        assert ask(run, Request(prompt, 70, samples=3)) < 2 * len(prompt)  # not three times; vLLM keeps whole blocks
        ask(run, Request(prompt, 71, first_turn=len(prompt)))
        second = prompt + answers[-1] + [7, 8, 9]
        assert ask(run, Request(second, 71, first_turn=len(prompt))) < len(second) / 2
        assert run.tokens_kept > 0
    assert [len(tokens) for tokens in answers] == [8] * 5


# ---- in parts


def test_a_conversation_that_begins_anew_draws_other_numbers(policy):
    prompt, drawn = prompts()["tokens"][-45:].tolist(), []
    with policy.engine.open(SamplingConfig(max_new_tokens=8)) as run:
        for restarts in (0, 1, 0):
            request = Request(prompt, 71, first_turn=len(prompt), restarts=restarts)
            run.submit(request, lambda place, response: drawn.append(response.tokens.tolist()))
            step(policy.engine, run)
            run.forget(71, 0)
    assert drawn[0] == drawn[2] != drawn[1]


def test_rounds_give_the_response_at_once(policy):
    whole, samples, rounds = policy.generate(prompts()), prompts(), 0
    while rounds == 0 or bool((samples["status"] == Status.PARTIAL).any()):
        samples = policy.generate(samples, round_tokens=7)
        rounds += 1
    assert rounds == 4
    same(samples, whole)


def test_groups_are_handed_over_as_they_are_complete(policy):
    whole = policy.generate(prompts())
    for begun in (prompts(), begin_samples(prompts(), 3)):
        parts = []
        for part in policy.generate_in_parts(2, begun, samples=3):
            parts.append(part)
            assert not torch.is_inference_mode_enabled() and not part["tokens"].is_inference()
        assert [sorted(set(part["group"].tolist())) for part in parts] == [[10, 11], [12, 13]]
        same(Batch.concat(parts), whole)


def test_the_first_part_does_not_wait_for_the_last(policy):
    seen, limits = [], prompts().with_(max_new_tokens=torch.tensor([1, 16, 16, 16]))
    parts = policy.generate_in_parts(4, limits, samples=1, on_token=lambda *token: seen.append(token))
    first = next(parts)
    begun = len(seen)
    rest = list(parts)
    assert first["group"].tolist() == [10] and begun < len(seen)
    assert [part["group"].tolist() for part in rest] == [[11], [12], [13]]
    same(Batch.concat([first, *rest]), policy.generate(limits, samples=1))


def test_once_enough_groups_are_complete_the_others_are_cut_and_go_on(policy):
    limits = prompts().with_(max_new_tokens=torch.tensor([3, 4, 24, 24]))
    whole, out = policy.generate(limits), policy.generate(limits, min_complete=0.5)
    assert out["status"].tolist() == [1] * 6 + [3] * 6
    assert all(len(tokens) < 24 for tokens in responses(out)[6:])
    same(policy.generate(out), whole)


def test_pause_holds_between_two_tokens_and_new_weights_come_in(policy, directory):
    reached, heard, done = threading.Event(), [], []

    def listen(*told):
        heard.append(told)
        if len(heard) == 24:
            reached.set()

    asked = {"samples": 1, "max_new_tokens": 400, "on_token": listen}
    worker = threading.Thread(target=lambda: done.append(policy.generate(prompts(), **asked)))
    worker.start()
    assert reached.wait(60)
    policy.pause()
    held = len(heard)
    policy.load_weights(other_weights(directory).named_parameters(), version=1)
    assert not done and len(heard) == held
    policy.resume()
    with pytest.raises(RuntimeError, match="without pause"):
        policy.resume()
    worker.join(120)
    [out] = done
    for versions in responses(out, "versions"):
        assert versions == sorted(versions) and set(versions) <= {0, 1}
    assert {1, 0} == {version for versions in responses(out, "versions") for version in versions}
    fresh = policy.generate(prompts())
    assert set(fresh["versions"][fresh["loss_mask"]].tolist()) == {1}
    assert mismatch(other_weights(directory), fresh) < 1e-5


# ---- weights


def test_after_an_update_everything_is_as_if_made_with_the_new_weights(policy, directory):
    policy.generate(prompts())  # leaves keys and values of the old ones behind
    new = other_weights(directory)
    policy.load_weights(new.named_parameters(), version=7)
    out, greedy = policy.generate(prompts()), policy.generate(prompts(), temperature=0.0)
    assert mismatch(new, out) < 1e-5 and mismatch(new, greedy, 0.0) < 1e-5
    policy.load_weights(((n, p) for n, p in load(directory).named_parameters() if "norm" in n), version=8)
    partly = other_weights(directory)
    partly.load_state_dict({n: p for n, p in load(directory).state_dict().items() if "norm" in n}, strict=False)
    out = policy.generate(prompts())
    assert mismatch(partly, out) < 1e-5
    assert set(out["versions"][out["loss_mask"]].tolist()) == {8}


def test_a_version_that_comes_again_is_of_other_weights(policy, directory):
    policy.generate(prompts())
    policy.load_weights(other_weights(directory).named_parameters(), version=0)  # as after a roll-back
    assert mismatch(other_weights(directory), policy.generate(prompts())) < 1e-5


def test_weights_that_stop_half_way_leave_nothing_to_serve(policy, directory):
    def half():
        for number, item in enumerate(other_weights(directory).named_parameters()):
            if number == 5:
                raise ConnectionError("the trainer is gone")
            yield item

    before = policy.generate(prompts())
    with pytest.raises(ConnectionError, match="the trainer is gone"):
        policy.load_weights(half(), version=1)
    with pytest.raises(RuntimeError, match="'policy' does not serve: the weights of version 1 were installed in part"):
        policy.generate(prompts())
    policy.load_weights(load(directory).named_parameters(), version=0)
    same(before, policy.generate(prompts()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [("model.nowhere.weight", lambda tensor: tensor, "nowhere"), (None, lambda tensor: tensor[:-1], "shape")],
)
def test_weights_that_do_not_fit_are_refused(policy, directory, name, change, message):
    first, tensor = next(iter(load(directory).named_parameters()))
    with pytest.raises(ValueError, match=message):
        policy.load_weights([(name or first, change(tensor))], version=1)


# ---- episodes


async def _three_turns(episode: Episode) -> None:
    for _ in range(3):
        await episode.generate(max_new_tokens=6)
        episode.say({"role": "user", "content": "more"})


def test_episodes_take_turns_with_token_ids_in_and_out(policy, directory):
    rollout = {"fn": "tests.conformance.test_engines:_three_turns", "timeout": 120.0}
    context = replace(policy.context, tokenizer=str(directory))
    policy.runner = EpisodeRunner(find_environments(RolloutConfig(**rollout)), policy.tokenizer, context)
    try:
        out, stats = policy.generate(prompts(2))
        again, _ = policy.generate(prompts(2))
    finally:
        policy.runner.close()
        policy.runner = None
    assert mismatch(load(directory), out) < 1e-5
    assert stats["episode/turns"].value == 3 and int(out["loss_mask"].sum()) == 6 * 3 * 6
    same(out.without("messages"), again.without("messages"))
