"""A reward model's score is read at the same token by training, `coalign score`, servers and RL."""

import json

import pytest

from coalign import load_config
from coalign.backends.scorers.retokenize import ConversationReader
from coalign.config import ConfigError
from coalign.config.schema import DataConfig, ModelConfig, SourceConfig
from coalign.data.batch import Batch
from coalign.data.loader import build_loader
from coalign.launch.plan import plan_reward_models, prepare
from coalign.report.display import Display
from coalign.types import Status
from coalign_serve.config.stages import ScoreConfig
from coalign_serve.judges import RewardModelJudge
from coalign_serve.score import score
from coalign_serve.serving.reward_server import read_request
from tests.backends.test_retokenize import open_module, sampled
from tests.backends.test_retokenize import score as plain_score
from tests.data.families import DIALOGUE, TOOL, family_tokenizer, user
from tests.runs import metrics, run, settings
from tests.tiny import tiny_reward_model_dir, tiny_tokenizer

TEMPLATES = ["Qwen2.5", "Qwen3", "Qwen3.8", "Phi-4", "GLM-4.5", "Phi-3.5"]
ASKED = [user("what is 1+2?")]
PAIRS = [("it is three", "4"), ("3", "I think"), ("three\n", "?")]


def reward_model(path, family, **score_at):
    """A random reward model with the tokenizer and the template of a family."""
    tokenizer = family_tokenizer(family)
    tiny_reward_model_dir(path, vocab=len(tokenizer), seed=3, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(path)
    if score_at:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | score_at))
    return path


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return reward_model(tmp_path_factory.mktemp("judge"), "Qwen2.5")


