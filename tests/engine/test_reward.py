"""Several rewards at once: what is combined, what fails, what is remembered, and whole runs."""

import json
import math

import pytest
import torch

from coalign import evaluate, load_config
from coalign.backends.base import Module
from coalign.cluster.local import LocalCluster
from coalign.config.errors import ConfigError
from coalign.config.schema import FUNCTIONS, ModelConfig, RewardConfig, RunConfig
from coalign.data.batch import Batch
from coalign.engine.reward import Reward, _RewardTerm, combine_rewards
from coalign.launch.check import check
from coalign.launch.plan import _find_turn_weight, prepare
from coalign.report.display import Display
from coalign.rewards.calls import RewardError
from coalign.roles import Context
from coalign.types import Moments, Stat, Status, Total
from tests.runs import ROOT, metrics, run, run_to_end, samples, settings
from tests.tiny import tiny_reward_model_dir, tiny_tokenizer

NAN = math.nan


def responses(*told, group=(0, 0, 1, 1), status=(0, 0, 0, 0)):
    """Sequences of one token; ``told`` is what the models of the tests below say of each."""
    n = len(group)
    return Batch(
        torch.ones(n),
        {"tokens": torch.zeros(n, dtype=torch.int32), "loss_mask": torch.ones(n, dtype=torch.bool)},
        {
            "group": torch.tensor(group),
            "index": torch.arange(n, dtype=torch.int32),
            "prompt_length": torch.zeros(n, dtype=torch.int32),
            "status": torch.tensor(status, dtype=torch.uint8),
            "rows": [dict(zip(("kind", "terse"), values, strict=False)) for values in zip(*told, strict=True)],
        },
    )


def scored(**values):
    return Batch(torch.ones(4), {}, {f"reward/{name}": torch.tensor(own) for name, own in values.items()})


# ---- one combination


def test_columns_and_metrics():
    parts = scored(kind=[1.0, 2.0, 3.0, 4.0]), scored(terse=[0.0, 1.0, 0.0, 1.0])
    terms = [_RewardTerm("kind", 1.0), _RewardTerm("terse", -2.0, clip=0.5)]
    batch, stats = combine_rewards(responses([0] * 4), *parts, terms=terms, into="reward")
    assert set(batch.sequence) == {"reward", "reward/kind", "reward/terse", "status"} and not batch.token
    assert batch["reward"].tolist() == [1.0, 1.0, 3.0, 3.0] and batch["reward"].dtype == torch.float32
    assert batch["reward/terse"].tolist() == [0.0, 1.0, 0.0, 1.0]  # as it came
    assert batch["status"].tolist() == [0] * 4 and batch["status"].dtype == torch.uint8
    assert stats == {
        "reward/kind/mean": Stat(10.0, 4.0),
        "reward/kind/std": Moments(4.0, 2.5, 5.0),
        "reward/terse/mean": Stat(2.0, 4.0),
        "reward/terse/std": Moments(4.0, 0.5, 1.0),
    }
    batch, stats = combine_rewards(responses([0] * 4), *parts, terms=terms, into="baseline")
    assert set(batch.sequence) == {"baseline", "baseline/kind", "baseline/terse", "status"}
    assert set(stats) == {f"baseline/{name}/{what}" for name in ("kind", "terse") for what in ("mean", "std")}


@pytest.mark.parametrize("lacking", [NAN, math.inf, -math.inf])
def test_a_row_that_lacks_a_part_is_an_error_and_never_a_number(lacking):
    parts = scored(kind=[1.0, 3.0, lacking, 5.0], seen=[NAN] * 4)
    terms = [_RewardTerm("kind", 2.0, "batch"), _RewardTerm("seen", 0.0)]
    batch, stats = combine_rewards(responses([0] * 4), parts, terms=terms, into="reward")
    assert batch["status"].tolist() == [Status.OK, Status.OK, Status.ERROR, Status.OK]
    # of the other three the mean is 3 and the variance 8/3
    scale = 2 / (8 / 3) ** 0.5
    assert batch["reward"][[0, 1, 3]].tolist() == pytest.approx([-2 * scale, 0.0, 2 * scale], abs=1e-4)
    assert batch["reward"].isnan().tolist() == batch["reward/kind"].isnan().tolist() == [False, False, True, False]
    assert stats["reward/kind/failed"] == Total(1.0) and stats["reward/seen/failed"] == Total(4.0)
    assert stats["reward/kind/mean"] == Stat(9.0, 3.0) and "reward/seen/mean" not in stats


