"""The typed schema of a run. Every default lives here or in a recipe's ``defaults``, and nowhere else.

Unknown keys are refused (``extra="forbid"``) except where a section configures a function: there (``Function``) the
function's keyword-only arguments are the schema, checked by coalign.config.functions. Imports no torch.
"""

from coalign.config.schema.base import (
    FUNCTIONS,
    DrawSetting,
    Function,
    InputPath,
    LossConfig,
    NoEffect,
    RewardConfig,
    Section,
)
from coalign.config.schema.data import DataConfig, SourceConfig
from coalign.config.schema.model import PARALLEL, EmaConfig, LoraConfig, ModelConfig, OptimizerConfig
from coalign.config.schema.pipeline import (
    STAGES,
    GenerateConfig,
    JudgeConfig,
    PipelineConfig,
    ScoreConfig,
    SelectConfig,
    ServeConfig,
    StageConfig,
)
from coalign.config.schema.rollout import (
    CurriculumConfig,
    FilterConfig,
    GuardsConfig,
    NativeConfig,
    ReplayConfig,
    RolloutConfig,
    SamplingConfig,
)
from coalign.config.schema.run import PtxConfig, RunConfig
from coalign.config.schema.runtime import EarlyStopConfig, EvalSamplingConfig, ProfileConfig, RuntimeConfig, SyncConfig

__all__ = [
    "FUNCTIONS",
    "PARALLEL",
    "STAGES",
    "CurriculumConfig",
    "DataConfig",
    "DrawSetting",
    "EarlyStopConfig",
    "EmaConfig",
    "EvalSamplingConfig",
    "FilterConfig",
    "Function",
    "GenerateConfig",
    "GuardsConfig",
    "InputPath",
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
