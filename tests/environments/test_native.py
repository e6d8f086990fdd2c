"""Episodes with the real engine: the token log against Hugging Face, determinism, concurrency, the metrics."""

from __future__ import annotations

import asyncio
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from coalign.backends.engines.episodes import EpisodesFailed
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.engines.request import begin_samples
from coalign.config.schema import ModelConfig, RolloutConfig
from coalign.data.batch import Batch
from coalign.data.templates import load_template, read_samples
from coalign.environments.conversation import find_environments
from coalign.rewards import episode as episode_reward
from coalign.roles import Context
from coalign.types import Status, Total
from coalign_agents.tools import _Toolbox
from coalign_serve.formats import ToolRequest
from tests.conformance.reference import logprobs
from tests.environments.helpers import TOOLS_CHATML
from tests.tiny import tiny_model_dir, tiny_tokenizer

HERE = "tests.environments.test_native"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tiny_model_dir(tmp_path_factory.mktemp("model"))
    tiny_tokenizer(path, chat_template=TOOLS_CHATML)
    return path


def module(
    directory, fn: str, *, samples=2, tokens=60, timeout=60.0, native=None, reasoning=None, **arguments
) -> NativeModule:
    config = {"module": "native", "load": str(directory), "sampling": {"max_new_tokens": tokens}}
    name = fn if ":" in fn or fn in ("tool_use", "self_play") else f"{HERE}:{fn}"
    environments = find_environments(RolloutConfig(**({"fn": name, "timeout": timeout} | arguments)))
    shared = {"tokenizer": str(directory), "environments": environments, "reasoning": reasoning}
    made = NativeModule(
        ModelConfig(**config, native=native or {}), Context(samples_per_prompt=samples, seed=3, **shared)
    )
    made.setup()
    return made


