"""A teacher with another tokenizer than its student's: spans of text have its log-probs."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coalign import load_config
from coalign.backends.scorers.retokenize import _find_token_ends, align
from coalign.cluster.worker import find_module_class
from coalign.config.schema import ModelConfig
from coalign.data.templates import count_common_prefix
from coalign.launch.plan import prepare
from coalign.roles import Context
from coalign.types import Status
from tests.backends.test_retokenize import ASKED, LONGER, pieces, sampled, whole
from tests.runs import metrics, run, settings
from tests.tiny import tiny_model_dir, tiny_tokenizer

SAID = "it is three, I think 🙂"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = tiny_model_dir(tmp_path_factory.mktemp("teacher"), seed=3, initializer_range=0.3, max_position_embeddings=80)
    pieces(path)
    return path


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    path = tmp_path_factory.mktemp("student")
    tiny_tokenizer(path)
    return path


def open_module(teacher, student, **changes):
    config = ModelConfig(**{"load": str(teacher), "frozen": True, "chat_template": "auto"} | changes)
    module = find_module_class(config)(config, Context(model="teacher", tokenizer=str(student)))
    module.setup()
    return module


def drawn(*conversations, status=None):
    batch = sampled(*conversations, status=status)
    noise = -torch.rand(batch.tokens_total, generator=torch.Generator().manual_seed(0))
    return batch.with_(rollout_logprobs=noise * batch["loss_mask"])


def of_answer(teacher, messages):
    """Log-probs of the tokens of the answer and of its end, by transformers alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(teacher), AutoTokenizer.from_pretrained(teacher)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    before = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(text)["input_ids"]
    begin = count_common_prefix(tokenizer(before)["input_ids"], tokens)  # "[assistant]": the space is the answer's
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    every = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return tokens[begin:], every[begin - 1 :]


