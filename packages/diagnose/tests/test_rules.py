"""Every rule names its own examples first, and is silent about texts that only look like it."""

import re
from pathlib import Path

import pytest

from coalign_diagnose.logs import LogFile
from coalign_diagnose.rules import SECONDARY, build_filter, load_rules, read_rule
from packages.diagnose.tests.samples import BEFORE, EXAMPLES, judge_text, name_cause, spell_out

NAMED = [rule.id for rule in load_rules() if rule.order < SECONDARY]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "diagnosis.md"


def test_every_rule_that_names_a_cause_has_examples_of_both_kinds():
    assert set(EXAMPLES) == set(NAMED)
    assert all(each["positive"] and each["negative"] for each in EXAMPLES.values())
    assert len(NAMED) >= 90


@pytest.mark.parametrize("name", NAMED)
def test_a_rule_names_its_examples_and_no_others(name):
    for text in EXAMPLES[name]["positive"]:
        verdict = judge_text(BEFORE + spell_out(text) + "\n")
        assert name_cause(verdict) == name, text
        assert verdict.cause and verdict.evidence[0][0].startswith("run.log:")
    for text in EXAMPLES[name]["negative"]:
        assert name_cause(judge_text(BEFORE + spell_out(text) + "\n")) is None, text


def test_the_filter_lets_through_whatever_a_pattern_matches():
    """The words that are derived from a pattern are in each of its matches, so the filter loses nothing."""
    for rule in load_rules():
        for text in EXAMPLES.get(rule.id, {"positive": []})["positive"]:
            for line in spell_out(text).splitlines():
                for pattern in rule.patterns:
                    if pattern.expression.search(line):
                        assert any(word in line.lower() for word in pattern.words), (rule.id, line)
                        assert list(LogFile("x", line.encode()).find(build_filter(), ignore_case=True)), (rule.id, line)


def test_a_wrong_rule_is_refused():
    raw = {"id": "x", "category": "y", "title": "z", "any": ["some text"]}
    raw |= {"order": 20, "sure": "certain", "advice": "a"}
    assert read_rule(raw).patterns[0].words == {"some text"}
    for change, message in (
        ({"sure": "x"}, "x: sure: is 'x'; expected certain"),
        ({"anny": []}, "no such key: anny"),
        ({"advice": None}, "missing: advice"),
        ({"any": [r"\d+"]}, "no literal text"),
    ):
        with pytest.raises(ValueError, match=message):
            read_rule({key: value for key, value in (raw | change).items() if value is not None})


def test_the_page_lists_every_cause():
    listed = re.findall(r"^\| `([\w-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(NAMED)
