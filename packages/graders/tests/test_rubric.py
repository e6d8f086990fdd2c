"""The question `rubric`, worked by hand: what is asked, how answers are read, and what they are worth."""

import pytest
import torch

from coalign.data.sources import BadRow
from coalign.types import Sample
from coalign_graders.services.rubric import Rubric

NONE = torch.zeros(0)
RUBRIC = ["Says 7.", {"criterion": "Is short.", "weight": 2}, {"criterion": "Is rude.", "weight": -1.5}]
WEIGHED = [{"criterion": "Good", "weight": 1}, {"criterion": "Bad", "weight": -3}]


def sample(response="7", messages=None, prompt=None, **row):
    texts = {"prompt": "3+4=", "response": response, "messages": messages or []}
    row = {"prompt": "3+4="} | row | ({"messages": prompt} if prompt else {})
    return Sample(group=0, index=0, tokens=NONE, loss_mask=NONE, logprobs=NONE, **texts, meta=row)


@pytest.mark.parametrize(
    ("answer", "verdicts"),
    [
        ("1: yes\n2: no\n3: no", [1.0, 0.0, 0.0]),
        ("**1.** Yes, it does.\n2) NO\n - 3 - yes", [1.0, 0.0, 1.0]),
        ("1: no\n2: yes\n3: no\nOn second thoughts:\n1: yes", [1.0, 1.0, 0.0]),
        ("1: yes\n2: no", None),  # a criterion is missing
        ("1: yes\n2: maybe\n3: no", None),
        ("1: yes\n2: no\n3: no\n4: yes", None),  # of another list
        ("yes, no, no", None),
        ("", None),
    ],
)
def test_an_answer_has_a_verdict_for_each_number_or_none_at_all(answer, verdicts):
    assert Rubric().verdict(answer, [sample(rubric=RUBRIC)]) == verdicts


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        *(("Yes.", 1.0), ("no", 0.0), ("It says 7. Answer: **yes**", 1.0), ("No, it says 8", 0.0)),
        *(("Perhaps", None), ("", None), ("It may be, yes or no? I cannot say", None)),
    ],
)
def test_the_answer_about_one_criterion_is_its_last_word_or_its_first(answer, verdict):
    assert Rubric(judged="alone").verdict(answer, [sample(rubric=RUBRIC)]) == verdict


@pytest.mark.parametrize(
    ("rubric", "met", "reward"),
    [
        (RUBRIC, [1.0, 1.0, 0.0], 1.0),
        (RUBRIC, [1.0, 0.0, 0.0], 1 / 3),
        (RUBRIC, [0.0, 1.0, 1.0], 0.5 / 3),
        (RUBRIC, [0.0, 0.0, 1.0], 0.0),  # -1.5 / 3
        (RUBRIC, [0.5, 0.25, 0.2], 0.7 / 3),  # probabilities
        (WEIGHED, [1.0, 1.0], 0.0),  # -2
        (["a", "b"], [1.0, 0.0], 0.5),
    ],
)
@pytest.mark.parametrize("judged", ["together", "alone"])
def test_the_reward_is_the_weight_met_over_the_weight_to_be_had(rubric, met, reward, judged):
    group = [sample(rubric=rubric), sample(rubric=rubric)]
    verdicts = [met, None] if judged == "together" else [*met, *met[:-1], None]
    scored, without = Rubric(judged=judged).rewards(group, verdicts)
    expected = {f"criterion_{number}": verdict for number, verdict in enumerate(met, 1)}
    assert scored == pytest.approx({"reward": reward} | expected) and without is None


def test_what_is_asked():
    group = [sample("7", rubric=RUBRIC), sample("Seven", rubric=RUBRIC)]
    fields = "{prompt}|{response}|{yes}/{no}|"
    first, second = Rubric(template=fields + "{criteria}", labels=("met", "missed")).ask(group)
    assert first == [{"role": "user", "content": "3+4=|7|met/missed|1. Says 7.\n2. Is short.\n3. Is rude."}]
    assert "|Seven|" in second[0]["content"]
    asked = Rubric(template=fields + "{criterion}", judged="alone", criteria=["Says 7.", "Is short."]).ask(group)
    texts = [
        text for response in ("7", "Seven") for text in (f"{response}|yes/no|Says 7.", f"{response}|yes/no|Is short.")
    ]
    assert [question[0]["content"] for question in asked] == [f"3+4=|{text}" for text in texts]
    (question,) = Rubric().ask(group[:1])
    assert all(text in question[0]["content"] for text in ("3+4=", "\n7\n", "2. Is short.", "yes if", "no if"))