class TestAlign:
    STUDENT = tiny_tokenizer()  # a token a byte

    @pytest.fixture(scope="class")
    def other(self, teacher):
        return AutoTokenizer.from_pretrained(teacher)

    def texts(self, tokenizer, text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def test_spans_worked_by_hand(self, other):
        mine = self.texts(self.STUDENT, "it is<|im_end|>")
        theirs = self.texts(other, "it is</s>")
        assert [other.decode([t]) for t in theirs] == ["it", " is", "</s>"]
        assert align(self.STUDENT, mine, other, theirs) == [([0, 1], [0]), ([2, 3, 4], [1]), ([5], [2])]
        # Cut before its end: the teacher's end says nothing of it.
        assert align(self.STUDENT, mine[:-1], other, theirs) == [([0, 1], [0]), ([2, 3, 4], [1])]
        assert align(self.STUDENT, mine[-1:], other, theirs[-1:]) == [([0], [0])]

    def test_several_tokens_of_one_character_are_one_span(self, other):
        mine, theirs = self.texts(self.STUDENT, "é🙂a"), self.texts(other, "é🙂a")
        assert _find_token_ends(self.STUDENT, mine) == [1, 1, 2, 2, 2, 2, 3]
        assert [len(a) for a, _ in align(self.STUDENT, mine, other, theirs)] == [2, 4, 1]
        assert _find_token_ends(self.STUDENT, mine[:4])[-1] == 2  # cut within a character: the text ends in its sign

    def test_white_space_that_a_template_trims_belongs_to_its_neighbour(self, other):
        mine, theirs = self.texts(self.STUDENT, " it is  "), self.texts(other, "it is")
        assert align(self.STUDENT, mine, other, theirs) == [([0, 1, 2], [0]), ([3, 4, 5, 6, 7], [1])]
        assert align(self.STUDENT, mine, other, self.texts(other, "it was")) == []

    def test_every_token_is_in_one_span(self, other):
        for text in (SAID, "I think it is  three\n\n", "what what", "�"):
            mine, theirs = self.texts(self.STUDENT, text), self.texts(other, text)
            spans = align(self.STUDENT, mine, other, theirs)
            assert [i for a, _ in spans for i in a] == [*range(len(mine))]
            assert [i for _, b in spans for i in b] == [*range(len(theirs))]
            for a, b in spans:
                assert self.STUDENT.decode([mine[i] for i in a]) == other.decode([theirs[i] for i in b])


def test_the_sum_over_a_span_is_the_teachers(teacher, student):
    batch = drawn((ASKED, SAID), (LONGER, "four"))
    out = open_module(teacher, student).forward_step(batch)
    column, own = out["ref_logprobs"].double(), batch["rollout_logprobs"].double()
    for row, messages in enumerate([whole(ASKED, SAID), whole(LONGER, "four")]):
        places = ((batch.segment == row) & batch["loss_mask"]).nonzero().flatten()
        tokens, logprobs = of_answer(teacher, messages)
        assert column[places].sum().item() == pytest.approx(logprobs.sum().item(), abs=1e-4)
        tokenizer = AutoTokenizer.from_pretrained(teacher)
        spans = align(tiny_tokenizer(), batch["tokens"][places].tolist(), tokenizer, tokens)
        assert len(spans) > 3
        for mine, theirs in spans:
            here = places[mine]
            assert column[here].sum().item() == pytest.approx(logprobs[theirs].sum().item(), abs=1e-4)
            credit = column[here] - own[here]
            torch.testing.assert_close(credit, credit[:1].expand_as(credit), atol=1e-5, rtol=0)
    assert not column[~batch["loss_mask"]].any()
    assert out["teacher/unaligned"].value == 0.0 and out["teacher/span"].value > 1


def test_with_one_tokenizer_it_is_the_plain_scorer(tmp_path):
    path = tiny_model_dir(tmp_path / "model", initializer_range=0.3)
    batch = drawn((ASKED, "it is three"), (ASKED, "six"))  # a character a token
    reads = open_module(path, path).forward_step(batch)["ref_logprobs"]
    plain = open_module(path, path, chat_template=None).forward_step(batch)["ref_logprobs"]
    torch.testing.assert_close(reads, plain, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_compared_teaches_nothing_and_is_counted(teacher, student, caplog):
    refused = [{"role": "system", "content": "-"}, *ASKED]
    batch = drawn((refused, "no"), (ASKED, "three"), (ASKED, "very " * 20), status=[0, int(Status.TRUNCATED), 0])
    out = open_module(teacher, student).forward_step(batch)
    same = out["ref_logprobs"] == batch["rollout_logprobs"]
    learned = [bool((~same[(batch.segment == row) & batch["loss_mask"]]).any()) for row in range(3)]
    assert learned == [False, True, False]
    tokens = [int(((batch.segment == row) & batch["loss_mask"]).sum()) for row in range(3)]
    assert out["teacher/unaligned"].sum == tokens[0] + 1 + tokens[2]  # a truncated response has no end to compare
    assert out["teacher/cut"].value == 1.0
    assert "cannot read 1 of 3 samples" in caplog.text


def test_bad_settings_are_named(teacher, student, tmp_path):
    with pytest.raises(ValueError, match=r"models\.teacher reads text: it needs the column `rollout_logprobs`"):
        open_module(teacher, student).forward_step(sampled((ASKED, "three")))
    with pytest.raises(ValueError, match=r"models\.teacher\.cache: not for a model that reads text"):
        open_module(teacher, student, cache=str(tmp_path))
    config = settings(tmp_path, "on_policy_distillation")
    config["models"]["teacher"] = {"load": str(teacher)}
    with pytest.raises(ValueError, match=r"models\.teacher\.load: its tokenizer is another .*chat_template is set"):
        prepare(load_config(config))
    config["models"]["teacher"]["chat_template"] = "auto"
    prepare(load_config(config))
    with pytest.raises(ValueError, match=r"loss\.fn: `distillation` compares distributions over one vocabulary"):
        prepare(load_config(config | {"loss": {"fn": "distillation"}}))
    config = settings(tmp_path, "distill")
    config["models"]["teacher"] |= {"load": str(teacher), "chat_template": "auto"}
    with pytest.raises(ValueError, match=r"models\.teacher\.chat_template: `distill` compares distributions"):
        prepare(load_config(config))


def test_a_student_comes_closer_to_a_teacher_of_another_tokenizer(teacher, tmp_path):
    config = settings(tmp_path, "on_policy_distillation", steps=16, eval_every=16)
    config.pop("reward")
    config["models"]["teacher"] = {"load": str(teacher), "chat_template": "auto"}
    config["models"]["trainer"]["optimizer"] = {"lr": 1e-2}
    run(config)
    lines = metrics(config)
    assert lines[-1]["eval/teacher_kl"] < 0.85 * lines[0]["eval/teacher_kl"]
    assert all(0 <= line["teacher/unaligned"] < 0.5 for line in lines if "teacher/unaligned" in line)
