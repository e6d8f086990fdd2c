"""Before anything loads: settings that cannot work, or would have no effect, are refused with what would be right."""

import pytest

from coalign import load_config
from coalign.launch.plan import prepare
from coalign.types import LossInput, LossOutput
from tests.runs import run, settings


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("validate")


def configured(directory, algorithm, *overrides):
    return load_config(settings(directory, algorithm), overrides)


GAME = ("rollout={fn: self_play}", "reward={fn: episode}")
WARM = "runtime.eval_sampling.temperature=1.0"
SEARCH = "tests.launch.test_validate:search"
LORA = "models.trainer.lora={rank: 4}"
ONE_EACH = ["models.trainer.num_gpu=1", "models.policy.num_gpu=1"]
RAY, TOGETHER = "runtime.cluster=ray", "runtime.colocation=[[policy, trainer]]"
STREAM = "data.stream=true"
DATA = r"learns from data, not from samples"
UNREAD = "does not read it; leave it out"
PAIRS = "`self_play` pairs the samples"
# {algorithm: (overrides, what the refusal says)}
REFUSED = {
    "sft": [
        ("models.trainer.candidates=8", r"trainer.candidates: is for models that score, and `trainer` does not"),
        ("advantage=group", f"advantage: `sft` {DATA}"),
        ("pairs=best_worst", f"pairs: `sft` {DATA}"),
        ("reward={fn: math}", f"reward: `sft` {DATA}"),
        ("rollout={oversample: 2.0}", f"rollout: `sft` {DATA}"),
        ("filter={fn: varied}", "filter: `sft` learns from data"),
        ("replay={fn: mix}", "replay: `sft` learns from data"),
        ("curriculum={}", "curriculum: `sft` learns from data"),
        (["sync.adapters=apart", LORA], "in `sft` no weights travel between models"),
        ("runtime.early_stop={metric: eval/loss/value}", r"runtime.early_stop: watches evaluations.*eval_every"),
        ("runtime.profile={steps: [2], models: [trianer]}", r"profile.models.*'trianer'.*did you mean 'trainer'"),
        ("models.trainer.optimizer.unit=tokens", r"optimizer.unit: is `tokens`.*`runtime.tokens`"),
        (
            [STREAM, "runtime.steps=null", "runtime.tokens=40", "models.trainer.optimizer.schedule=linear"],
            r"models.trainer.optimizer.schedule: is `linear`, and a stream",
        ),
    ],
    "dpo": [
        ("kl={fn: FixedKL, coef: 0.1}", f"kl: `dpo` {DATA}"),
        ("covariance.fn=clip_cov", "covariance: `dpo` .*; leave it out"),
        (
            "loss={fn: dpo, aggregation: sequence_mean_token_sum}",
            r"loss\.aggregation is `sequence_mean_token_sum` and has no effect: `dpo` .* per group",
        ),
    ],
    "kto": [
        ("truncated=mask_truncated", f"truncated: `kto` {DATA}"),
        ("runtime.prompts_per_step=1", r"runtime\.prompts_per_step is 1"),
    ],
    "ppo": [("pairs=best_worst", f"pairs: `ppo` {UNREAD}")],
    "remax": [("models.policy.sampling.temperature=0.0", r"models\.policy\.sampling\.temperature is 0")],
    "gigpo": [("rollout.fn=single_turn", r"rollout\.fn is 'single_turn': `gigpo` compares the turns of episodes")],
    "online_dpo": [
        ("kl={fn: FixedKL, coef: 0.1}", f"kl: `online_dpo` {UNREAD}"),
        ("advantage=group", f"advantage: `online_dpo` {UNREAD}"),
        ("covariance.fn=clip_cov", "covariance: `online_dpo` .*; leave it out"),
        ("runtime.samples_per_prompt=1", "samples_per_prompt is 1: .* compares the samples of one prompt"),
        ("loss=policy_gradient", "`policy_gradient` gives a value per token and compares no responses"),
        ("pairs=best_wrost", "'best_wrost' is not in .*did you mean 'best_worst'"),
        ("pairs={fn: best_worst, n: 2}", "pairs.n: unknown argument"),
    ],
    "on_policy_distillation": [("kl={fn: FixedKL, coef: 0.1}", f"kl: `on_policy_distillation` {UNREAD}")],
    "grpo": [
        ("pairs=best_worst", f"pairs: `grpo` {UNREAD}"),
        # settings of models that do not read them
        ("models.trainer.parts_per_call=2", r"trainer.parts_per_call: is for models that sample, and `trainer` does"),
        ("models.reference={like: policy, updates_per_batch: 2}", r"reference.updates_per_batch: is for .* that learn"),
        ("models.reference.parts_per_call=2", r"reference.parts_per_call: is for models that sample, and `reference`"),
        ("models.policy.sampling.temperature=0.0", r"models\.policy\.sampling\.temperature is 0"),
        ("loss.clip_low=-1", r"^loss\.clip_low is -1\.0 and loss\.clip_high is 0\.2: neither may be below 0$"),
        ("ptx={coef: 0.1}", r"ptx.data: is missing"),
        ("filter={fn: varied, min_sdt: 0.1}", r"filter.min_sdt: unknown argument of varied.*min_std"),
        ("filter={fn: variid}", r"'variid' is not in coalign.algorithms.group_filters.*varied"),
        ("replay={fn: mix, thrice: true}", r"replay.thrice: unknown argument of mix"),
        ("reward={fn: length_penalty, max_tokens: 8, buffer: 9}", r"buffer=9 must lie in 1..max_tokens=8"),
        ("reward={fn: length_range, min_tokens: 9, max_tokens: 8}", r"min_tokens=9 is more than max_tokens=8"),
        # rollouts
        (["rollout={round_tokens: 4}", "runtime.max_staleness=1"], "rollout.round_tokens: is for synchronous training"),
        (["rollout={oversample: 2.0}", "runtime.max_staleness=1"], "rollout.oversample: is for synchronous training"),
        (["rollout={max_age: 1}", "runtime.max_staleness=2"], r"rollout.max_age is 1 and runtime.max_staleness 2"),
        ([TOGETHER, "runtime.max_staleness=1"], r"max_staleness: models.trainer and models.policy take turns"),
        (
            ["models.policy.spread_samples=true", "rollout={oversample: 1.5, round_tokens: 4}"],
            "models.policy.spread_samples: rollout.oversample ends a rollout by",
        ),
        (["models.policy.spread_samples=true", *GAME, WARM, "runtime.eval_samples=2"], "plays the samples of a p"),
        # games, tools, agents and users
        ([*GAME, "runtime.samples_per_prompt=3"], f"runtime.samples_per_prompt is 3: {PAIRS}"),
        (GAME, f"runtime.eval_samples is 1: {PAIRS} of a prompt; make it even"),
        ([*GAME, WARM, "runtime.eval_samples=3"], "runtime.eval_samples is 3"),
        ("rollout={fn: game, settings: {stick: 5}}", r"settings.stick: unknown argument of Nim; did you mean 'sticks'"),
        ("rollout={fn: self_play, rules: Nym}", r"'Nym' is not in coalign_agents.games; did you mean 'Nim'"),
        ("rollout={fn: game, opponent: random}", r"'random' is not in coalign_agents.games"),
        (
            ["rollout={fn: self_play, rules: GuessTheNumber}", WARM, "runtime.eval_samples=2"],
            r"rollout.rules: `GuessTheNumber` is a game for 1 player.*use `game`",
        ),
        ("rollout={fn: tool_use, tols: [calculator]}", r"(?s)rollout.*tols"),
        ("rollout={fn: tool_user}", r"tool_user.*did you mean 'tool_use'"),
        ("rollout={fn: tool_use, tools: [calculator], round_tokens: 8}", r"round_tokens: .* `tool_use` cannot be cut"),
        ("rollout={fn: tool_use, tools: [calculater]}", r"tools\[0\]: 'calculater' .*did you mean 'calculator'"),
        (f"rollout={{fn: tool_use, tools: [calculator, '{SEARCH}']}}", r"tools\[1\].index: missing: search needs it"),
        (f"rollout={{fn: tool_use, tools: [{{fn: '{SEARCH}', indx: a}}]}}", r"tools\[0\].indx: .*did you mean 'index'"),
        (
            f"rollout={{fn: tool_use, tools: [{{fn: '{SEARCH}', index: 3}}]}}",
            r"tools\[0\].index: is 3; expected a text",
        ),
        ("rollout={fn: tool_use, tools: [{name: calculator}]}", r"tools\[0\] is .*expected the name .* with `fn`"),
        ("rollout={fn: tool_use, tools: [calculator, calculator]}", r"\[1\]: a second tool is called 'calculator'"),
        ("rollout={fn: tool_use, tools: [calculator], parser: hermez}", r"'hermez' .*did you mean 'hermes'"),
        ("rollout={fn: agent, run: 'tests.launch.test_validate:solv'}", r"has no 'solv'; did you mean 'solve'"),
        (
            "rollout={fn: agent, run: 'tests.launch.test_validate:solve', arguments: {trys: 2}}",
            r"rollout.arguments.trys: .*did you mean 'tries'",
        ),
        ("rollout={fn: simulated_user, user: scriptd}", r"'scriptd' .*did you mean 'scripted'"),
        # weights and processes
        ("sync.adapters=apart", r"models\.trainer has no adapters: give it `lora`"),
        (["sync.adapters=apart", "models.trainer.lora={dora: true}"], r"magnitudes of .*lora\.dora have to be merged"),
        (["sync.adapters=apart", LORA], r"models\.policy\.module, `native`, knows merged weights only; use `merged`"),
        ("sync=broadcast", r"sync\.transport: `broadcast` is for models in processes of their own"),
        (
            ["sync=broadcast", RAY, TOGETHER],
            r"`broadcast` needs models\.trainer and models\.policy at once, and in one group of runtime\.colocation",
        ),
        (
            ["sync=cuda_ipc", RAY],
            r"`cuda_ipc` needs models\.trainer and models\.policy on one GPU; they have 0 and 0, in no common group",
        ),
        (["sync=cuda_ipc", RAY, *ONE_EACH], "they have 1 and 1, in no common group"),
        (["sync=cuda_ipc", RAY, *ONE_EACH, "models.trainer.num_gpu=2", TOGETHER], "they have 2 and 1, in one group"),
        ("sync=pigeon", r"(?s)sync.transport.*shared_memory"),
        (
            ["sync={every: 3}", "runtime.max_staleness=1"],
            "(?s)sync.every.*sampled from weights that are up to 2 steps old.*max_staleness",
        ),
        (
            ["sync={every: 2}", "runtime.max_staleness=1", "runtime.eval_every=3"],
            "(?s)runtime.eval_every.*is 3, no multiple of `sync.every`",
        ),
        (
            ["sync={every: 2}", "runtime.max_staleness=1", "runtime.save_every=1"],
            "(?s)runtime.save_every.*is 1, no multiple of `sync.every`",
        ),
        ([RAY, "runtime.autoscale={policy: {min: 2, max: 1}}"], r"autoscale\.policy\.max: is 1, and min is 2"),
        ([RAY, "runtime.autoscale={policy: {max: 2, free: 0.9}}"], r"policy\.free: is 0\.9, and busy is 0\.8"),
        ([RAY, "runtime.autoscale={polcy: {max: 2}}"], "is no model that samples or scores.*did you mean 'policy'"),
        ([RAY, "runtime.autoscale={trainer: {max: 2}}"], "is no model that samples or scores"),
        ([RAY, TOGETHER, "runtime.autoscale={policy: {max: 2}}"], "shares its devices"),
        ("runtime.autoscale={policy: {max: 2}}", "only on Ray"),
    ],
}


