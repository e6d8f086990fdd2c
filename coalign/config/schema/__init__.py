"""The typed schema of a run. Every default lives here or in a recipe's ``defaults``, and nowhere else.

Unknown keys are refused (``extra="forbid"``) except where a section configures a function: there (``Function``) the
function's keyword-only arguments are the schema, checked by coalign.config.functions. Imports no torch.
"""

from coalign.config.schema.base import Function, Input, NoEffect, Section
from coalign.config.schema.data import DataConfig, SourceConfig
from coalign.config.schema.functions import FUNCTIONS, LossConfig, RewardConfig
from coalign.config.schema.model import PARALLEL, EmaConfig, LoraConfig, ModelConfig, OptimizerConfig
from coalign.config.schema.observing import ProfileConfig
from coalign.config.schema.pipeline import (
    STAGES,
    GenerateConfig,
    JudgeConfig,
    PipelineConfig,
    ScoreConfig,
    SelectConfig,
    StageConfig,
)
from coalign.config.schema.rollout import CurriculumConfig, FilterConfig, GuardsConfig, ReplayConfig, RolloutConfig
from coalign.config.schema.run import PtxConfig, RunConfig
from coalign.config.schema.runtime import EarlyStopConfig, EvalSamplingConfig, RuntimeConfig
from coalign.config.schema.sampling import NativeConfig, SamplingConfig
from coalign.config.schema.serving import ServeConfig
from coalign.config.schema.sync import SyncConfig

__all__ = [
    "FUNCTIONS",
    "PARALLEL",
    "STAGES",
    "CurriculumConfig",
    "DataConfig",
    "EarlyStopConfig",
    "EmaConfig",
    "EvalSamplingConfig",
    "FilterConfig",
    "Function",
    "GenerateConfig",
    "GuardsConfig",
    "Input",
    "JudgeConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "NativeConfig",
    "NoEffect",
    "OptimizerConfig",
    "PipelineConfig",
    "ProfileConfig",
    "PtxConfig",
    "ReplayConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "RuntimeConfig",
    "SamplingConfig",
    "ScoreConfig",
    "Section",
    "SelectConfig",
    "ServeConfig",
    "SourceConfig",
    "StageConfig",
    "SyncConfig",
]
