"""The templates of a run: what its models carry, and what commands use for them."""

import json
from functools import partial

import pytest
from transformers import AutoTokenizer

from coalign.backends import pretrained
from coalign.config.schema import DataConfig, ModelConfig, SamplingConfig
from coalign.data.templates import TRAINING_TEMPLATES, load_template, store_arguments
from coalign.report.display import Display
from coalign.roles import Context
from coalign_serve.chat import ChatSession, ChatSettings
from coalign_serve.config.serving import CompletionServerConfig
from coalign_serve.config.stages import GenerateConfig, JudgeConfig
from coalign_serve.generate import generate
from coalign_serve.judges import RewardModelJudge
from coalign_serve.run_model import choose_template, find_model
from coalign_serve.serving.completion_server import load_text_tools
from tests.runs import run
from tests.tiny import CHATML, tiny_model_dir, tiny_tokenizer

OURS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.role[0] }}:{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% if brief is defined and brief %}(brief){% endif %}{% endif %}"
)
ASKED = [{"role": "user", "content": "Hi"}]
SAID = {"role": "assistant", "content": "Ho"}
PAIR = {"prompt": "Hi", "chosen": "Ho", "rejected": "No"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("base") / "model", layers=1))


@pytest.fixture(scope="module")
def train(base, tmp_path_factory):
    """Runs SFT, or another recipe, of one step; the run folder."""

    def train(algorithm="sft", rows=None, models=None, **data):
        folder = tmp_path_factory.mktemp("run")
        rows = rows or [{"messages": [*ASKED, SAID]}]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "algorithm": algorithm,
            "output": str(folder / "out"),
            "data": {"train": str(folder / "rows.jsonl"), **data},
            "models": models or {"trainer": {"load": base, "num_gpu": 0}},
            "runtime": {"steps": 1, "prompts_per_step": 1, "save_every": 1},
        }
        assert run(config) == 0
        return folder / "out"

    return train


def render(path, **arguments):
    tokenizer = AutoTokenizer.from_pretrained(path)
    return tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True, **arguments)


def read_prompt(model, chat_template=None, arguments=None):
    """What chat, serve and generate show the model."""
    settings = ChatSettings(model, SamplingConfig(max_new_tokens=1), chat_template=chat_template)
    config = {"model": str(model), "chat_template": chat_template, "chat_template_kwargs": arguments or {}}
    server = load_text_tools(CompletionServerConfig(**config | {"model": find_model(str(model))})).template
    tokens = ChatSession(settings)._template.prompt(ASKED)
    assert server.prompt(ASKED) == tokens
    rows = []
    prompts = model / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Hi"}) + "\n")
    data = {"train": str(prompts)} | ({} if chat_template is None else {"chat_template": chat_template})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coalign_serve.generate.read_samples", lambda batch, _: rows.append(batch) or [])
        sampling = SamplingConfig(max_new_tokens=1)
        config = GenerateConfig(model=str(model), data=DataConfig.model_validate(data), sampling=sampling)
        generate(config, lambda record: None, Display(quiet=True))
    assert rows[0]["tokens"][: len(tokens)].tolist() == tokens
    return tokenizer_of(model).decode(tokens)


def tokenizer_of(model):
    return AutoTokenizer.from_pretrained(find_model(str(model)))