@pytest.mark.parametrize(
    ("algorithm", "overrides", "message"),
    [(algorithm, *case) for algorithm, cases in REFUSED.items() for case in cases],
    ids=lambda value: " ".join([value] if isinstance(value, str) else value)[:60],
)
def test_what_cannot_work_is_refused(home, algorithm, overrides, message):
    with pytest.raises(ValueError, match=message):
        prepare(configured(home, algorithm, *([overrides] if isinstance(overrides, str) else overrides)))


def test_a_setting_is_read_by_a_model_that_is_like_another(home):
    plan = prepare(configured(home, "grpo", "models.policy.updates_per_batch=2"))
    assert plan.models["trainer"].config.updates_per_batch == 2


def own_loss(x: LossInput) -> LossOutput:
    return LossOutput(-x.logprobs)


# ---- models that would never learn


@pytest.mark.parametrize("model", ["trainer", "value"])
def test_a_model_that_waits_as_long_as_the_run_lasts(home, model):
    prepare(configured(home, "ppo", f"models.{model}.learns_after=3"))
    for steps in (4, 5):
        config = configured(home, "ppo", f"models.{model}.learns_after={steps}")
        with pytest.raises(ValueError, match=rf"models.{model}.learns_after is {steps}, and the run has 4 steps"):
            prepare(config)


