"""What programs do to the history of an episode, and the rows that follow."""

from __future__ import annotations

import asyncio
import random
from itertools import count

import pytest

from coalign.data.templates import load_template
from coalign.environments.rendering import Rendering
from coalign.types import Status
from tests.environments.helpers import END, TOKENIZER, TOOLS_CHATML, Script, encode, episode, played
from tests.tiny import tiny_tokenizer

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
ASKED = [{"role": "user", "content": "a"}]


def user(text):
    return {"role": "user", "content": text}


def said(text, *calls):
    message = {"role": "assistant", "content": text}
    return message | ({"tool_calls": [call(*one) for one in calls]} if calls else {})


def call(id, arguments):
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}


async def ask(one, messages, tools=None, answer=None, **options):
    """As a server does: the next request finds the turn by the message that it was answered with."""
    turn = await one.ask(messages, tools, **options)
    message = said(turn.text) if answer is None else answer
    one.remember(turn, message)
    return message


def check(one, rows):
    """Each sampled token is trained once, in the row where it was sampled; returns the rows."""
    assert len(one.rows) == rows == one.counts["rows"]
    trained = [
        (token, logprob)
        for row in one.rows
        for token, own, logprob in zip(row.tokens, row.loss_mask, row.rollout_logprobs, strict=True)
        if own
    ]
    turns = [turn for turn in one.tree.turns if turn.trained]
    assert sorted(trained) == sorted(pair for t in turns for pair in zip(t.tokens, t.logprobs, strict=True))
    paths = [turn.path_tokens for turn in turns]
    for row in one.rows:
        assert row.tokens in paths and not any(row.loss_mask[: row.prompt_length])
        assert len({len(getattr(row, name)) for name in ("tokens", "loss_mask", "versions", "turn_states")}) == 1
    return one.rows


def play(program, *says, **settings):
    one = episode(*says, **settings)
    played(program, one)
    return one


def test_a_conversation_that_grows_is_one_row():
    async def program(one):
        messages = [*ASKED]
        for i in range(5):
            messages += [await ask(one, messages), user(f"more {i}")]

    one = play(program, *"vwxyz")
    [row] = check(one, 1)
    assert row.tokens == one.tree.turns[-1].path_tokens
    assert {asked["stream"] for asked in one._policy.asked} == {0}


def test_an_answer_that_no_tokenizer_would_write_survives_ten_turns():
    """TRL 5242, NeMo 1337: answers were decoded and tokenised again (`HAV` + `ING` became `HAVING`)."""
    tokenizer = tiny_tokenizer(chat_template=TOOLS_CHATML, merges=(("a", "b"),))
    split = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert len(tokenizer("ab")["input_ids"]) == 1
    one = episode(policy=Script([split] * 10))
    one.rendering = Rendering(load_template(tokenizer, TOOLS_CHATML))

    async def converse(one):
        history = [user("start")]
        for _ in range(10):
            history += [await ask(one, history), user("ab")]

    [row] = played(converse, one).rows
    assert [token for token, trained in zip(row.tokens, row.loss_mask, strict=True) if trained] == split * 10


def test_what_clients_change_in_an_answer_is_no_difference():
    async def program(one):
        await ask(one, ASKED, answer=said("I call.", ("x", '{"a": 1, "b": [2]}')))
        changed = said([{"type": "text", "text": " I call. "}], ("other", '{"b":[2],"a":1}')) | {"refusal": None}
        await ask(one, [*ASKED, changed, {"role": "tool", "tool_call_id": "other", "content": "3"}])

    check(play(program, "I call.", "3"), 1)


def test_compaction_sub_agents_and_other_tools_are_rows_of_their_own():
    async def program(one):
        messages = [*ASKED]
        messages += [await ask(one, messages), user("b")]
        messages += [await ask(one, messages), user("c")]
        summary = await ask(one, [user("summarise: a b c")], label="summary")
        await ask(one, [user("so far: " + summary["content"]), user("c")])
        await ask(one, messages, tools=[FUNCTION])

    one = play(program, *"vwxyz")
    rows = check(one, 4)
    assert [turn.label for turn in one.tree.turns] == ["", "", "summary", "", ""]
    assert sum("so far: x" in TOKENIZER.decode(row.tokens) for row in rows) == 1


def test_branches_share_what_came_before_and_train_it_once():
    async def program(one):
        messages = [*ASKED]
        messages += [await ask(one, messages), user("b")]
        for _ in range(3):
            await ask(one, messages)

    one = play(program, *"wxyz")
    rows = check(one, 3)
    assert [sum(row.loss_mask) for row in rows] == [4, 2, 2]
    assert len({asked["stream"] for asked in one._policy.asked}) == 3  # siblings draw other random numbers


def test_siblings_that_are_asked_at_once_draw_other_numbers():
    async def program(one):
        await asyncio.gather(*(ask(one, ASKED) for _ in range(3)))

    one = play(program, policy=Script("xyz", delay=0.01))
    assert len({asked["stream"] for asked in one._policy.asked}) == 3
    check(one, 3)


