"""Before anything loads: settings that cannot work, or would have no effect, are refused with what would be right."""

import pytest

from coalign import load_config
from coalign.config.errors import ConfigError
from coalign.launch.plan import prepare
from coalign.types import LossInput, LossOutput
from tests.runs import run, settings


def configured(directory, algorithm, *overrides):
    return load_config(settings(directory, algorithm), overrides)


def own_loss(x: LossInput) -> LossOutput:
    return LossOutput(-x.logprobs)


# ---- sections without a reader


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "reward_model", "kto"])
@pytest.mark.parametrize(
    ("section", "given"),
    [
        ("truncated", "mask_truncated"),
        ("kl", "{fn: FixedKL, coef: 0.1}"),
        ("advantage", "group"),
        ("pairs", "best_worst"),
        ("reward", "{fn: math}"),
        ("rollout", "{oversample: 2.0}"),
    ],
)
def test_what_learns_from_data_reads_nothing_about_samples(tmp_path, algorithm, section, given):
    config = configured(tmp_path, algorithm, f"{section}={given}")
    with pytest.raises(ValueError, match=rf"^{section}: `{algorithm}` learns from data, not from samples"):
        prepare(config)


@pytest.mark.parametrize(
    ("algorithm", "section", "given"),
    [
        ("online_dpo", "kl", "{fn: FixedKL, coef: 0.1}"),
        ("online_dpo", "advantage", "group"),
        ("on_policy_distillation", "kl", "{fn: FixedKL, coef: 0.1}"),
        ("grpo", "pairs", "best_worst"),
        ("ppo", "pairs", "best_worst"),
    ],
)
def test_a_section_that_the_recipe_does_not_read(tmp_path, algorithm, section, given):
    config = configured(tmp_path, algorithm, f"{section}={given}")
    with pytest.raises(ValueError, match=rf"^{section}: `{algorithm}` does not read it; leave it out"):
        prepare(config)


# ---- models that would never learn


@pytest.mark.parametrize("model", ["trainer", "value"])
def test_a_model_that_waits_as_long_as_the_run_lasts(tmp_path, model):
    prepare(configured(tmp_path, "ppo", f"models.{model}.learns_after=3"))
    for steps in (4, 5):
        config = configured(tmp_path, "ppo", f"models.{model}.learns_after={steps}")
        with pytest.raises(ValueError, match=rf"models.{model}.learns_after is {steps}, and the run has 4 steps"):
            prepare(config)


def test_epochs_too_are_counted(tmp_path):
    config = settings(tmp_path, "sft")  # 24 rows by 4 make 6 steps
    del config["runtime"]["steps"]
    with pytest.raises(ValueError, match=r"models.trainer.learns_after is 6, and the run has 6 steps"):
        run(config, "models.trainer.learns_after=6")


# ---- guards


def test_a_bound_on_the_entropy_needs_a_loss_that_measures_it(tmp_path):
    bound = "runtime.guards.min_entropy=0.5"
    with pytest.raises(
        ValueError, match=r"min_entropy is 0.5, and the loss `policy_gradient` .*set loss.measure_entropy: true$"
    ):
        prepare(configured(tmp_path, "grpo", bound))
    prepare(configured(tmp_path, "grpo", bound, "loss.measure_entropy=true"))
    prepare(configured(tmp_path, "grpo", bound, "loss.entropy_coef=0.01"))
    with pytest.raises(ValueError, match=r"set models.trainer.loss.measure_entropy: true"):
        prepare(configured(tmp_path, "grpo", bound, "models.trainer.loss={fn: cispo}"))
    prepare(configured(tmp_path, "sft", bound, "loss={fn: 'tests.launch.test_validate:own_loss'}"))  # may report it


# ---- environments