def test_epochs_too_are_counted(home):
    config = settings(home, "sft")  # 24 rows by 4 make 6 steps
    del config["runtime"]["steps"]
    with pytest.raises(ValueError, match=r"models.trainer.learns_after is 6, and the run has 6 steps"):
        run(config, "models.trainer.learns_after=6")


# ---- guards


def test_a_bound_on_the_entropy_needs_a_loss_that_measures_it(home):
    bound = "runtime.guards.min_entropy=0.5"
    with pytest.raises(
        ValueError, match=r"min_entropy is 0.5, and the loss `policy_gradient` .*set loss.measure_entropy: true$"
    ):
        prepare(configured(home, "grpo", bound))
    prepare(configured(home, "grpo", bound, "loss.measure_entropy=true"))
    prepare(configured(home, "grpo", bound, "loss.entropy_coef=0.01"))
    with pytest.raises(ValueError, match=r"set models.trainer.loss.measure_entropy: true"):
        prepare(configured(home, "grpo", bound, "models.trainer.loss={fn: cispo}"))
    prepare(configured(home, "sft", bound, "loss={fn: 'tests.launch.test_validate:own_loss'}"))  # may report it


# ---- environments


def test_self_play_with_pairs(home):
    prepare(configured(home, "grpo", *GAME, WARM, "runtime.eval_samples=2"))
    config = settings(home, "grpo")
    del config["data"]["eval"]  # nobody evaluates
    prepare(load_config(config, GAME))