def test_rows_that_are_not_at_their_end_are_left_alone():
    out = responses([0] * 4, status=[Status.ERROR, Status.TRUNCATED, Status.PARTIAL, Status.OK])
    parts = scored(kind=[9.0, 1.0, 9.0, 2.0])
    batch, stats = combine_rewards(out, parts, terms=[_RewardTerm("kind")], into="reward")
    assert torch.equal(batch["status"], out["status"])
    assert batch["reward"].nan_to_num(-1.0).tolist() == [-1.0, 1.0, -1.0, 2.0]
    assert stats["reward/kind/mean"] == Stat(3.0, 2.0) and "reward/kind/failed" not in stats


def test_if_no_row_has_a_reward_the_call_fails():
    parts, terms = scored(a=[NAN, NAN, 1.0, 1.0], b=[1.0, 1.0, NAN, NAN]), [_RewardTerm("a"), _RewardTerm("b")]
    with pytest.raises(RewardError, match="none of 4 samples has a reward; values that are missing: a 2, b 2"):
        combine_rewards(responses([0] * 4), parts, terms=terms, into="reward")
    out = responses([0] * 4, status=[Status.ERROR] * 4)
    assert combine_rewards(out, parts, terms=terms, into="reward")[0]["reward"].isnan().all()


def test_the_error_of_a_call_without_a_reward_says_what_failed_first():
    parts = scored(a=[NAN] * 4).with_(**{"reward/a/failure": ["", "raised: KeyError: 'answer'", "", ""]})
    terms = [_RewardTerm("a"), _RewardTerm("b")]
    with pytest.raises(RewardError, match="'a' first on group 0, row 1: raised: KeyError: 'answer'"):
        combine_rewards(responses([0] * 4), parts, scored(b=[1.0] * 4), terms=terms, into="reward")


def test_evaluation_gets_the_values_as_they_are():
    parts = scored(kind=[1.0, 2.0, 3.0, 4.0])
    terms = [_RewardTerm("kind", 0.5, "group", clip=0.1)]
    batch, _ = combine_rewards(responses([0] * 4, group=(-1, -1, -2, -2)), parts, terms=terms, into="reward")
    assert batch["reward"].tolist() == [0.5, 1.0, 1.5, 2.0]


# ---- calls in a row


class Told(Module):
    """A scorer that says what the row has under the model's name."""

    def forward_step(self, batch, *, into=None):
        return {into or "reward": torch.tensor([float(row[self.context.model]) for row in batch["rows"]])}


@pytest.fixture
def cluster():
    with LocalCluster(RunConfig(algorithm="none")) as cluster:
        yield cluster


def rewards(cluster, *parts):
    models = {}
    for part in parts:
        name = part["model"]
        model = ModelConfig(module="tests.engine.test_reward:Told", head="reward")
        models[name] = cluster.models.get(name) or cluster.spawn(name, model, Context(model=name))
    return Reward(cluster, [RewardConfig(**part) for part in parts], models)


RUNNING = ({"model": "kind", "normalise": "running"}, {"model": "terse", "weight": 10.0})


def test_running_moments_go_from_call_to_call(cluster):
    reward = rewards(cluster, *RUNNING)
    first = reward.forward_step(responses([1.0, 1.0, 3.0, 3.0], [0, 0, 0, 1])).result().fetch()
    assert first["reward"].tolist() == pytest.approx([-1, -1, 1, 1 + 10], abs=1e-4)
    second = reward.forward_step(responses([5.0, 5.0, 7.0, 7.0], [0, 0, 0, 0])).result().fetch()
    std = 5**0.5  # of 1, 1, 3, 3, 5, 5, 7, 7 around 4
    assert second["reward"].tolist() == pytest.approx([1 / std, 1 / std, 3 / std, 3 / std], abs=1e-4)
    assert reward.fetch_state(reward.snapshot()) == {"kind": {"count": 8.0, "mean": 4.0, "squares": 40.0}}


def test_evaluation_and_failures_leave_no_trace_in_the_moments(cluster):
    reward = rewards(cluster, *RUNNING)
    reward.forward_step(responses([100.0] * 4, [0] * 4, group=(-1, -1, -2, -2)))
    assert reward.fetch_state(reward.snapshot()) == {"kind": {"count": 0.0, "mean": 0.0, "squares": 0.0}}
    given = responses([1.0, 3.0, 100.0, 100.0], [0, 0, NAN, 0], status=(0, 0, 0, Status.ERROR))
    assert reward.forward_step(given).result().fetch()["status"].tolist() == [0, 0, 2, 2]
    assert reward.fetch_state(reward.snapshot()) == {"kind": {"count": 2.0, "mean": 2.0, "squares": 2.0}}


