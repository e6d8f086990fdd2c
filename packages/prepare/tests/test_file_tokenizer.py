"""The tokenizer that a check reads rows with gives the tokens and texts of transformers' own, or is not used."""

import copy
import json
import random

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from coalign.data.messages import ContentGuard
from coalign.data.templates import TRAINING_TEMPLATES, read_template
from coalign_prepare import file_tokenizer
from coalign_prepare.file_tokenizer import open_file_tokenizer
from tests.tiny import CHATML, SPECIAL, tiny_model_dir

CHARACTERS = [*"abc XYZ é \u0065\u0301 ﬁ 漢字 \n\t\r 0123 🙂‍↔️ ' 's \u2028 ï", *SPECIAL, "|>", "<|"]
TALK = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": " Hi\n\n"},
    {"role": "assistant", "content": "é <|im_end|> yo"},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "<Adds>", "parameters": {"z": [1], "a": "é"}}}
TEMPLATES = [
    CHATML,
    *(read_template(name) for name in TRAINING_TEMPLATES),
    "{%- for m in messages %}\n  {% if loop.first %}\n{% continue %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}",
    "{{ tools | tojson }} {{ eos_token }}{{ bos_token is defined }} {{ strftime_now('%Y') }} {{ documents }}\n",
    "{% for m in messages %}{% generation %}\n{{ m.content }}{% endgeneration %}\n{% endfor %}",
]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def directory(request, tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp(request.param), family=request.param, layers=1)


@pytest.fixture
def both(directory):
    return AutoTokenizer.from_pretrained(directory), open_file_tokenizer(directory)


def test_it_is_transformers_own_backend(both):
    theirs, ours = both
    assert json.loads(ours.backend.to_str()) == json.loads(theirs.backend_tokenizer.to_str())
    for name in ("special_tokens_map", "eos_token_id", "bos_token_id", "unk_token_id", "chat_template", "is_fast"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert str(ours.added_tokens_decoder) == str(theirs.added_tokens_decoder)
    assert ours.get_vocab() == theirs.get_vocab() and ours.get_chat_template() == theirs.get_chat_template()
    for token in ("a", "<|im_end|>", "nothing"):
        assert ours.convert_tokens_to_ids(token) == theirs.convert_tokens_to_ids(token)
    for number in (0, 257, 999):
        assert ours.convert_ids_to_tokens(number) == theirs.convert_ids_to_tokens(number)


def test_tokens_and_texts_are_those_of_transformers(both):
    theirs, ours = both
    draw = random.Random(0)
    for _ in range(40):
        text = "".join(draw.choices(CHARACTERS, k=draw.randrange(30)))
        for options in ({}, {"add_special_tokens": False}, {"split_special_tokens": True}):
            tokens = theirs(text, verbose=False, **options)["input_ids"]
            assert ours(text, verbose=False, **options)["input_ids"] == tokens
        for skip in (False, True):
            told = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
            assert ours.decode(tokens, **told) == theirs.decode(tokens, **told)
        guards = [ContentGuard(tokenizer) for tokenizer in both]
        assert len({tuple(guard.tokenize(f"<|im_start|>{guard.protect(text)}<|im_end|>")) for guard in guards}) == 1
    assert copy.deepcopy(ours).encode("a") == ours.encode("a") == theirs.encode("a")


@pytest.mark.parametrize("jinja", TEMPLATES)
def test_templates_are_rendered_as_transformers_does(both, jinja):
    for tools in (None, [TOOL]):
        for prompt in (False, True):
            options = {"chat_template": jinja, "add_generation_prompt": prompt, "tokenize": False, "thinking": True}
            theirs, ours = (tokenizer.apply_chat_template(TALK, tools=tools, **options) for tokenizer in both)
            assert ours == theirs


def test_a_template_that_refuses_is_heard(both):
    with pytest.raises(TemplateError, match="no system here"):
        both[1].apply_chat_template(TALK, chat_template="{{ raise_exception('no system here') }}")


SETTINGS, TOKENS = "tokenizer_config.json", "tokenizer.json"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (SETTINGS, {"tokenizer_class": "LlamaTokenizer"}),
        (SETTINGS, {"tokenizer_class": None}),
        (SETTINGS, {"auto_map": {"AutoTokenizer": ["a.B", None]}}),
        (SETTINGS, {"add_bos_token": True}),
        (SETTINGS, {"add_prefix_space": True}),
        (SETTINGS, {"split_special_tokens": True}),
        (SETTINGS, {"extra_special_tokens": ["<x>"]}),
        (SETTINGS, {"image_token": "<image>"}),
        (SETTINGS, {"pad_token": "<pad>"}),
        (SETTINGS, {"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}),
        (SETTINGS, {"chat_template": [{"name": "default", "template": "x"}]}),
        (TOKENS, {"truncation": {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}}),
        (TOKENS, {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}),
        (TOKENS, {"added_tokens": []}),
        (TOKENS, {"pre_tokenizer": {"type": "Unheard"}}),
        ("config.json", {"model_type": "mistral"}),
        ("special_tokens_map.json", {}),
        ("added_tokens.json", {}),
    ],
)
def test_unusual_files_are_left_to_transformers(tmp_path, name, change):
    directory = tiny_model_dir(tmp_path / "m", family="llama", layers=1)
    if change.get("chat_template"):
        (directory / "chat_template.jinja").unlink()
    file = directory / name
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | change))
    assert open_file_tokenizer(directory) is None


def test_a_version_that_was_not_compared_and_damaged_files_are_left_to_transformers(tmp_path, monkeypatch):
    directory = tiny_model_dir(tmp_path / "m", family="llama", layers=1)
    with monkeypatch.context() as patch:
        patch.setattr(file_tokenizer, "version", lambda _: "9.0.0")
        assert open_file_tokenizer(directory) is None
    (directory / "tokenizer.json").write_text("{")
    assert open_file_tokenizer(directory) is None