GAME = ("rollout={fn: self_play}", "reward={fn: episode}")
WARM = "runtime.eval_sampling.temperature=1.0"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["runtime.samples_per_prompt=3"], r"runtime.samples_per_prompt is 3: `self_play` pairs the samples"),
        ([], r"runtime.eval_samples is 1: `self_play` pairs the samples of a prompt; make it even"),
        ([WARM, "runtime.eval_samples=3"], "runtime.eval_samples is 3"),
    ],
)
def test_self_play_needs_pairs(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        prepare(configured(tmp_path, "grpo", *GAME, *overrides))


def test_self_play_with_pairs(tmp_path):
    prepare(configured(tmp_path, "grpo", *GAME, WARM, "runtime.eval_samples=2"))
    config = settings(tmp_path, "grpo")
    del config["data"]["eval"]  # nobody evaluates
    prepare(load_config(config, GAME))


def test_the_rules_of_a_game(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout.settings.stick: unknown argument of Nim; did you mean 'sticks'"):
        prepare(configured(tmp_path, "grpo", "rollout={fn: game, settings: {stick: 5}}"))
    with pytest.raises(ValueError, match=r"'Nym' is not in coalign.environments.games; did you mean 'Nim'"):
        prepare(configured(tmp_path, "grpo", "rollout={fn: self_play, rules: Nym}"))
    with pytest.raises(ValueError, match=r"'random' is not in coalign.environments.games"):
        prepare(configured(tmp_path, "grpo", "rollout={fn: game, opponent: random}"))


def test_self_play_needs_two_players(tmp_path):
    solitary = "rollout={fn: self_play, rules: GuessTheNumber}"
    with pytest.raises(ValueError, match=r"rollout.rules: `GuessTheNumber` is a game for 1 player.*use `game`"):
        prepare(configured(tmp_path, "grpo", solitary, WARM, "runtime.eval_samples=2"))


def search(query: str, *, index: str) -> str:
    """A tool that has to be told its index."""
    return index + query


def solve(client, row, *, tries: int = 1):
    """An agent."""


SEARCH = "tests.launch.test_validate:search"


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ("{fn: tool_use, tools: [calculater]}", r"rollout.tools\[0\]: 'calculater' .*did you mean 'calculator'"),
        (f"{{fn: tool_use, tools: [calculator, '{SEARCH}']}}", r"rollout.tools\[1\].index: missing: search needs it"),
        (f"{{fn: tool_use, tools: [{{fn: '{SEARCH}', indx: a}}]}}", r"tools\[0\].indx: .*did you mean 'index'"),
        (f"{{fn: tool_use, tools: [{{fn: '{SEARCH}', index: 3}}]}}", r"tools\[0\].index: is 3; expected a text"),
        ("{fn: tool_use, tools: [{name: calculator}]}", r"tools\[0\] is .*expected the name .* mapping with `fn`"),
        ("{fn: tool_use, tools: [calculator, calculator]}", r"tools\[1\]: a second tool is called 'calculator'"),
        ("{fn: tool_use, tools: [calculator], parser: hermez}", r"'hermez' .*did you mean 'hermes'"),
        ("{fn: agent, run: 'tests.launch.test_validate:solv'}", r"has no 'solv'; did you mean 'solve'"),
        (
            "{fn: agent, run: 'tests.launch.test_validate:solve', arguments: {trys: 2}}",
            r"rollout.arguments.trys: .*did you mean 'tries'",
        ),
        ("{fn: simulated_user, user: scriptd}", r"'scriptd' .*did you mean 'scripted'"),
    ],
)
def test_what_an_environment_names(tmp_path, rollout, message):
    with pytest.raises(ValueError, match=message):
        prepare(configured(tmp_path, "grpo", f"rollout={rollout}"))


def test_environments_with_what_they_name(tmp_path):
    right = [f"{{fn: '{SEARCH}', index: a}}", "calculator"]
    template = "data.chat_template='{{ tools }}{{ messages }}'"
    prepare(configured(tmp_path, "grpo", template, f"rollout={{fn: tool_use, tools: [{', '.join(right)}]}}"))
    prepare(configured(tmp_path, "grpo", "rollout={fn: agent, run: 'tests.launch.test_validate:solve'}"))