def test_the_main_conversation_of_an_episode_is_judged_with_calls_and_results_of_tools():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4="}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
    turns = [
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "Seven"},
    ]
    shown = 'assistant: I add.\n[calls add {"a": 3, "b": 4}]\n\ntool: 7\n\nassistant: Seven'
    rubric = Rubric(template="{response}", criteria=["Adds."])
    (question,) = rubric.ask([sample("Seven", prompt + turns, prompt)])
    assert question[0]["content"] == shown
    others = [{"role": "user", "content": "Begin."}, *turns]  # the environment began with its own messages
    (question,) = rubric.ask([sample("Seven", others, prompt)])
    assert question[0]["content"] == f"user: Begin.\n\n{shown}"
    short = Rubric(template="{response}", criteria=["Adds."], max_characters=16)
    group = [sample("Seven", prompt + turns, prompt), sample("7", [*prompt, turns[-1]], prompt)]
    cut = len(shown) - 16
    assert short.ask(group)[0][0]["content"] == f"[the first {cut} characters are left out]\nassistant: Seven"
    assert short.ask(group)[1][0]["content"] == "7"
    first, second = short.rewards(group, [[1.0], [0.0]])
    assert first == {"reward": 1.0, "criterion_1": 1.0, "cut_characters": cut}
    assert second == {"reward": 0.0, "criterion_1": 0.0}


@pytest.mark.parametrize(
    ("rubric", "message"),
    [
        (None, r"the row has no rubric under 'rubric' \(judge.key\); it has prompt, rubric"),
        ([], r"rubric is \[\]; a rubric is a list of texts"),
        ("Says 7.", "rubric is 'Says 7.'; a rubric is a list of texts"),
        ([3], r"rubric\[0\] is 3; a criterion is a text"),
        (["a", " "], r"rubric\[1\]: the criterion is ' ', no text"),
        ([{"weight": 2}], r"rubric\[0\]: the criterion is None, no text"),
        ([{"criterion": 7}], r"rubric\[0\]: the criterion is 7, no text"),
        ([{"criterion": "a", "points": 2}], r"rubric\[0\] has the key 'points'; a criterion has"),
        ([{"criterion": "a", "weight": "2"}], r"rubric\[0\]: the weight is '2', no finite number"),
        ([{"criterion": "a", "weight": float("nan")}], r"rubric\[0\]: the weight is nan"),
        ([{"criterion": "a", "weight": True}], r"rubric\[0\]: the weight is True"),
        ([{"criterion": "a", "weight": -1}, {"criterion": "b", "weight": 0}], "rubric has no weight above 0"),
    ],
)
def test_rows_that_it_refuses(rubric, message):
    row = {"prompt": "3+4=", "rubric": rubric}
    with pytest.raises(BadRow, match=message):
        Rubric().check_row(row)
    with pytest.raises(BadRow, match=message):
        Rubric(judged="alone").ask([sample(rubric=rubric)])
    if rubric is not None:
        with pytest.raises(ValueError, match=rf"judge\.criteria.*{message.removeprefix('rubric')}"):
            Rubric(criteria=rubric)
    Rubric(criteria=["a"]).check_row(row)  # rows are not asked


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "{criterion}"}, r"has the field \{criterion\}; there are criteria, no, prompt"),
        ({"template": "{criteria}", "judged": "alone"}, r"has the field \{criteria\}"),
        ({"labels": ("yes", "Yes")}, "judge.labels are 'yes', 'Yes': two different words"),
        ({"labels": ("not met", "met")}, "two different words"),
    ],
)
def test_settings_that_it_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        Rubric(**settings)