def test_a_run_with_a_template_of_its_own(train, base, tmp_path):
    file = tmp_path / "ours.jinja"
    file.write_text(OURS)
    folder = train(chat_template=str(file))
    file.write_text("{{ 'changed since' }}")
    saved = AutoTokenizer.from_pretrained(folder / "model")
    assert saved.chat_template == OURS
    assert render(folder / "model") == "u:Hi;A:"
    read = saved.apply_chat_template([*ASKED, SAID], return_assistant_tokens_mask=True, return_dict=True)
    assert sum(read["assistant_masks"]) == 3  # so the next stage reads the blocks, too
    assert read_prompt(folder) == "u:Hi;A:"
    assert read_prompt(folder, "auto") == "u:Hi;A:"
    assert read_prompt(folder, CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_arguments_are_defaults_of_what_is_saved(train):
    folder = train(chat_template=OURS, chat_template_kwargs={"brief": True})
    assert render(folder / "model") == "u:Hi;A:(brief)"
    assert render(folder / "model", brief=False) == "u:Hi;A:"
    assert read_prompt(folder) == "u:Hi;A:(brief)"
    chosen = choose_template(str(folder), None, {"brief": False})
    assert (chosen.chat_template, chosen.chat_template_kwargs) == (OURS, {"brief": False})
    assert load_template(tokenizer_of(folder), "auto", {"brief": False}).prompt(ASKED)  # it is read, for all of that


def test_plain_text_stays_plain(train, base):
    folder = train(chat_template="none")
    assert read_prompt(folder) == "Hi"
    assert read_prompt(folder / "model") == "Hi"
    [checkpoint] = (folder / "checkpoints").glob("step_*/hf")
    assert choose_template(str(checkpoint), None).chat_template == "none"
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template == CHATML  # for those who mean to use it
    assert read_prompt(folder, "auto").startswith("<|im_start|>user")


def test_the_policy_for_reasoning_goes_with_our_templates(train):
    thought = {"role": "assistant", "content": "Ho", "reasoning_content": "hm"}
    rows = [{"messages": [*ASKED, thought, *ASKED, thought]}]
    folder = train(chat_template="qwen3-training", reasoning="last", rows=rows)
    saved = AutoTokenizer.from_pretrained(folder / "model").apply_chat_template(rows[0]["messages"], tokenize=False)
    assert saved.count("hm") == 1
    assert saved.endswith(TAIL := "<think>\nhm\n</think>\n\nHo<|im_end|>\n") and TAIL in saved
    assert choose_template(str(folder), None).reasoning == "last"
    assert load_template(tokenizer_of(folder), "auto", None, "last").given == {}


def test_a_reward_model_reads_as_it_was_trained(train, base):
    models = {"trainer": {"load": base, "num_gpu": 0, "head": "reward", "head_init": "zero"}}
    folder = train("reward_model", [PAIR], models, chat_template=OURS, chat_template_kwargs={"brief": True})
    assert render(folder / "model") == "u:Hi;A:(brief)"
    texts = []
    for config in ({"reward_model": folder}, {"reward_model": folder / "model"}, {"reward_template": "none"}):
        judge = RewardModelJudge(JudgeConfig(**{"reward_model": str(config.pop("reward_model", folder))} | config))
        texts.append(judge._reader.tokenizer.decode(judge._reader.read([*ASKED, SAID]).tokens))
        judge.close()
    assert texts == ["u:Hi;A:Ho<|im_end|>", "u:Hi;A:Ho<|im_end|>", "HiHo<|im_end|>"]


def test_adapters_carry_it(train, base):
    models = {"trainer": {"load": base, "num_gpu": 0, "lora": {"rank": 2}}}
    folder = train("dpo", [PAIR], models, chat_template=OURS)
    [adapter] = (folder / "checkpoints").glob("step_*/adapter")
    assert AutoTokenizer.from_pretrained(adapter).chat_template == OURS
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template == OURS


def test_what_has_nothing_to_add_stays_as_it_was(base, tmp_path):
    save = partial(pretrained.save_tokenizer, ModelConfig(load=base))
    save(Context(), tmp_path / "auto")
    assert AutoTokenizer.from_pretrained(tmp_path / "auto").chat_template == CHATML
    save(Context(chat_template_kwargs={"date": "2026-01-31"}), tmp_path / "dated")
    assert AutoTokenizer.from_pretrained(tmp_path / "dated").chat_template == CHATML


LITERALS = [True, False, 3, -0.5, "a", 'q"\\\n%} }} é 🙂', [1, "b", None], {"a": {"b": [True]}}, [], {}]


@pytest.mark.parametrize("value", LITERALS, ids=str)
def test_arguments_are_written_as_they_are(value):
    tokenizer = tiny_tokenizer(chat_template=store_arguments("\n{{ x | tojson }}", {"x": value, "y": 1}))
    plain = tiny_tokenizer(chat_template="\n{{ x | tojson }}")
    assert tokenizer.apply_chat_template(ASKED, tokenize=False) == plain.apply_chat_template(
        ASKED, tokenize=False, x=value
    )
    assert tokenizer.apply_chat_template(ASKED, tokenize=False, x=7) == "\n7"


def test_vllm_reads_what_is_saved():
    hf = pytest.importorskip("vllm.renderers.hf")
    for jinja in (OURS, *(file.read_text() for file in TRAINING_TEMPLATES.values())):
        arguments = {"reasoning_policy": "last", "enable_thinking": True, "brief": True}
        stored = store_arguments(jinja, arguments)
        assert hf._try_extract_ast(stored) is not None
        given, plain = (
            hf.resolve_chat_template_kwargs(tiny_tokenizer(), template, dict.fromkeys(arguments, 1))
            for template in (stored, jinja)
        )
        assert given.keys() == plain.keys()


def test_a_folder_that_is_no_runs(base, tmp_path):
    (tmp_path / "config.yaml").write_text("data: {chat_template: none}\n")  # of something else
    tiny_model_dir(tmp_path / "other", layers=1)
    for name in (base, str(tmp_path / "other"), str(tmp_path), "org/name"):
        assert choose_template(name, None) == DataConfig()