def prompts(directory, count: int = 3) -> Batch:
    template = load_template(tiny_tokenizer(directory, chat_template=TOOLS_CHATML))
    asked = [[{"role": "user", "content": f"What is {i}+{i}?"}] for i in range(count)]
    tokens = [template.prompt(messages) for messages in asked]
    rows = [{"messages": asked[i], "prompt": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(count)]
    flat = torch.tensor([t for some in tokens for t in some], dtype=torch.int32)
    return Batch(torch.tensor([len(t) for t in tokens]), {"tokens": flat}, {"group": torch.arange(count), "rows": rows})


async def calculates(episode, *, turns: int = 3):
    """The calculator's environment, with a policy of random weights: what it says is taken for a call."""
    box = _Toolbox.build(["calculator"], timeout=10, max_chars=100)
    episode.begin(tools=box.descriptions)
    for turn in range(turns):
        said = await episode.generate(max_new_tokens=8)
        wish = f"{len(said.tokens)}*{turn + 2}"
        [answer] = await box.answer(episode, [ToolRequest("calculator", {"expression": wish})])
        episode.reward(float(answer["content"]) / 100)
        if turn < turns - 1:
            episode.say(answer)


def test_masks_log_probs_and_rewards_follow_from_the_token_log(directory):
    """Nothing is taken from the batch but tokens: all else is computed again, by Hugging Face and by the rules."""
    out, _ = module(directory, "calculates").generate(prompts(directory))
    tokenizer = tiny_tokenizer(directory, chat_template=TOOLS_CHATML)
    model = AutoModelForCausalLM.from_pretrained(directory)
    header, end = "<|im_start|>assistant\n", tokenizer.eos_token_id
    opened = tokenizer(header, add_special_tokens=False)["input_ids"]
    assert len(out) == 6
    for row, sample in zip(out.rows(), read_samples(out, tokenizer), strict=True):
        tokens = row["tokens"].tolist()
        # Mask: after each header up to the end token or eight tokens.
        mask, rewards, at, turn = [False] * len(tokens), [0.0] * len(tokens), 0, 0
        while (start := _find(tokens, opened, at)) is not None:
            stop = next((i + 1 for i in range(start, start + 8) if tokens[i] == end), start + 8)
            mask[start:stop] = [True] * (stop - start)
            rewards[stop - 1] = (stop - start) * (turn + 2) / 100
            at, turn = stop, turn + 1
        assert turn == 3
        assert row["loss_mask"].tolist() == mask
        assert row["turn_rewards"].tolist() == pytest.approx(rewards)
        assert episode_reward(sample) == pytest.approx(sum(rewards))
        assert int(row["prompt_length"]) == mask.index(True)
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        chosen = row["loss_mask"][1:]
        torch.testing.assert_close(row["rollout_logprobs"][1:][chosen], expected[chosen], rtol=0, atol=1e-5)
        assert not row["rollout_logprobs"][1:][~chosen].any()
        assert (row["versions"] == torch.where(row["loss_mask"], 0, -1)).all()
        # What the tool said is in the log as the template writes it.
        results = re.findall(r"<\|im_start\|>tool\n(\d+)<\|im_end\|>", tokenizer.decode(tokens))
        assert len(results) == 2
        assert sample.messages[-1]["content"] == sample.response


def _find(tokens: list[int], part: list[int], since: int) -> int | None:
    """Where ``part`` ends for the first time."""
    found = (i for i in range(since, len(tokens) - len(part) + 1) if tokens[i : i + len(part)] == part)
    first = next(found, None)
    return None if first is None else first + len(part)


async def rewrites(episode):
    """A program that goes on with its history, edits it, takes turns back, summarises it, and asks side by side."""
    rng = episode.random
    histories = [[{"role": "user", "content": "start"}]]

    async def ask(history):
        turn = await episode.ask(history, max_new_tokens=5, trained=rng.random() < 0.9)
        answer = {"role": "assistant", "content": turn.text}
        episode.remember(turn, answer)
        return [*history, answer]

    for step in range(rng.randrange(2, 7)):
        history, more = rng.choice(histories), {"role": "user", "content": f"more {step}"}
        for answered in await asyncio.gather(*(ask(history) for _ in range(1 + (rng.random() < 0.2)))):
            histories.append([*answered, more])
        edit = rng.random()
        if edit < 0.15:
            histories.append([{"role": "user", "content": f"so far {step}"}, more])
        elif edit < 0.3:
            histories.append([*history, {"role": "assistant", "content": f"edited {step}"}, more])
        elif edit < 0.4:
            histories.append(history[:-2] or history)


@pytest.mark.parametrize("count", [8, pytest.param(2_500, marks=[pytest.mark.slow, pytest.mark.timeout(3_000)])])
def test_rows_of_rewritten_histories_are_what_one_forward_computes(directory, count):
    """Each sampled token stands behind exactly the tokens that it was sampled behind, with its log-prob there."""
    policy = module(directory, "rewrites", samples=4, tokens=400)
    played = [policy.generate(prompts(directory, size)) for size in [min(count, 100)] * (count // min(count, 100))]
    model = AutoModelForCausalLM.from_pretrained(directory)
    for out, stats in played:
        rows = out["branch"] == 0
        assert int(rows.sum()) == 4 * min(count, 100) and len(out) == round(stats["episode/rows"].sum)
        assert len(out) > 1.2 * int(rows.sum())
        with torch.no_grad():
            expected = logprobs(model, out)
        torch.testing.assert_close(out["rollout_logprobs"][out["loss_mask"]], expected, rtol=0, atol=1e-4)


async def chats(episode, *, turns: int = 3, delay: float = 0.0):
    for turn in range(turns):
        await episode.generate(max_new_tokens=7)
        await asyncio.sleep(delay * episode.random.random())
        episode.say({"role": "user", "content": f"{turn}, {episode.random.random()}"})


TOKEN_COLUMNS = ("tokens", "loss_mask", "rollout_logprobs", "versions", "turn_rewards", "turn_states")


def test_company_and_delays_change_nothing(directory):
    """Also with a cache that has to grow, and one that never holds all."""
    whole, _ = module(directory, "chats").generate(prompts(directory))
    for settings in ({"max_sequences": 2}, {"kv_tokens": 300}):
        out, _ = module(directory, "chats", delay=0.05, native=settings).generate(prompts(directory))
        assert all(torch.equal(out[name], whole[name]) for name in TOKEN_COLUMNS), settings
    parts = [module(directory, "chats").generate(part)[0] for part in prompts(directory).split(2, by="sequences")]
    joined = Batch.concat(parts)
    assert all(torch.equal(joined[name], whole[name]) for name in TOKEN_COLUMNS)
    assert joined["messages"] == whole["messages"]


def test_a_turn_prefills_what_the_policy_has_not_read(directory):
    """All that it did not choose, once, and the last token of each answer, which was never fed."""
    out, stats = module(directory, "chats").generate(prompts(directory))
    turns = stats["episode/turns"].sum
    assert turns == 3 * len(out)
    assert stats["episode/tokens_prefilled"].sum == int((~out["loss_mask"]).sum()) + turns - len(out)
    # While an episode waits, others take its place in the cache.
    _, poor = module(directory, "chats", delay=0.05, native={"max_sequences": 2}).generate(prompts(directory))
    sums = [sum(s[f"episode/tokens_{name}"].value for name in ("prefilled", "kept")) for s in (stats, poor)]
    assert sums[0] == sums[1]
    assert poor["episode/tokens_prefilled"].value > stats["episode/tokens_prefilled"].value


async def one_turn(episode):
    await episode.generate()


def test_an_episode_of_one_turn_is_a_response(directory):
    episodes, _ = module(directory, "one_turn").generate(prompts(directory))
    alone = module(directory, "coalign.environments:single_turn")
    plain = alone.generate(prompts(directory))
    assert alone.runner is None and isinstance(plain, Batch)
    for name in ("tokens", "loss_mask", "rollout_logprobs", "versions", "status", "prompt_length", "index"):
        assert torch.equal(episodes[name], plain[name]), name


async def crashes(episode, *, index: int = 1):
    await episode.generate(max_new_tokens=3)
    episode.count("points", episode.group)
    if episode.index == index:
        raise LookupError("no such thing")


def test_failures_are_counted_and_shown_once(directory, caplog):
    made = module(directory, "crashes")
    for time_ in range(2):
        caplog.clear()
        out, stats = made.generate(prompts(directory))
        assert out["status"].tolist() == [1, 2] * 3
        assert stats["episode/failed/LookupError"] == Total(3.0)
        assert stats["episode/points"].value == 1.0 and stats["episode/turns"].value == 1.0
        assert "in 3 of 6 calls; first on group 0: LookupError: no such thing" in caplog.text.replace("'", "")
        assert ("Traceback" in caplog.text) == (time_ == 0)


async def always_crashes(episode):
    raise LookupError("no such thing")


def test_nothing_but_failures_ends_the_run(directory):
    made = module(directory, "always_crashes")
    with pytest.raises(EpisodesFailed, match="6 of 6 calls") as raised:
        made.generate(prompts(directory))
    assert isinstance(raised.value.__cause__, LookupError)
    with pytest.raises(EpisodesFailed):  # and the engine is free again
        made.generate(prompts(directory))


async def lags(episode):
    await episode.generate(max_new_tokens=3)
    await asyncio.sleep(100 * episode.group)
    await episode.generate(max_new_tokens=3)


def test_enough_groups_end_the_call(directory):
    out, stats = module(directory, "lags").generate(prompts(directory), min_complete=1 / 3)
    assert out["status"].tolist()[2:] == [Status.PARTIAL] * 4
    assert Status.PARTIAL not in out["status"].tolist()[:2]
    assert stats["episode/turns"].count == 2


def test_samples_that_have_begun_are_refused(directory):
    made = module(directory, "one_turn")
    begun, _ = made.generate(prompts(directory), round_tokens=None)
    with pytest.raises(ValueError, match=r"'one_turn' cannot continue .* unset rollout\.round_tokens"):
        made.generate(begun)
    fresh, _ = made.generate(begin_samples(prompts(directory), 2))
    assert torch.equal(fresh["tokens"], begun["tokens"])


def test_both_sides_of_a_game_are_samples(directory):
    out, stats = module(directory, "self_play", samples=4, settings={"sticks": 6}).generate(prompts(directory))
    assert len(out) == 12 and stats["episode/illegal_moves"].count == 12
    rewards = [episode_reward(s) for s in read_samples(out, tiny_tokenizer())]
    assert set(rewards) <= {1.0, -1.0, 0.0}
