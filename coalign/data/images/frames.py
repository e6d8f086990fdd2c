"""Pixels of a video's frames as the processors of Qwen2-VL, Qwen2.5-VL and Qwen3-VL make them.

transformers' classes need torchvision. Their formulas are used here: the size of frames, their normalisation, and the
patches of two frames. Pillow resizes frames, as it does images. All frames of a row are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
# type of model -> defaults of its processor; `limits` says whether pixels are limited per frame or per video
VIDEO_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"limits": "frame", "patch_size": 14, **CLIP},
    "qwen2_5_vl": {"limits": "frame", "patch_size": 14, **CLIP},
    "qwen3_vl": {"limits": "video", "patch_size": 16, **HALVES},
    "qwen3_vl_moe": {"limits": "video", "patch_size": 16, **HALVES},
}


class FrameProcessor:
    """The processor of videos in ``directory``, for a model of ``model_type`` (a key of VIDEO_DEFAULTS)."""

    def __init__(self, directory: Path, model_type: str) -> None:
        settings = {"merge_size": 2, "temporal_patch_size": 2, "rescale_factor": 1 / 255}
        settings |= VIDEO_DEFAULTS[model_type] | _read_settings(directory)
        self._unit = VIDEO_DEFAULTS[model_type]["limits"]
        self.patch_size, self.merge_size = settings["patch_size"], settings["merge_size"]
        self.temporal_patch_size = settings["temporal_patch_size"]
        self.factor, self.mean, self.std = settings["rescale_factor"], settings["image_mean"], settings["image_std"]
        size, token = settings.get("size") or {}, (VIDEO_DEFAULTS[model_type]["patch_size"] * 2) ** 2
        self.min_pixels = settings.get("min_pixels") or size.get("shortest_edge") or 128 * token
        self.max_pixels = settings.get("max_pixels") or size.get("longest_edge") or 768 * token
        if settings.get("cap_pixels_per_frame"):
            raise ValueError(f"{directory}: `cap_pixels_per_frame` of videos is not supported; set it to false there")
        self.identity = [self._unit, self.min_pixels, self.max_pixels, self.patch_size, self.merge_size]
        self.identity += [self.temporal_patch_size, self.factor, self.mean, self.std]

    def fit(self, size: tuple[int, int], frames: int) -> tuple[int, int]:
        """Return the width and height that frames of this size get. ValueError for one that is too narrow."""
        width, height = size
        factor = self.patch_size * self.merge_size
        limits = {"factor": factor, "min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        resize = _find_resize(self._unit)
        more = {} if self._unit == "frame" else {"num_frames": frames, "temporal_factor": self.temporal_patch_size}
        height, width = resize(height=height, width=width, **limits, **more)
        return width, height

    def measure(self, size: tuple[int, int], frames: int) -> tuple[int, int, int]:
        """Return the grid of patches: steps of time, rows, columns."""
        width, height = self.fit(size, frames)
        return -(-frames // self.temporal_patch_size), height // self.patch_size, width // self.patch_size

    def prepare(self, frames: Sequence[Image]) -> dict[str, Tensor]:
        """Return the vision tower's inputs for RGB frames of one size, by the names that it has for images."""
        from PIL import Image as module

        size = self.fit(frames[0].size, len(frames))
        resized = [frame.resize(size, module.Resampling.BICUBIC) for frame in frames]
        grid = self.measure(frames[0].size, len(frames))
        values = torch.from_numpy(np.stack([np.asarray(frame) for frame in resized])).permute(0, 3, 1, 2).float()
        mean, std = (torch.tensor(channels)[:, None, None] for channels in (self.mean, self.std))
        values = (values * self.factor - mean) / std
        values = torch.cat([values, values[-1:].expand(grid[0] * self.temporal_patch_size - len(values), -1, -1, -1)])
        return {"pixel_values": self._cut(values, grid), "image_grid_thw": torch.tensor([grid])}

    def _cut(self, values: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """[frames, 3, H, W] -> [patches, 3 · temporal · patch²]; patches that are merged are neighbours."""
        steps, rows, columns = grid
        size, merged = self.patch_size, self.merge_size
        cut = values.view(
            steps, self.temporal_patch_size, 3, rows // merged, merged, size, columns // merged, merged, size
        )
        return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(steps * rows * columns, -1)


def _read_settings(directory: Path) -> dict[str, Any]:
    """Read the settings of videos: from their own file, from the processor's section, or from those of images."""
    from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME

    def read(name: str) -> dict[str, Any]:
        file = directory / name
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    return read(VIDEO_PROCESSOR_NAME) or read(PROCESSOR_NAME).get("video_processor") or read(IMAGE_PROCESSOR_NAME)


def _find_resize(unit: str) -> Callable[..., tuple[int, int]]:
    if unit == "frame":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        return smart_resize
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_video

    return smart_resize_video
