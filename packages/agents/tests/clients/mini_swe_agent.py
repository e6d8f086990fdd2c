"""mini-swe-agent with its own prompts, on this machine."""

import os
from pathlib import Path

import minisweagent
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

config = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / "mini.yaml").read_text())
prompts = {key: config["model"][key] for key in config["model"] if key.endswith("_template")}
address = {"api_base": os.environ["OPENAI_BASE_URL"]}
model = LitellmModel(model_name="openai/policy", model_kwargs=address, cost_tracking="ignore_errors", **prompts)
templates = {key: config["agent"][key] for key in ("system_template", "instance_template")}
DefaultAgent(model, LocalEnvironment(), **templates).run("Say hello.")
