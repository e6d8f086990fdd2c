"""Templates of families that think: our training templates against their own, and what is learned by each policy."""

import pytest

from coalign.data.sources import BadRow
from coalign.data.templates import TRAINING_TEMPLATES, ChatTemplate, encode_learned, load_template, read_template
from tests.data.families import CALLED, DIALOGUE, PLAIN, SYSTEM, TOOL, answer, family_tokenizer, user
from tests.data.reading import reader, use

PAIRS = [  # the family's own template, ours, and arguments
    ("Qwen3", "qwen3-training", {}),
    ("Qwen3", "qwen3-training", {"enable_thinking": False}),
    ("Qwen3.5", "qwen3.5-training", {}),
    ("Qwen3.5", "qwen3.5-training", {"enable_thinking": False}),
    ("Qwen3.5-2B", "qwen3.5-training", {"enable_thinking": False}),
    ("Qwen3.5-2B", "qwen3.5-training", {"enable_thinking": True}),
    ("Qwen3.6", "qwen3.5-training", {}),
    ("DeepSeek-R1-Distill", "deepseek-r1-training", {}),
    ("DeepSeek-V3", "deepseek-r1-training", {}),
    ("GLM-4.5", "glm-4.5-training", {}),
    ("GLM-4.5", "glm-4.5-training", {"enable_thinking": False}),
    ("gpt-oss", "gpt-oss-training", {"date": "2026-01-31"}),
    ("gpt-oss", "gpt-oss-training", {"date": "2026-01-31", "reasoning_effort": "high", "model_identity": "I."}),
    ("Phi-3", "phi-3-training", {}),
    ("Phi-3.5", "phi-3-training", {}),
]
ids = ["-".join([own, *map(str, arguments.values())]) for own, _, arguments in PAIRS]
families = pytest.mark.parametrize("family, name, arguments", PAIRS, ids=ids)


def both(family, name, arguments, reasoning="keep"):
    tokenizer = family_tokenizer(family)
    return [load_template(tokenizer, which, arguments, reasoning) for which in ("auto", name)]


def shown(template, messages, tools=None, asked=False):
    return template.render(*template.protect(messages, tools), generation_prompt=asked)


def has_tools(template):
    return [None, [TOOL]] if "tools" in template.jinja else [None]


def test_every_training_template_is_tested_against_a_family():
    assert {name for _, name, _ in PAIRS} == {*TRAINING_TEMPLATES}


@families
def test_prompts_are_those_of_the_family(family, name, arguments):
    own, ours = both(family, name, arguments)
    for tools in has_tools(ours):
        for messages in ([user("one?")], [SYSTEM, user("one?")], [SYSTEM, user("one?\n "), answer("1"), user("two?")]):
            first = len(messages) < 3  # of later ones, the family's own drops the thoughts before
            asked = [shown(template, messages, tools, asked=True) for template in (own, ours)]
            assert asked[0] == asked[1] if first else asked[0][-40:] == asked[1][-40:]


@families
def test_an_answer_is_written_as_the_family_writes_the_last_one(family, name, arguments):
    own, ours = both(family, name, arguments)
    for messages in (DIALOGUE[:3], PLAIN[:3], DIALOGUE, PLAIN):
        texts = [shown(template, messages) for template in (own, ours)]
        if name == "phi-3-training":
            texts[0] = texts[0].removesuffix("<|endoftext|>")  # which the model never generates
        if name == "deepseek-r1-training":  # the family's own drops the thoughts: the model writes them after a prompt
            thoughts = messages[-1].get("reasoning_content", "")
            texts[0] = f"{shown(own, messages[:-1], asked=True)}{thoughts}\n</think>\n\n{messages[-1]['content']}"
            texts[0] += "<｜end▁of▁sentence｜>"
        question = messages[-2]["content"]
        if len(messages) == 3:
            assert texts[0] == texts[1]
        assert texts[0].split(question)[-1] == texts[1].split(question)[-1]


@families
def test_calls_of_tools_are_written_as_the_family_writes_them(family, name, arguments):
    own, ours = both(family, name, arguments)
    if "tool_calls" not in ours.jinja or "raise_exception('no form for a tool call" in ours.jinja:
        with pytest.raises(BadRow):
            ours.prompt(CALLED[:3], [TOOL])
        return
    single = [answer("", "to add", tool_calls=CALLED[1]["tool_calls"])]
    for messages in ([CALLED[0], *single], CALLED[:3], CALLED):
        texts = [shown(template, messages, [TOOL]) for template in (own, ours)]
        if family == "gpt-oss" and len(messages) == 4:  # the family's own drops why it called once it has answered
            texts[0] = texts[0].replace("<|end|><|start|>assistant to=", "<|end|><|start|>assistant<|channel|>analysis"
                                        "<|message|>to add<|end|><|start|>assistant to=", 1)  # fmt: skip
        assert texts[0] == texts[1]


