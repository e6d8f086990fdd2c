import pytest

from coalign.config.schema import ModelConfig
from coalign.engine.vocabulary import check_same_vocabulary, check_tokens_fit
from tests.tiny import tiny_model_dir, tiny_tokenizer

NAMES = ("trainer", "teacher")


def test_one_vocabulary(tmp_path):
    models = [ModelConfig(load=str(tmp_path / name)) for name in ("a", "b")]
    for model in models:
        tiny_tokenizer(model.load)
    check_same_vocabulary(*models, NAMES)
    check_same_vocabulary(models[0], ModelConfig(load=str(tmp_path / "no tokenizer there")), NAMES)


def test_another_vocabulary_is_refused_with_the_first_difference(tmp_path):
    tiny_tokenizer(tmp_path / "a")
    other = tiny_tokenizer()
    other.add_tokens(["<plus>"])
    other.save_pretrained(tmp_path / "b")
    models = [ModelConfig(load=str(tmp_path / name)) for name in ("a", "b")]
    with pytest.raises(
        ValueError, match=r"models\.teacher\.load: .* \(260 and 259 tokens, 1 entries differ, first '<plus>' = 259\)"
    ):
        check_same_vocabulary(*models, NAMES)


def test_a_token_without_a_row_is_refused(tmp_path):
    model = ModelConfig(load=str(tiny_model_dir(tmp_path, vocab=300)))
    check_tokens_fit("models.trainer.load", model, highest=299)
    with pytest.raises(
        ValueError, match=r"models\.trainer\.load: .* ids up to 300, but .*config\.json says vocab_size 300"
    ):
        check_tokens_fit("models.trainer.load", model, highest=300)
    with pytest.raises(ValueError, match=r"no tokens at all"):
        check_tokens_fit("models.trainer.load", model, highest=-1)