def rows(path, pairs=PAIRS):
    file = path / "pairs.jsonl"
    lines = [{"prompt": ASKED, "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def trained_tokens(tokenizer, file):
    """The sequences that training reads, prompt by prompt: chosen, rejected."""
    data = DataConfig(train=[SourceConfig(path=str(file))], shuffle=False)
    loader = build_loader(data, tokenizer, kind="preferences", split="train", batch_size=len(PAIRS), seed=0)
    return [row["tokens"].tolist() for row in loader.next().rows()]


@pytest.mark.parametrize("family", TEMPLATES)
def test_training_score_and_rl_read_the_same_token(tmp_path, family):
    model, file = reward_model(tmp_path / "model", family), rows(tmp_path)
    said = [response for pair in PAIRS for response in pair]
    expected = [plain_score(model, tokens) for tokens in trained_tokens(family_tokenizer(family), file)]
    assert max(expected) - min(expected) > 0.01
    score(
        ScoreConfig(data=DataConfig(train=[SourceConfig(path=str(file))]), reward_model=str(model)),
        tmp_path / "scored.jsonl",
        Display(quiet=True),
    )
    records = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_bytes().splitlines()]
    scored = [record[f"{name}_score"] for record in records for name in ("chosen", "rejected")]
    assert scored == pytest.approx(expected, abs=1e-5)
    tiny_tokenizer(tmp_path / "policy")
    in_rl = open_module(model, tmp_path / "policy").forward_step(sampled(*((ASKED, text) for text in said)))
    assert in_rl["reward"].tolist() == pytest.approx(expected, abs=1e-5)


def test_eval_and_score_agree_on_a_trained_model(tmp_path):
    config = settings(tmp_path, "reward_model", steps=2)
    config["data"] |= {"chat_template": "auto"}
    assert run(config) == 0
    model = tmp_path / "run" / "model"
    assert json.loads((model / "config.json").read_text())["score_at"] == "last_trained"
    counts = score(
        ScoreConfig(data=DataConfig(train=[SourceConfig(path=config["data"]["eval"])]), reward_model=str(model)),
        tmp_path / "scored.jsonl",
        Display(quiet=True),
    )
    assert counts["pair_accuracy"] == metrics(config)[-1]["eval/loss/accuracy"]


def test_the_end_of_the_text_is_read_where_a_model_says_so(tmp_path, judge):
    other = reward_model(tmp_path / "other", "Qwen2.5", score_at="end_of_text")
    answer = [*ASKED, {"role": "assistant", "content": "3"}]
    text = family_tokenizer("Qwen2.5").apply_chat_template(answer, tokenize=False)
    assert text.endswith("<|im_end|>\n")

    def last(model, **settings):
        reader = ConversationReader(ModelConfig(load=str(model), head="reward", frozen=True, **settings))
        tokens, rendered = reader.read(answer).tokens, reader.read_rendered(text).tokens
        assert tokens == rendered
        return reader.tokenizer.decode(tokens[-1:])

    assert last(judge) == "<|im_end|>" and last(other) == "\n"
    assert last(judge, score_at="end_of_text") == "\n" and last(other, score_at="last_trained") == "<|im_end|>"
    wrong = reward_model(tmp_path / "wrong", "Qwen2.5", score_at="somewhere")
    with pytest.raises(ValueError, match=r"config\.json: score_at: 'somewhere' is none of last_trained, end_of_text"):
        last(wrong)


def test_a_model_that_is_read_behind_the_last_turn_reads_text_in_rl(tmp_path, judge):
    def template(**reward):
        config = settings(tmp_path, "grpo") | {"reward": [{"model": "reward"}]}
        config["models"] |= {"reward": {"load": str(tmp_path / "model"), "head": "reward", "module": "fsdp"} | reward}
        loaded = load_config(config)
        return plan_reward_models(loaded.reward, loaded)["reward"].chat_template

    assert template() is None and template(score_at="last_trained") is None
    assert template(score_at="end_of_text") == "auto"


def test_only_reward_models_are_read_at_a_token(tmp_path):
    config = settings(tmp_path, "sft")
    config["models"]["trainer"] |= {"score_at": "end_of_text"}
    with pytest.raises((ValueError, ConfigError), match=r"models\.trainer\.score_at"):
        prepare(load_config(config))


def test_a_truncated_response_has_no_end_of_turn(judge, tmp_path):
    reader = ConversationReader(ModelConfig(load=str(judge), head="reward", frozen=True))
    for text in ("it is thr", ""):
        whole = [*ASKED, {"role": "assistant", "content": text}]
        ended, cut = reader.read(whole), reader.read(whole, truncated=True)
        assert reader.tokenizer.decode(ended.tokens).endswith(f"assistant\n{text}<|im_end|>")
        assert reader.tokenizer.decode(cut.tokens).endswith(f"assistant\n{text}")
        assert cut.prompt_length == ended.prompt_length
    tiny_tokenizer(tmp_path)
    batch = sampled((ASKED, "it is thr"), (ASKED, "it is thr"), status=[Status.OK, Status.TRUNCATED])
    scores = open_module(judge, tmp_path).forward_step(batch)["reward"].tolist()
    answer = [*ASKED, {"role": "assistant", "content": "it is thr"}]
    expected = [plain_score(judge, reader.read(answer, truncated=cut).tokens) for cut in (False, True)]
    assert scores == pytest.approx(expected, abs=1e-5) and scores[0] != scores[1]


def test_the_tools_of_a_row_are_in_what_a_reward_model_reads(judge, tmp_path):
    tiny_tokenizer(tmp_path)
    batch = sampled((ASKED, "3"), (ASKED, "3"))
    rows = [{"messages": ASKED}, {"messages": ASKED, "tools": [TOOL]}]
    batch = Batch(batch.lengths, batch.token, batch.sequence | {"rows": rows})
    scores = open_module(judge, tmp_path).forward_step(batch)["reward"].tolist()
    reader = ConversationReader(ModelConfig(load=str(judge), head="reward", frozen=True))
    answer = [*ASKED, {"role": "assistant", "content": "3"}]
    assert scores == pytest.approx(
        [plain_score(judge, reader.read(answer, tools).tokens) for tools in (None, [TOOL])], abs=1e-5
    )
    assert scores[0] != scores[1]


def test_a_request_says_whether_it_was_truncated_and_which_tools_it_had():
    body = {"query": ["a", "b"], "messages": [DIALOGUE, DIALOGUE], "tools": [None, [TOOL]], "truncated": [False, True]}
    answers = read_request(json.dumps(body).encode(), "answer")
    assert [(answer.tools, answer.truncated) for answer in answers] == [(None, False), ([TOOL], True)]


def test_judge_and_reader_agree_on_rendered_text(judge):
    """What OpenRLHF sends as a query, with and without what the template writes behind the last turn."""
    opened = RewardModelJudge(ScoreConfig(reward_model=str(judge), data=DataConfig(train=[SourceConfig(path="x")])))
    text = family_tokenizer("Qwen2.5").apply_chat_template(
        [*ASKED, {"role": "assistant", "content": "3"}], tokenize=False
    )
    bodies = [{"query": [text]}, {"query": [text.rstrip("\n")]}, {"query": [text.removesuffix("<|im_end|>\n")]}]
    answers = [read_request(json.dumps(body).encode(), "answer")[0] for body in bodies]
    ended, stripped, cut = (verdict.score for verdict in opened(answers))
    opened.close()
    assert ended == pytest.approx(stripped, abs=1e-6) and ended != pytest.approx(cut, abs=1e-3)