def test_turns_that_do_not_train_cost_no_row():
    async def program(one):
        messages = [*ASKED]
        messages += [await ask(one, messages), user("b")]
        await ask(one, messages, trained=False)  # nobody read it
        await ask(one, messages)
        await ask(one, [user("title?")], trained=False)  # another purpose

    [row] = check(play(program, *"wxyz"), 1)
    assert sum(row.loss_mask) == 4


def test_the_same_answer_twice_is_told_apart_by_ids():
    async def program(one):
        first = await ask(one, ASKED, answer=said("same", ("call00100", "{}")))
        await ask(one, ASKED, answer=said("same", ("call00200", "{}")))
        await ask(one, [*ASKED, first, {"role": "tool", "tool_call_id": "call00100", "content": "x"}])

    one = play(program, "same", "same", "z")
    check(one, 2)
    assert one.tree.turns[2].parent is one.tree.turns[0]


def test_an_answer_of_somebody_else_is_context():
    async def program(one):
        await ask(one, [user("a"), said("an example"), user("b")])

    [row] = check(play(program, "z"), 1)
    assert "an example" in TOKENIZER.decode(row.tokens) and sum(row.loss_mask) == 2


def test_a_cut_answer_may_go_on():
    async def program(one):
        first = await ask(one, ASKED, max_new_tokens=3)
        await ask(one, [*ASKED, first, user("Go on")])

    one = play(program, "a long answer", "rest")
    [row] = check(one, 1)
    assert one.tree.turns[0].status == Status.TRUNCATED
    assert "a l<|im_end|>\n<|im_start|>user\nGo on" in TOKENIZER.decode(row.tokens)


def test_a_second_conversation_is_a_row_with_a_label():
    async def program(one):
        turn = await one.generate()
        critic = one.conversation([user(f"Judge: {turn.text}")], label="critic")
        await critic.generate()
        critic.reward(0.5)
        one.say(user("Sure?"))
        await one.generate()
        one.reward(1.0)

    one = play(program, "five", "good", "yes")
    rows = check(one, 2)
    assert [sum(row.turn_rewards) for row in rows] == [1.0, 0.5]  # the main conversation stands first
    assert [turn.label for turn in one.tree.turns] == ["", "critic", ""]
    assert rows[1].tokens[-len(encode("good")) - 1 :] == [*encode("good"), END]


def test_all_conversations_share_the_tokens_of_the_episode():
    async def program(one):
        await one.generate(max_new_tokens=7)
        assert len((await one.conversation([user("b")]).generate()).tokens) == 1
        assert not (await one.generate()).tokens

    one = play(program, "123456", "9", max_new_tokens=8)
    check(one, 2)
    assert one.status == Status.TRUNCATED


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_episode_ended_as_its_main_conversation(is_cut):
    async def program(one):
        first = await ask(one, ASKED, **({"max_new_tokens": 1} if is_cut else {}))
        await ask(one, [user("critic")], **({} if is_cut else {"max_new_tokens": 1}))
        assert first

    assert play(program, "yes", "good").status == (Status.TRUNCATED if is_cut else Status.OK)


def test_a_conversation_without_room_does_not_end_the_others():
    async def program(one):
        first = await ask(one, ASKED)
        assert not (await one.ask([user("b " * 200)])).tokens
        await ask(one, [*ASKED, first, user("c")])
        assert not (await one.ask([user("d " * 200)])).tokens
        await one.ask(ASKED)

    one = episode("x", "y", policy=Script(["x", "y"], capacity=120))
    running = played(program, one)
    check(running, 1)
    assert [turn.text for turn in one.tree.turns] == ["x", "y"] and one.counts["out_of_room"] == 2


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_train_each_token_once_where_it_was_sampled(seed):
    rng, words = random.Random(seed), count()

    async def program(one):
        histories = [[user("start")]]
        for _ in range(rng.randrange(2, 14)):
            messages = rng.choice(histories)
            tools = [FUNCTION] if rng.random() < 0.15 else None
            answer = await ask(one, messages, tools, trained=rng.random() < 0.9)
            extended = [*messages, answer, user(f"more {next(words)}")]
            edit = rng.random()
            if edit < 0.15:  # compaction
                histories.append([user(f"so far {next(words)}"), *extended[-1:]])
            elif edit < 0.25:  # an edited answer
                histories.append([*messages, said(f"edited {next(words)}"), extended[-1]])
            elif edit < 0.35:  # the last turn is taken back
                histories.append(messages[:-2] or messages)
            histories.append(extended)

    one = play(program, *(f"answer {i % 4}" for i in range(14)))
    leaves = {id(t) for t in one.tree.turns if t.trained}
    leaves -= {id(earlier) for t in one.tree.turns if t.trained for earlier in t.path[:-1]}
    check(one, max(1, len(leaves))) if leaves else None
