"""`coalign extend-vocab` from end to end: what comes out runs, and computes for old texts what it did."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.hf.fsdp import FSDPModule
from coalign.cli import app
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from coalign_megatron.vocab import extend
from packages.megatron.tests.vocab import made
from tests.tiny import tiny_model_dir

OLD_TEXT = "the total of 12 apples"
NEW_TEXT = "a <|tool|> in the zoo"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("list") / "tokens.txt"
    path.write_text("<|tool|>\n zoo\n")
    return path


@pytest.fixture(scope="module", params=[("llama", False, 340), ("llama", True, 333), ("phi", False, 333)], ids=str)
def pair(request, tokens, tmp_path_factory):
    """A model and what became of it: with spare rows or without, tied or not, with a bias in the head."""
    family, tied, vocab = request.param
    path = tmp_path_factory.mktemp("pair")
    old = made.byte_level_model(path / "old", vocab=vocab, family=family, tied=tied)
    return old, path / "new", extend(old, tokens, path / "new")


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)


@torch.no_grad()
def test_old_texts_have_the_logits_and_losses_that_they_had(pair):
    (old, old_tokenizer), (new, new_tokenizer) = load(pair[0]), load(pair[1])
    ids = old_tokenizer(OLD_TEXT, return_tensors="pt")["input_ids"]
    assert torch.equal(ids, new_tokenizer(OLD_TEXT, return_tensors="pt")["input_ids"])
    assert torch.equal(old.base_model(ids).last_hidden_state, new.base_model(ids).last_hidden_state)
    before, after = old(ids).logits[0, :, :333], new(ids).logits[0, :, :333]
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)  # a matrix of another shape: another order of sums
    among_old = [torch.nn.functional.cross_entropy(x[:-1], ids[0, 1:]) for x in (before, after)]
    torch.testing.assert_close(*among_old, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_new_token_is_no_likelier_than_its_pieces(pair):
    """The bound that the mean of rows is chosen for: exp of a mean is at most the mean of exp."""
    model, tokenizer = load(pair[1])
    probabilities = model(tokenizer(OLD_TEXT, return_tensors="pt")["input_ids"]).logits[0].softmax(-1)
    rows = pair[2].rows
    for i, pieces in enumerate(rows.pieces, start=rows.first):
        assert (probabilities[:, i] <= probabilities[:, pieces].mean(1) * (1 + 1e-5)).all()


def test_rows_and_other_weights(pair):
    (old, _), (new, _) = load(pair[0]), load(pair[1])
    rows, before, after = pair[2].rows, old.state_dict(), new.state_dict()
    assert rows.new_size == (340 if rows.old_size == 340 else 384)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        expected = rows.extend(tensor) if len(tensor) == rows.old_size else tensor
        assert torch.equal(after[name], expected), name
    same = old.get_input_embeddings().weight is old.get_output_embeddings().weight
    assert (new.get_input_embeddings().weight is new.get_output_embeddings().weight) == same


def test_the_configuration(pair):
    old, new = (json.loads((d / "config.json").read_text()) for d in pair[:2])
    assert new == old | {"vocab_size": pair[2].rows.new_size}
    assert (pair[1] / "generation_config.json").read_text() == (pair[0] / "generation_config.json").read_text()


def test_the_native_engine_and_the_trainer_run_it(pair):
    tokenizer = AutoTokenizer.from_pretrained(pair[1])
    ids = torch.tensor(tokenizer(NEW_TEXT)["input_ids"], dtype=torch.int32)
    assert int(ids.max()) == 334
    config = ModelConfig(module="native", load=str(pair[1]), sampling={"max_new_tokens": 4})
    policy = NativeModule(config, Context(samples_per_prompt=2))
    policy.setup()
    out = policy.generate(Batch(torch.tensor([len(ids)]), {"tokens": ids}, {"group": torch.tensor([0])}))
    trainer = FSDPModule(ModelConfig(load=str(pair[1]), frozen=True), Context(model="ref"))
    trainer.setup()
    scored = trainer.forward_step(out)["ref_logprobs"]
    torch.testing.assert_close(scored, out["rollout_logprobs"], rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_reward_model(tokens, tmp_path):
    base = AutoModelForSequenceClassification.from_pretrained(made.byte_level_model(tmp_path / "lm"), num_labels=1)
    base.save_pretrained(tmp_path / "old")
    for file in (tmp_path / "lm").glob("*token*"):
        shutil.copy(file, tmp_path / "old")
    extend(tmp_path / "old", tokens, tmp_path / "new")
    auto = AutoModelForSequenceClassification
    old, new = (auto.from_pretrained(tmp_path / d, num_labels=1).eval() for d in ("old", "new"))
    ids = AutoTokenizer.from_pretrained(tmp_path / "new")(OLD_TEXT, return_tensors="pt")["input_ids"]
    assert torch.equal(old(ids).logits, new(ids).logits)
    module = FSDPModule(ModelConfig(load=str(tmp_path / "new"), head="reward", frozen=True), Context(model="rm"))
    module.setup()
    assert module.forward_step(Batch(torch.tensor([5]), {"tokens": torch.tensor([1, 334, 333, 2, 3])}))["reward"].shape


def test_a_vocabulary_of_another_language(tmp_path):
    """Chinese pieces for a SentencePiece llama that knew the characters as bytes."""
    old = made.sentencepiece_model(tmp_path / "old")
    weather = ["今天天气很好", "明天天气不好", "今天不好，明天很好"] * 30
    source = made.sentencepiece(tmp_path / "zh", weather, 30, byte_fallback=False, character_coverage=1.0)
    report = extend(old, source, tmp_path / "new")
    before, after = AutoTokenizer.from_pretrained(old), AutoTokenizer.from_pretrained(tmp_path / "new")
    assert len(before("今天天气很好")["input_ids"]) == 1 + 1 + 6 * 3  # bos, the space before a text, bytes
    assert len(after("今天天气很好")["input_ids"]) <= 4
    assert after.decode(after("明天很好 (a)")["input_ids"], skip_special_tokens=True) == "明天很好 (a)"
    assert all(before(t)["input_ids"] == after(t)["input_ids"] for t in made.texts(0))
    assert not (tmp_path / "new" / "tokenizer.model").exists()  # it would not know the new pieces
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert model.get_input_embeddings().num_embeddings == report.rows.new_size


def test_a_token_that_the_old_tokenizer_knows_nothing_of(tmp_path):
    """Neither characters nor bytes: its row is the mean of all rows, and that is told."""
    old = made.sentencepiece_model(tmp_path / "old")
    content = json.loads(AutoTokenizer.from_pretrained(old).backend_tokenizer.to_str())
    content["model"] |= {"byte_fallback": False, "unk_token": "<unk>"}
    (old / "tokenizer.json").write_text(json.dumps(content))
    (old / "tokenizer.model").unlink()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (old / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "list.txt").write_text("☃\n")
    report = extend(old, tmp_path / "list.txt", tmp_path / "new")
    assert report.rows.pieces == [[]]
    assert report.table()["new tokens without old pieces (mean of all rows)"] == 1
    table = AutoModelForCausalLM.from_pretrained(tmp_path / "new").get_input_embeddings().weight
    torch.testing.assert_close(table[400], table[:400].mean(0))


# ---- the output is whole or not there


def test_an_output_with_something_in_it_is_left_alone(tokens, tmp_path):
    old = made.byte_level_model(tmp_path / "old")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "notes").write_text("mine")
    with pytest.raises(ValueError, match=r"old is an input of the command"):
        extend(old, tokens, old)
    for output in (tmp_path / "new", tmp_path / "new" / "notes"):
        with pytest.raises(FileExistsError, match="exists and is not empty"):
            extend(old, tokens, output)
    assert (tmp_path / "new" / "notes").read_text() == "mine"


def test_an_empty_output_directory_is_filled(tokens, tmp_path):
    (tmp_path / "deep" / "new").mkdir(parents=True)
    extend(made.byte_level_model(tmp_path / "old"), tokens, tmp_path / "deep" / "new")
    assert (tmp_path / "deep" / "new" / "config.json").exists()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["new"]


def test_nothing_is_left_of_an_attempt_that_fails(tokens, tmp_path, monkeypatch):
    old = made.byte_level_model(tmp_path / "old")

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(import_module("coalign_megatron.vocab.extend"), "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        extend(old, tokens, tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old"]


def test_old_tokens_without_a_row_get_one(tmp_path):
    """As where transformers adds a special token to a tokenizer whose model was made without."""
    old = made.byte_level_model(tmp_path / "old", vocab=332)  # no row for <|im_end|>
    (tmp_path / "list.txt").write_text("a<|im_end|>b\n")
    report = extend(old, tmp_path / "list.txt", tmp_path / "new", pad_to_multiple=1)
    assert report.table()["old tokens that had no row (mean of all rows)"] == 1
    assert report.table()["spare rows used"] == 0
    before, after = (load(path)[0].get_input_embeddings().weight for path in (old, tmp_path / "new"))
    assert len(after) == 334 and torch.equal(after[:332], before)
    torch.testing.assert_close(after[332], before.mean(0))


def test_a_model_without_a_tokenizer(tokens, tmp_path):
    """Of which transformers would make an empty one."""
    old = tiny_model_dir(tmp_path / "old", family="llama")
    (old / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer .none of tokenizer\.json,"):
        extend(old, tokens, tmp_path / "new")


def test_a_tokenizer_that_comes_back_changed_is_noticed(tokens, tmp_path, monkeypatch):
    old = made.byte_level_model(tmp_path / "old")
    real = AutoTokenizer.from_pretrained

    def forgetful(path, *args, **kwargs):
        return real(old if Path(path).name.startswith(".writing-") else path, *args, **kwargs)

    monkeypatch.setattr("coalign_megatron.vocab.tokenizer.AutoTokenizer.from_pretrained", forgetful)
    with pytest.raises(ValueError, match="rebuilds the tokenizer"):
        extend(old, tokens, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ---- the command


def test_the_command(tokens, tmp_path):
    old = made.byte_level_model(tmp_path / "old")
    sample = tmp_path / "sample.txt"
    sample.write_text("a zoo\na <|tool|>\n")
    arguments = [str(old), "--tokens", str(tokens), "-o", str(tmp_path / "new"), "--sample", str(sample)]
    result = CliRunner().invoke(app, ["extend-vocab", *arguments])
    assert result.exit_code == 0, result.output
    before, after = (AutoTokenizer.from_pretrained(d) for d in (old, tmp_path / "new"))
    counts = [sum(len(t(line)["input_ids"]) for line in ("a zoo\n", "a <|tool|>\n")) for t in (before, after)]
    shown = " ".join(result.output.split())
    rows = ["tokens read 2", "new tokens 2", "tokens of the tokenizer before 333", "rows of the model after 340"]
    rows += ["spare rows used 2", f"sample: tokens before {counts[0]}", f"sample: tokens after {counts[1]}"]
    assert [row for row in rows if row not in shown] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no directory 'nowhere'"),
        (["{old}", "--sample", "nothing.txt"], "--sample: nothing.txt is not a file"),
    ],
)
def test_errors_of_the_command(tokens, tmp_path, arguments, message):
    old = str(made.byte_level_model(tmp_path / "old"))
    given = [a.format(old=old) for a in arguments]
    result = CliRunner().invoke(app, ["extend-vocab", *given, "--tokens", str(tokens), "-o", str(tmp_path / "new")])
    assert isinstance(result.exception, (ValueError, OSError)) and message in str(result.exception)