def search(query: str, *, index: str) -> str:
    """A tool that has to be told its index."""
    return index + query


def solve(client, row, *, tries: int = 1):
    """An agent."""


def test_environments_with_what_they_name(home):
    right = [f"{{fn: '{SEARCH}', index: a}}", "calculator"]
    template = "data.chat_template='{{ tools }}{{ messages }}'"
    prepare(configured(home, "grpo", template, f"rollout={{fn: tool_use, tools: [{', '.join(right)}]}}"))
    prepare(configured(home, "grpo", "rollout={fn: agent, run: 'tests.launch.test_validate:solve'}"))


# ---- room for the longest response


@pytest.mark.parametrize(("algorithm", "reader"), [("grpo", "trainer"), ("rloo", "reference"), ("ppo", "value")])
def test_a_response_that_no_micro_batch_holds_is_refused(home, algorithm, reader):
    small = f"models.{reader}.max_tokens_per_micro=64"
    said = rf"models\.{reader}\.max_tokens_per_micro is 64, and a response may have 64 tokens"
    with pytest.raises(ValueError, match=said):
        prepare(configured(home, algorithm, small, "models.policy.sampling.max_new_tokens=64"))
    prepare(configured(home, algorithm, small, "models.policy.sampling.max_new_tokens=63"))


@pytest.mark.parametrize(("pairs", "together"), [("best_worst", 2), ("all_pairs", 4)])
def test_what_a_loss_compares_shares_a_micro_batch(home, pairs, together):
    small = [f"pairs={pairs}", "models.trainer.max_tokens_per_micro=100"]
    share = 100 // together
    said = rf"is 100, {share} for each of the {together} that its loss compares, and a response may have {share} tokens"
    with pytest.raises(ValueError, match=said):
        prepare(configured(home, "online_dpo", *small, f"models.policy.sampling.max_new_tokens={share}"))
    prepare(configured(home, "online_dpo", *small, f"models.policy.sampling.max_new_tokens={share - 1}"))


def test_functions_read_text_of_any_length(home):
    budget = "models.trainer.max_tokens_per_micro=null"
    prepare(configured(home, "grpo", budget, "models.policy.sampling.max_new_tokens=20000"))


def test_a_budget_for_a_group_has_a_token_for_each_sample(home):
    with pytest.raises(ValueError, match=r"rollout.group_tokens is 3 and runtime.samples_per_prompt 4.*make it 4"):
        prepare(configured(home, "grpo", "rollout.group_tokens=3"))
    prepare(configured(home, "grpo", "rollout.group_tokens=4"))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "online_dpo"])
def test_a_policy_is_not_trained_on_a_penalised_distribution(home, algorithm):
    config = configured(home, algorithm, "models.policy.sampling.repetition_penalty=1.1")
    with pytest.raises(ValueError, match=r"models\.policy\.sampling\.repetition_penalty is 1\.1: .* models\.trainer"):
        prepare(config)
    prepare(configured(home, algorithm, "runtime.eval_sampling.repetition_penalty=1.1"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["sync=broadcast", RAY],
        ["sync=disk", TOGETHER],
        ["sync=shared_memory"],
        ["sync=cuda_ipc", RAY, *ONE_EACH, TOGETHER],
    ],
)
def test_a_transport_that_can_serve_the_placement(home, overrides):
    prepare(configured(home, "grpo", *overrides))