@families
def test_each_turn_begins_the_next(family, name, arguments):
    _, ours = both(family, name, arguments)
    thinks = arguments.get("enable_thinking", True)
    for messages, tools in ((DIALOGUE, None), (PLAIN, None), (CALLED, [TOOL])):
        if tools and (has_tools(ours) == [None] or "tool_calls" not in ours.jinja):
            continue
        whole = shown(ours, messages, tools)
        for i, message in enumerate(messages):
            assert not i or whole.startswith(shown(ours, messages[:i], tools))
            if message["role"] == "assistant" and (thinks or messages is PLAIN):
                assert whole.startswith(shown(ours, messages[:i], tools, asked=True))
        if thinks or messages is PLAIN:
            tokens, mask = ours.conversation(messages, tools)
            learned = ours.tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m])
            for message in messages:
                if message["role"] == "assistant":
                    assert message["content"] in learned and message.get("reasoning_content", "") in learned
            assert not any(m["content"] in learned for m in messages if m["role"] in ("user", "system"))


THINKING = [(own, "auto") for own in ("Qwen3", "Qwen3-VL", "Qwen3.5", "Qwen3.6", "Qwen3.8", "GLM-4.5", "gpt-oss")]
THINKING += sorted({(own, ours) for own, ours, _ in PAIRS} - {("Qwen3.5-2B", "qwen3.5-training")})
# The own template of gpt-oss drops why it called a tool once it has answered; the others have no form for calls.
NO_CALLS = {("gpt-oss", "auto"), *((own, ours) for own, ours, _ in PAIRS if ours[:3] in ("dee", "phi"))}


@pytest.mark.parametrize("family, chosen", THINKING)
def test_last_learns_every_answer_after_exactly_the_prompt_that_it_is_generated_from(family, chosen):
    tokenizer = family_tokenizer(family)
    for messages, answers in ((DIALOGUE, [2, 4]), (DIALOGUE + CALLED, [2, 4, 8])):
        if len(answers) > 2 and (family, chosen) in NO_CALLS:
            continue
        config = {"reasoning": "last", "chat_template": chosen}
        (examples,) = use(reader("conversations", tokenizer=tokenizer, **config), {"messages": messages})
        assert len(examples) == len(answers)
        for example, i in zip(examples, answers, strict=True):
            prompt = load_template(tokenizer, chosen, reasoning="last").prompt(messages[:i])
            assert example.tokens[: len(prompt)] == prompt
            learned = tokenizer.decode([t for t, m in zip(example.tokens, example.loss_mask, strict=True) if m])
            assert messages[i]["reasoning_content"] in learned and messages[i]["content"] in learned
            assert example.loss_mask[len(prompt)] and (i == 8 or not any(example.loss_mask[: len(prompt)]))
            dropped = [m["reasoning_content"] for m in messages[: min(i, 5)] if "reasoning_content" in m]
            assert not any(thoughts in tokenizer.decode(example.tokens) for thoughts in dropped)


@families
def test_with_last_all_is_written_as_the_family_writes_it(family, name, arguments):
    """Earlier answers as well: what is learned follows the prompt that the family's own template writes."""
    own, ours = both(family, name, arguments, "last")
    for messages in (DIALOGUE[:4], PLAIN[:4], [*CALLED, user("and?")] if "tool_calls" in own.jinja else PLAIN[:4]):
        if not (messages[0] is CALLED[0] and name == "deepseek-r1-training"):
            tools = [TOOL] if messages[0] is CALLED[0] else None
            assert shown(own, messages, tools, asked=True) == shown(ours, messages, tools, asked=True)
    if name not in ("deepseek-r1-training", "phi-3-training"):  # whose own leave out thoughts, or add an end of text
        assert shown(own, DIALOGUE) == shown(ours, DIALOGUE)


def test_blocks_in_contents_are_reasoning_as_well():
    tokenizer = family_tokenizer("Qwen3")
    blocks = [
        {"role": m["role"], "content": f"<think>\n{m['reasoning_content']}\n</think>\n\n{m['content']}"}
        if "reasoning_content" in m
        else m
        for m in DIALOGUE
    ]  # fmt: skip
    other = [{k.replace("reasoning_content", "thinking"): v for k, v in m.items()} for m in DIALOGUE]
    for policy, chosen in (("keep", "qwen3-training"), ("drop", "qwen3-training"), ("last", "auto")):
        made = [
            [(e.tokens, e.loss_mask) for e in use(reader("conversations", tokenizer=tokenizer, reasoning=policy,
             chat_template=chosen), {"messages": messages})[0]]
            for messages in (DIALOGUE, blocks, other)
        ]  # fmt: skip
        assert made[0] == made[1] == made[2]
    text = shown(load_template(tokenizer, "qwen3-training", reasoning="drop"), blocks)
    assert "why" not in text and text.count("<think>\n\n</think>") == 2