def test_what_samples_are_compared_with_is_normalised_as_they_are_and_not_remembered(cluster):
    reward = rewards(cluster, *RUNNING)
    samples = reward.forward_step(responses([1.0, 1.0, 3.0, 3.0], [0] * 4)).result().fetch()
    assert samples["reward"].tolist() == pytest.approx([-1, -1, 1, 1], abs=1e-4)  # mean 2, deviation 1
    greedy = reward.forward_step(responses([7.0, 2.0, 7.0, 2.0], [0] * 4), into="baseline").result().fetch()
    assert greedy["baseline"].tolist() == pytest.approx([5, 0, 5, 0], abs=1e-4)
    assert reward.fetch_state(reward.snapshot()) == {"kind": {"count": 4.0, "mean": 2.0, "squares": 4.0}}


def test_what_is_remembered_goes_on_to_the_bit(cluster):
    batches = [responses(torch.rand(4, generator=torch.Generator().manual_seed(i)).tolist(), [0] * 4) for i in range(4)]
    whole = rewards(cluster, *RUNNING)
    expected = [whole.forward_step(batch).result().fetch()["reward"] for batch in batches]
    before = rewards(cluster, *RUNNING)
    for batch in batches[:2]:
        before.forward_step(batch)
    after = rewards(cluster, *RUNNING)
    after.load_state_dict(json.loads(json.dumps(before.fetch_state(before.snapshot()))))
    found = [after.forward_step(batch).result().fetch()["reward"] for batch in batches[2:]]
    assert all(torch.equal(a, b) for a, b in zip(found, expected[2:], strict=True))
    assert after.fetch_state(after.snapshot()) == whole.fetch_state(whole.snapshot())


def test_a_part_that_is_new_begins_anew(cluster):
    reward = rewards(cluster, {"model": "kind", "normalise": "running", "name": "later"})
    reward.load_state_dict({"kind": {"count": 8.0, "mean": 4.0, "squares": 40.0}})
    assert reward.fetch_state(reward.snapshot())["later"]["count"] == 0.0
    plain = rewards(cluster, {"model": "kind"})
    plain.load_state_dict({"kind": {"count": 8.0, "mean": 4.0, "squares": 40.0}})
    assert plain.fetch_state(plain.snapshot()) == {}


def test_two_calls_are_not_normalised_each_for_itself(cluster):
    reward = rewards(cluster, {"model": "kind", "normalise": "batch"})
    with pytest.raises(ValueError, match=r"reward 'kind': .*'baseline'.*`running` or `none`"):
        reward.forward_step(responses([1.0] * 4), into="baseline")


# ---- what is refused, and what `coalign check` shows


def two_judges(directory, **runtime):
    """GRPO on a function and two reward models, of which `terse` has another tokenizer."""
    config = settings(directory, "grpo", **runtime)
    for name, seed in (("kind", 5), ("terse", 6)):
        path = directory / name
        if not path.exists():
            tiny_reward_model_dir(path, seed=seed, head_seed=seed)
        config["models"][name] = {"load": str(path), "head": "reward"}
    tiny_tokenizer(directory / "terse", chat_template="{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
    config["reward"] = [
        {"fn": "tests.digits:digits", "weight": 2.0},
        {"model": "kind", "normalise": "running", "clip": 3.0},
        {"model": "terse", "weight": 0.5, "normalise": "group"},
    ]
    return config


@pytest.mark.parametrize(
    ("parts", "weight"),
    [
        ([{"fn": "math"}], 0.0),
        ([{"fn": "episode"}, {"fn": "math", "weight": 3.0}], 1.0),
        ([{"fn": "coalign.rewards.rules:episode", "weight": 0.5, "name": "game"}, {"model": "kind"}], 0.5),
        ([{"fn": "episode", "normalise": "batch"}], 0.0),
        ([{"fn": "episode", "clip": 1.0}], 0.0),
    ],
)
def test_how_much_turns_count(parts, weight):
    models = {"kind": ModelConfig(head="reward")}
    assert _find_turn_weight(RunConfig(algorithm="ppo", reward=parts, models=models)) == weight


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("judges")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward[1].model=kin"], r"reward\[1\].model: there is no model 'kin'; did you mean 'kind'\?"),
        (["reward[1].model=trainer"], r"reward\[1\].model: models.trainer scores nothing: its head is `lm`"),
        (["reward[2].name=kind"], r"reward\[2\]: a second reward is called 'kind'"),
        (["reward[0].name=kind", "reward[1].name=kind"], r"reward\[1\]: a second reward is called 'kind'"),
        (["reward=[{fn: math, weight: 0}, {model: kind, weight: 0.0}]"], "reward: every part has weight 0"),
        (["reward[1].fn=math"], r"reward\[1\]: has both of `fn` .* and `model`"),
        (["reward[1].timeout=5.0"], r"reward\[1\].timeout: is for functions"),
        (["reward[1].words=[a]"], r"reward\[1\].words: is for functions"),
        (["reward[1].clip=0.0"], r"reward\[1\].clip: is 0.0; expected a number above 0"),
        (["reward[0].steep=1"], r"reward\[0\].steep: unknown argument"),
        (
            ["reward[0]={fn: cosine_length, max_tokens: 9, by: {fn: math, answer_kee: x}}"],
            r"reward\[0\].by.answer_kee: unknown argument of math",
        ),
        (["reward[0]={fn: pairwise, by: pairwise}"], r"reward\[0\].by.by: missing"),
        (["reward={fn: math}"], r"models.kind: `grpo` has no such model; .* `reward: \[{model: kind}\]`"),
        (["models.reward={head: reward}"], r"models.reward: is not among the parts of `reward`"),
        (["runtime.colocation=[[policy, reward]]"], r"there is no model 'reward'"),
    ],
)
def test_what_does_not_fit_is_refused(home, overrides, message):
    with pytest.raises(ConfigError, match=message):
        prepare(load_config(two_judges(home), overrides))


