"""The typed schema of a run. All defaults are declared here or in a recipe's ``defaults``.

Open `run_config.py` first (RunConfig). Unknown keys are refused, except in a section that configures a function
(``Function``): there the function's keyword-only arguments are the schema, checked by coalign.config.functions.
"""

from coalign.config.schema.data import DataConfig, ImagesConfig, SourceConfig
from coalign.config.schema.generator import GeneratorSettings, NativeConfig, SamplingConfig, TransformersConfig
from coalign.config.schema.model import (
    KEYS_OF_WEIGHTS,
    PARALLEL,
    BatchSettings,
    LoraConfig,
    ModelConfig,
    ScoreAt,
    ScorerSettings,
    VisionConfig,
    matches_layer,
)
from coalign.config.schema.rollout import (
    CurriculumConfig,
    FilterConfig,
    GuardsConfig,
    ReplayConfig,
    RolloutConfig,
)
from coalign.config.schema.run_config import PtxConfig, RunConfig
from coalign.config.schema.runtime import (
    AutoscaleConfig,
    EarlyStopConfig,
    EvalSamplingConfig,
    ProfileConfig,
    RuntimeConfig,
    SyncConfig,
    TrackerConfig,
)
from coalign.config.schema.section import (
    FUNCTIONS,
    ContinuationSetting,
    DrawSetting,
    Function,
    InputPath,
    LossConfig,
    NoEffect,
    OutputPath,
    RewardConfig,
    Section,
)
from coalign.config.schema.trainer import EmaConfig, OptimizerConfig, TrainerSettings

__all__ = [
    "FUNCTIONS",
    "KEYS_OF_WEIGHTS",
    "PARALLEL",
    "AutoscaleConfig",
    "BatchSettings",
    "ContinuationSetting",
    "CurriculumConfig",
    "DataConfig",
    "DrawSetting",
    "EarlyStopConfig",
    "EmaConfig",
    "EvalSamplingConfig",
    "FilterConfig",
    "Function",
    "GeneratorSettings",
    "GuardsConfig",
    "ImagesConfig",
    "InputPath",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "NativeConfig",
    "NoEffect",
    "OptimizerConfig",
    "OutputPath",
    "ProfileConfig",
    "PtxConfig",
    "ReplayConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "RuntimeConfig",
    "SamplingConfig",
    "ScoreAt",
    "ScorerSettings",
    "Section",
    "SourceConfig",
    "SyncConfig",
    "TrackerConfig",
    "TrainerSettings",
    "TransformersConfig",
    "VisionConfig",
    "matches_layer",
]