# ---- room for the longest response


@pytest.mark.parametrize(("algorithm", "reader"), [("grpo", "trainer"), ("rloo", "reference"), ("ppo", "value")])
def test_a_response_that_no_micro_batch_holds_is_refused(tmp_path, algorithm, reader):
    small = f"models.{reader}.max_tokens_per_micro=64"
    said = rf"models\.{reader}\.max_tokens_per_micro is 64, and a response may have 64 tokens"
    with pytest.raises(ValueError, match=said):
        prepare(configured(tmp_path, algorithm, small, "models.policy.sampling.max_new_tokens=64"))
    prepare(configured(tmp_path, algorithm, small, "models.policy.sampling.max_new_tokens=63"))


@pytest.mark.parametrize(("pairs", "together"), [("best_worst", 2), ("all_pairs", 4)])
def test_what_a_loss_compares_shares_a_micro_batch(tmp_path, pairs, together):
    small = [f"pairs={pairs}", "models.trainer.max_tokens_per_micro=100"]
    share = 100 // together
    said = rf"is 100, {share} for each of the {together} that its loss compares, and a response may have {share} tokens"
    with pytest.raises(ValueError, match=said):
        prepare(configured(tmp_path, "online_dpo", *small, f"models.policy.sampling.max_new_tokens={share}"))
    prepare(configured(tmp_path, "online_dpo", *small, f"models.policy.sampling.max_new_tokens={share - 1}"))


LORA = "models.trainer.lora={rank: 4}"


@pytest.mark.parametrize(
    ("algorithm", "overrides", "message"),
    [
        ("sft", [LORA], "in `sft` no weights travel between models"),
        ("grpo", [], r"models\.trainer has no adapters: give it `lora`"),
        (
            "grpo",
            ["models.trainer.lora={dora: true}"],
            r"the magnitudes of models\.trainer\.lora\.dora have to be merged",
        ),
        ("grpo", [LORA], r"models\.policy\.module, `native`, knows merged weights only; use `merged`"),
    ],
)
def test_adapters_apart_where_a_side_cannot_do_it(tmp_path, algorithm, overrides, message):
    config = configured(tmp_path, algorithm, "sync.adapters=apart", *overrides)
    with pytest.raises(ValueError, match=message):
        prepare(config)


def test_functions_read_text_of_any_length(tmp_path):
    budget = "models.trainer.max_tokens_per_micro=null"
    prepare(configured(tmp_path, "grpo", budget, "models.policy.sampling.max_new_tokens=20000"))


def test_a_budget_for_a_group_has_a_token_for_each_sample(tmp_path):
    with pytest.raises(ValueError, match=r"rollout.group_tokens is 3 and runtime.samples_per_prompt 4.*make it 4"):
        prepare(configured(tmp_path, "grpo", "rollout.group_tokens=3"))
    prepare(configured(tmp_path, "grpo", "rollout.group_tokens=4"))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("{fn: length_penalty, max_tokens: 8, buffer: 9}", r"length_penalty: buffer=9 must lie in 1..max_tokens=8"),
        ("{fn: length_range, min_tokens: 9, max_tokens: 8}", r"length_range: min_tokens=9 is more than max_tokens=8"),
    ],
)
def test_bounds_of_a_reward(tmp_path, reward, message):
    with pytest.raises(ValueError, match=message):
        prepare(configured(tmp_path, "grpo", f"reward={reward}"))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "online_dpo"])
def test_a_policy_is_not_trained_on_a_penalised_distribution(tmp_path, algorithm):
    config = configured(tmp_path, algorithm, "models.policy.sampling.repetition_penalty=1.1")
    with pytest.raises(ValueError, match=r"models\.policy\.sampling\.repetition_penalty is 1\.1: .* models\.trainer"):
        prepare(config)
    prepare(configured(tmp_path, algorithm, "runtime.eval_sampling.repetition_penalty=1.1"))