def test_models_of_the_reward_are_frozen_and_read_as_they_must(home):
    models = prepare(load_config(two_judges(home))).configs
    assert list(models) == ["policy", "trainer", "kind", "terse", FUNCTIONS]
    assert models["kind"].frozen and models["kind"].chat_template is None
    assert models["terse"].frozen and models["terse"].chat_template == "auto"
    own = prepare(load_config(two_judges(home), ["models.kind.chat_template=none"])).configs["kind"]
    assert own.chat_template == "none"
    assert load_config(two_judges(home), [f"runtime.colocation=[[policy, {FUNCTIONS}]]"]).runtime.colocation


def test_check_shows_the_composition(home, capsys):
    check(load_config(two_judges(home)), Display())
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "+2 × digits: function tests.digits:digits",
        "+1 × kind: model kind, normalised by running, within ±3",
        "+0.5 × terse: model terse (reads text with its own tokenizer), normalised by group",
        "reward_functions.forward_step ├─◀ policy.generate tokens └─▶ reward/digits",
        "observe_rewards",
        "└─▶ reward, reward/digits, reward/kind, reward/terse, status",
        "no problem found",
    ):
        assert part in shown


def test_the_example_fits(tmp_path, monkeypatch, capsys):
    two_judges(tmp_path)
    for name, value in {"GSM8K": "", "MODEL": "model", "VERIFIER": "kind", "HELPFUL": "terse"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    for split in ("train", "test"):
        (tmp_path / f"gsm8k_{split}.jsonl").write_text('{"question": "1+1=", "answer": "#### 2"}\n' * 4)
    check(load_config(str(ROOT / "examples" / "gsm8k_two_rewards.yaml")), Display())
    shown = capsys.readouterr().out
    assert "+0.5 × helpful: model helpful (reads text" in shown and "no problem found" in shown


# ---- whole runs


def test_a_run_with_two_models_and_a_function(tmp_path):
    config = two_judges(tmp_path, steps=3, eval_every=3)
    config["models"]["trainer"]["optimizer"] = {"lr": 2e-2}
    lines = [line for line in run_to_end(config) if "loss/value" in line]
    for line in lines:
        for name in ("digits", "kind", "terse"):
            assert math.isfinite(line[f"reward/{name}/mean"]) and line[f"reward/{name}/std"] >= 0
        assert line["reward/terse/cut"] == 0
    evaluated = [line for line in metrics(config) if "eval/mean" in line][-1]
    parts = [evaluated[f"eval/reward/{name}/mean"] for name in ("digits", "kind", "terse")]
    assert evaluated["eval/mean"] == pytest.approx(2.0 * parts[0] + parts[1] + 0.5 * parts[2], abs=1e-5)
    first = samples(config)[0]
    assert set(first["rewards"]) == {"digits", "kind", "terse"} and "<|im_end|>" not in first["response"]
    found = evaluate(config, quiet=True)
    assert all(f"eval/reward/{name}/mean" in found for name in ("digits", "kind", "terse"))


@pytest.mark.slow
def test_on_ray_a_run_is_the_same(tmp_path):
    config = two_judges(tmp_path, steps=2, eval_at_start=False)
    run(config)
    other = config | {"output": str(tmp_path / "ray"), "runtime": config["runtime"] | {"cluster": "ray"}}
    run(other)
    for here, there in zip(metrics(config), metrics(other), strict=True):
        for name in ("reward/mean", "reward/kind/mean", "reward/terse/mean"):
            assert there[name] == pytest.approx(here[name], abs=1e-5)
    state = json.loads((tmp_path / "ray" / "checkpoints" / "step_2" / "state.json").read_text())["rewards"]
    assert state["kind"]["count"] == 32
