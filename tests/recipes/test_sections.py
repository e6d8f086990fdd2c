"""A recipe of one's own, written as README shows, does what the sections of its configuration say, or is refused."""

import inspect
import re
import textwrap
from contextlib import nullcontext

import pytest

from coalign import load_config
from coalign.config.errors import ConfigError
from coalign.engine.engine import Engine
from coalign.launch.check import check
from coalign.recipes.grpo import GRPO
from coalign.recipes.ppo import PPO
from coalign.report.display import Display
from coalign.roles import Rollout, Scorer, Trainable
from tests.runs import ROOT, run_to_end, settings, trace_calls, weights_hash

HERE = "tests.recipes.test_sections:"


class AsReadmeShows(Engine):
    models = {"policy": Rollout, "reference": Scorer, "reward": Scorer, "trainer": Trainable}
    sync = [("trainer", "policy")]
    defaults = GRPO.defaults
    roles = GRPO.roles  # without a reference where the loss reads none

    def env_flow(self, prompts):
        out = self.policy.generate(prompts)
        return self.join(out, self.reference.forward_step(out), self.reward.forward_step(out))

    def train_flow(self, batch):
        return self.trainer.train_step(self.apply(self.advantage, batch))


class OfGRPO(GRPO):
    env_flow, train_flow = AsReadmeShows.env_flow, AsReadmeShows.train_flow


class OfPPO(PPO):
    """PPO whose person has written the flow anew, without the value model's part in it."""

    def train_flow(self, batch):
        learned = self.apply(self.advantage, batch)
        return self.trainer.train_step(learned), self.value.train_step(learned)


class Deaf(GRPO):
    """Computes advantages of its own, and asks for no section."""

    def train_flow(self, batch):
        return self.trainer.train_step(self.apply(by_reward, batch))


class Unrewarded(Engine):
    """Has no use for `reward`: every response is worth its length."""

    models = {"policy": Rollout, "trainer": Trainable}
    sync = [("trainer", "policy")]
    evaluates = ("policy",)
    defaults = {"models": {"policy": {"module": "native"}, "trainer": {"module": "fsdp", "like": "policy"}}}

    def env_flow(self, prompts):
        return self.policy.generate(prompts)

    def train_flow(self, batch):
        return self.trainer.train_step(self.apply(by_length, batch))


class Twice(GRPO):
    def env_flow(self, prompts):
        again = self.policy.generate(prompts)
        out = self.policy.generate(prompts)
        return self.join(out, self.reward.forward_step(out)) if again else out


class OfEarlierVersion(GRPO):
    def env_flow(self, prompts):
        return self.generate(prompts)


def by_reward(reward, loss_mask, segment):
    return {"advantages": reward[segment].masked_fill(~loss_mask, 0.0)}


def by_length(loss_mask):
    return {"advantages": loss_mask.float()}


def configure(directory, algorithm, **sections):
    config = settings(directory, "grpo", steps=2, eval_at_start=False)
    return config | {"algorithm": algorithm, "output": str(directory / algorithm.rpartition(":")[2])} | sections


SECTIONS = {"truncated": {"fn": "mask_truncated"}, "covariance": {"fn": "clip_cov", "share": 0.5}}


@pytest.mark.parametrize("sections", [SECTIONS, {"rollout": {"round_tokens": 3}}], ids=["sections", "rounds"])
def test_the_same_flow_trains_the_same_weights(tmp_path, sections):
    hashes = set()
    for algorithm in ("grpo", f"{HERE}AsReadmeShows", f"{HERE}OfGRPO"):
        config = configure(tmp_path, algorithm, **sections)
        check(load_config(config), Display(quiet=True))
        lines = run_to_end(config)
        for line in lines if sections == SECTIONS else []:  # truncated samples are not trained on
            assert line["samples/truncated"] > 0 and line.get("tokens/trained", 0.0) < line["tokens/generated"]
        hashes.add(weights_hash(config, 2))
    assert len(hashes) == 1


def test_the_recipe_shapes_rewards_whatever_the_flow(tmp_path):
    hashes = set()
    for algorithm in ("ppo", f"{HERE}OfPPO"):
        config = configure(tmp_path, algorithm, kl={"fn": "FixedKL", "coef": 0.5}, truncated={"fn": "mask_truncated"})
        assert "kl" in run_to_end(config)[-1]
        hashes.add(weights_hash(config, 2))
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("algorithm", "section"),
    [
        ("Deaf", {"truncated": {"fn": "mask_truncated"}}),
        ("Deaf", {"covariance": {"fn": "clip_cov"}}),
        ("Deaf", {"advantage": {"fn": "group", "scale": "none"}}),
        ("AsReadmeShows", {"kl": {"fn": "FixedKL", "coef": 0.5}}),
        ("AsReadmeShows", {"pairs": {"fn": "best_worst"}}),
        ("Unrewarded", {"reward": [{"fn": "tests.digits:digits"}], "loss": {"fn": "policy_gradient"}}),
    ],
)
def test_what_no_flow_asks_for_is_refused(tmp_path, algorithm, section):
    config = configure(tmp_path, HERE + algorithm, **section)
    config["data"].pop("eval")
    with pytest.raises(ConfigError, match=rf"{next(iter(section))}: the flows of `{HERE}{algorithm}` never ask for it"):
        trace_calls(config)


@pytest.mark.parametrize(
    ("name", "sections", "message"),
    [
        (
            "Twice",
            {"rollout": {"round_tokens": 3}},
            r"calls `self\.policy\.generate\(prompts\)` once; this one calls it 2 t",
        ),
        ("OfEarlierVersion", {}, r"OfEarlierVersion: .* call `self\.policy\.generate\(prompts\)`"),
        ("Deaf", {}, None),  # defaults of a parent need not be read
    ],
)
def test_a_flow_is_tried_before_anything_loads(tmp_path, name, sections, message):
    expected = pytest.raises((ValueError, TypeError), match=message) if message else nullcontext()
    with expected:
        trace_calls(configure(tmp_path, HERE + name, **sections))


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_page_shows_the_flow_of_grpo(page):
    text = (ROOT / page).read_text()
    block = next(found for found in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def env_flow" in found)
    flows = [textwrap.dedent(inspect.getsource(method)).strip() for method in (GRPO.env_flow, GRPO.train_flow)]
    assert block.strip() == "\n\n".join(flows)