def test_keep_writes_reasoning_into_the_content_where_a_template_reads_no_key():
    tokens, mask = load_template(family_tokenizer("Phi-4"), reasoning="keep").conversation(DIALOGUE)
    text = family_tokenizer("Phi-4").decode([t for t, m in zip(tokens, mask, strict=True) if m])
    assert text == "<think>\nwhy one\n</think>\n\n1<|im_end|><think>\nwhy two\n</think>\n\n2<|im_end|>"


@pytest.mark.parametrize(
    "family, policy, proposed",
    [
        ("Qwen3", None, "data.chat_template: qwen3-training would do"),
        ("Qwen3", "keep", "data.chat_template: qwen3-training would do"),
        ("Qwen3.5", "keep", "data.chat_template: qwen3.5-training would do"),
        (
            "Qwen3.5-2B",
            "drop",
            'data.chat_template: qwen3.5-training with data.chat_template_kwargs: {"enable_thinking"',
        ),
        ("Qwen3.6", "keep", 'data.chat_template_kwargs: {"preserve_thinking": true} would do'),
        ("DeepSeek-R1-Distill", None, "data.chat_template: deepseek-r1-training would do"),
        ("GLM-4.5", "keep", "data.chat_template: glm-4.5-training would do"),
        ("gpt-oss", "keep", "data.chat_template: gpt-oss-training would do"),
        ("gpt-oss", None, "data.chat_template: gpt-oss-training with data.reasoning: keep would do"),
        ("Phi-3", "drop", "data.chat_template: phi-3-training would do"),
    ],
)
def test_the_error_proposes_what_would_do(family, policy, proposed):
    with pytest.raises(BadRow) as caught:
        encode_learned(load_template(family_tokenizer(family), reasoning=policy), DIALOGUE)
    assert proposed in str(caught.value)


def test_reasoning_that_a_template_leaves_out_is_not_lost_in_silence():
    with pytest.raises(BadRow, match=r"leaves out the reasoning of message 2, .* data\.reasoning: keep would do"):
        encode_learned(load_template(family_tokenizer("Phi-4")), DIALOGUE)
    assert encode_learned(load_template(family_tokenizer("Phi-4")), PLAIN)
    assert load_template(family_tokenizer("Phi-4")).conversation(DIALOGUE)  # a reward model reads what it is shown
    with pytest.raises(BadRow, match="none has no place for the answer's reasoning"):
        encode_learned(load_template(family_tokenizer("Phi-4"), "none"), [user("one?"), answer("1", "why one")])
    with pytest.raises(BadRow, match="last drops the reasoning of message 2, which is learned"):
        load_template(family_tokenizer("Qwen3"), reasoning="last").conversation(DIALOGUE)


@pytest.mark.parametrize(
    ("family", "chosen", "arguments", "message"),
    [
        ("Qwen3", "auto", {"enable_thinkin": False}, r"never reads 'enable_thinkin'; did you mean 'enable_thinking'\?"),
        ("Qwen3", "auto", {"content": "x"}, "never reads 'content'"),  # a variable of the template's own
        ("Phi-4", "auto", {"x": 1}, "never reads 'x'; it has no arguments"),
        ("Phi-4", "auto", {"tools": [TOOL]}, "never reads 'tools'"),
        ("Qwen3", "auto", {"date": "2025-08-05"}, "never reads 'date'"),
        ("gpt-oss", "auto", {"date": "August"}, "'August' is no date like 2026-01-31"),
        ("Qwen3", "none", {"enable_thinking": True}, "none reads no chat_template_kwargs"),
        ("Qwen3", "{{ messages }}\n{% for %}", {}, r"no valid Jinja: line 2: "),
        ("Qwen3", "qwen3-trainin", {}, "did you mean 'qwen3-training'"),
    ],
)
def test_arguments_that_no_template_reads_are_refused(family, chosen, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_template(family_tokenizer(family), chosen, arguments)


def test_arguments_are_those_that_the_template_reads():
    tokenizer = family_tokenizer("Qwen3")
    quick = load_template(tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(quick.prompt([user("one?")])).endswith("assistant\n<think>\n\n</think>\n\n")
    template, plain = load_template(tokenizer, chat_template_kwargs={"tools": [TOOL]}), load_template(tokenizer)
    assert template.prompt([user("one?")]) == plain.prompt([user("one?")], [TOOL]) != plain.prompt([user("one?")])
    dated = load_template(family_tokenizer("gpt-oss"), chat_template_kwargs={"date": "2025-08-05"})
    assert "Current date: 2025-08-05\n" in shown(dated, [user("one?")])


def test_arguments_and_policy_reach_prompts():
    config = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning": "last"}
    tokenizer = family_tokenizer("Qwen3")
    ((example,),) = use(reader("prompts", tokenizer=tokenizer, **config), {"prompt": DIALOGUE[:4]})
    text = tokenizer.decode(example.tokens)
    assert "why one" not in text and text.endswith("<think>\n\n</think>\n\n")
    ours = ChatTemplate(tokenizer, read_template("qwen3-training"), reasoning="keep")
    assert "why one" in tokenizer.decode(ours.prompt(DIALOGUE[:4]))
