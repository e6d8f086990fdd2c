"""A model's own processor of images: pixels for the model, and the placeholders that stand for them in a text.

The classes are transformers'. They are used without their tokenizer and without their video processors, which need
torchvision (`frames.py` replaces them); Pillow resizes images, in every process alike.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from coalign.config.schema import ImagesConfig
from coalign.data.images.frames import VIDEO_DEFAULTS, FrameProcessor
from coalign.data.images.image_files import NEEDS_PILLOW, ImageFile
from coalign.data.images.placeholders import REASON
from coalign.data.sources import BadRow
from coalign.files import describe_problem

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class _ImageShape:
    """Everything that follows from the size of an image alone.

    ``text`` represents it in a prompt, with ``features`` placeholders. ``grid``: the patches that the vision tower
    reads (frames or tiles, rows, columns). ``seconds`` between two steps of a video's grid.
    """

    text: str
    features: int
    grid: tuple[int, int, int]
    seconds: float | None = None


class ImageProcessor:
    """The processor in ``directory``, a model's, for texts of ``tokenizer``.

    ``placeholder``: the text that a chat template writes for an image. ``token``: the id that stands for a feature.
    ``frames``: the processor of videos; None for a model of images alone. Raises ValueError for a model without a
    processor of images, ImportError for a package that it needs.
    """

    def __init__(self, directory: str | Path, tokenizer: PreTrainedTokenizerBase, settings: ImagesConfig) -> None:
        from transformers import AutoConfig

        self.directory, self.tokenizer, self.settings = Path(directory), tokenizer, settings
        self.config = AutoConfig.from_pretrained(directory)
        token = getattr(self.config, "image_token_id", None)
        if token is None:
            raise ValueError(
                f"data.images: {directory} is a model of the type `{self.config.model_type}`, which reads no images"
            )
        self.token: int = token
        self._processor, self.identity = _load_processor(self.directory, tokenizer, self.config)
        self.placeholder: str = self._processor.image_token
        self._arguments = self._processor._merge_kwargs(
            self._processor.valid_processor_kwargs, tokenizer_init_kwargs={}, return_tensors="pt"
        )["images_kwargs"]
        self._shapes: dict[tuple[int, int], _ImageShape] = {}
        self.tokens, self.frames, self.video_placeholder = {token}, None, ""
        if self.config.model_type in VIDEO_DEFAULTS:
            self.frames = self._processor.video_processor = FrameProcessor(self.directory, self.config.model_type)
            self.video_placeholder = self._processor.video_token
            self.tokens.add(self.config.video_token_id)
            self.identity += json.dumps([*self.frames.identity, settings.video_fps])

    def measure_file(self, file: ImageFile) -> _ImageShape:
        """Return the placeholders and the patches of an image or a video. BadRow (image) for one of unusable sizes."""
        if not file.is_video:
            try:
                return self.measure(file.size)
            except Exception as error:  # processors raise anything for a size that they do not expect
                width, height = file.size
                problem = describe_problem(error)
                raise BadRow(
                    f"the image {file.path} ({width} x {height} pixels) is nothing for the processor in "
                    f"{self.directory}: {problem}",
                    REASON,
                ) from error
        assert self.frames is not None
        try:
            grid = self.frames.measure(self._fit(file.size), file.frames)
        except (ValueError, ArithmeticError) as error:
            raise BadRow(f"the video {file.path} cannot be read: {error}", REASON) from error
        rate = file.rate or self.settings.video_fps
        text = self.write_video(grid, file.frames, rate)
        tokens = cast(list[int], self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        count = tokens.count(self.config.video_token_id)
        return _ImageShape(text, count, grid, self.frames.temporal_patch_size / rate)

    def write_video(self, grid: tuple[int, int, int], frames: int, rate: float) -> str:
        """Return the text of the model's own processor for a video, which may name times between its placeholders."""
        from transformers.video_utils import VideoMetadata

        times = VideoMetadata(total_num_frames=frames, fps=rate, frames_indices=[*range(frames)])
        inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [times]}
        return self._processor.replace_video_token(inputs, 0)

    def prepare_video(self, frames: Sequence[Image]) -> dict[str, Tensor]:
        """Return the vision tower's inputs for the RGB frames of a video, by the names that it has for images."""
        assert self.frames is not None
        return self.frames.prepare([self._scale(frame) for frame in frames])

    def measure(self, size: tuple[int, int]) -> _ImageShape:
        """Return the placeholders and the patches of an image of this (width, height).

        Raises what the processor raises for a size that it cannot use.
        """
        size = self._fit(size)
        if size not in self._shapes:
            from PIL import Image

            inputs, text = self._process(Image.new("RGB", size))
            tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            features = cast(list[int], tokens).count(self.token)
            self._shapes[size] = _ImageShape(text, features, self._find_grid(inputs))
        return self._shapes[size]

    def prepare(self, image: Image) -> dict[str, Tensor]:
        """Return the vision tower's inputs for an RGB image: `pixel_values` and their sizes."""
        inputs, _ = self._process(self._scale(image))
        return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}

    def _scale(self, image: Image) -> Image:
        from PIL import Image as module

        size = self._fit(image.size)
        return image if size == image.size else image.resize(size, module.Resampling.BICUBIC)

    def _process(self, image: Image) -> tuple[Mapping[str, Any], str]:
        images = self._processor.prepare_inputs_layout(images=[image], text=self.placeholder)[0]
        inputs, (text,) = self._processor._process_images(images, **self._arguments)
        return inputs, text

    def _fit(self, size: tuple[int, int]) -> tuple[int, int]:
        max_pixels, (width, height) = self.settings.max_pixels, size
        if max_pixels is None or width * height <= max_pixels:
            return size
        scale = math.sqrt(max_pixels / (width * height))
        return max(1, int(width * scale)), max(1, int(height * scale))

    def _find_grid(self, inputs: Mapping[str, Any]) -> tuple[int, int, int]:
        if "image_grid_thw" in inputs:
            frames, rows, columns = inputs["image_grid_thw"][0].tolist()
            return frames, rows, columns
        *outer, _, height, width = inputs["pixel_values"].shape
        patch = torch.tensor(getattr(self.config.vision_config, "patch_size", 1)).expand(2).tolist()
        return math.prod(outer), height // patch[0], width // patch[1]


def _load_processor(directory: Path, tokenizer: PreTrainedTokenizerBase, config: Any) -> tuple[Any, str]:
    """Build the processor without its video processor. Returns it, and a text that identifies its settings."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError(NEEDS_PILLOW) from error
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    try:
        cls: Any = PROCESSOR_MAPPING[type(config)]
        image_processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(
            f"data.images: {directory} has no processor of images that transformers can load "
            f"(preprocessor_config.json): {str(error).splitlines()[0]}"
        ) from error

    class ImageOnlyProcessor(cls):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    parameters = inspect.signature(cls.__init__).parameters
    settings = {key: value for key, value in cls.get_processor_dict(directory)[0].items() if key in parameters}
    settings = {key: value for key, value in settings.items() if key not in ("chat_template", *cls.get_attributes())}
    components = dict.fromkeys(cls.get_attributes()) | {"image_processor": image_processor, "tokenizer": tokenizer}
    processor = ImageOnlyProcessor(**components, **settings)
    if getattr(processor, "image_token", None) is None or not hasattr(cls, "replace_image_token"):
        raise ValueError(f"data.images: {cls.__name__} does not say what stands for an image in a text")
    return processor, json.dumps([cls.__name__, image_processor.to_dict(), settings], sort_keys=True, default=str)
