"""What a vision-language model of transformers computes of images: embeddings, positions, and ids it must not say.

Nothing here goes by a model's name. A family is what its classes declare: `get_image_features`, `get_rope_index`
(M-RoPE), `deepstack_visual_embeds`, `token_type_ids` (an image's tokens see each other). LanguageModel.check compares
the result with the model's own forward, and refuses a family that needs more.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coalign.backends.packing import Layout, pack
from coalign.backends.vision_language import find_body, has_towers
from coalign.data.batch import Batch
from coalign.data.images.pixels import PixelCache, Pixels
from coalign.data.images.probe import draw_picture, make_probe
from coalign.data.images.processor import ImageProcessor
from coalign.types import ImageSpan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


FORBIDDEN = -1e30  # added to a logit: its probability is 0, and 0 times its log-prob is not nan
PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
# What modules are called that map a tower's features to embeddings.
PROJECTORS = ("projector", "connector", "merger", "downsample", "embed_vision")
BLANK = "32x32"  # the size of a picture whose features nobody reads
IMAGE, VIDEO = 1, 2  # `mm_token_type_ids`
VIDEO_ARGUMENTS = {"pixel_values": "pixel_values_videos", "image_grid_thw": "video_grid_thw"}  # for images -> videos
Features = list[Tensor]  # an image's [n, H] for the first layer, then what is added to the first layers (deepstack)


def list_placeholder_ids(config: PretrainedConfig, vocabulary: int) -> list[int]:
    """The ids that stand for images, videos or sounds, which a model with so many tokens must not say."""
    ids = {getattr(config, name, None) for name in PLACEHOLDERS}
    return sorted(token for token in ids if token is not None and token < vocabulary)


def list_plain_tokens(config: PretrainedConfig, vocabulary: int, count: int) -> list[int]:
    """``count`` ids that stand for no image, for probes; they repeat in a small vocabulary."""
    placeholders = list_placeholder_ids(config, vocabulary)
    plain = [token for token in range(min(vocabulary, count + len(PLACEHOLDERS))) if token not in placeholders]
    return [plain[number % len(plain)] for number in range(count)]


def find_owner(model: PreTrainedModel) -> Any:
    """The module that makes features of images. NotImplementedError for a model without one."""
    for module in (model.base_model, model):
        if has_towers(model.config) and hasattr(module, "get_image_features"):
            return module
    raise NotImplementedError(f"{type(model).__name__} has no `get_image_features`, so it reads no images here")


def has_two_way_images(model: PreTrainedModel) -> bool:
    """Whether the tokens of an image see each other, also those that follow (Gemma 3)."""
    return "token_type_ids" in inspect.signature(find_owner(model).forward).parameters


def name_components(model: PreTrainedModel) -> dict[str, str]:
    """Say of each parameter whether it is of the `tower`, the `projector` or the `language` model."""
    head = model.get_output_embeddings() or getattr(model, "score", None)
    modules = (find_body(model), head, model.get_input_embeddings())
    language = {id(p) for module in modules if module is not None for p in module.parameters()}
    return {
        name: "language" if id(p) in language else "projector" if any(n in name for n in PROJECTORS) else "tower"
        for name, p in model.named_parameters()
    }


class ImageEmbedder:
    """Turns images into the embeddings that the language model of ``model`` reads for their placeholders. ``keep``:
    bytes of pixels to keep in memory. ``learns``, ``is_sharded``: the tower's gradients, or its collectives, are needed
    for every row, so it computes something for each. ``one_by_one``: features of an image do not depend on others."""

    def __init__(
        self,
        model: PreTrainedModel,
        processor: ImageProcessor,
        *,
        keep: int,
        learns: bool = False,
        is_sharded: bool = False,
        one_by_one: bool = False,
    ) -> None:
        self.processor, self.is_sharded, self.one_by_one = processor, is_sharded, one_by_one
        self.always = learns or is_sharded
        self.pixels = PixelCache(processor, keep)
        # In a list, since a module as an attribute of a module would give its weights other names.
        self._modules = [find_owner(model), find_body(model), model.get_input_embeddings()]
        owner, body, _ = self._modules
        self._feature_arguments = set(inspect.signature(owner.get_image_features).parameters)
        self._arguments = set(inspect.signature(owner.forward).parameters)
        self.has_deepstack = "deepstack_visual_embeds" in inspect.signature(body.forward).parameters
        self.has_two_way_images = has_two_way_images(model)
        self.has_axes = hasattr(owner, "get_rope_index")
        self.plain = list_plain_tokens(model.config, self._modules[2].num_embeddings, 16)
        self._cached_positions = lru_cache(maxsize=256)(self._compute_positions)

    # ---- features

    def encode(self, spans: Sequence[ImageSpan]) -> dict[str, Features]:
        """Compute the features of each image of ``spans``, once: {hash: [n, H] of each layer}. ValueError for an image
        of which the tower makes another number of features than there are placeholders."""
        sizes: dict[str, int] = {}
        images = {span.image: span for span in spans}
        for span in spans:
            sizes[span.image] = max(sizes.get(span.image, 0), span.first + span.length)
        pixels = {image: self.pixels.get(span) for image, span in images.items()}
        features: dict[str, Features] = {}
        for names in self._group(pixels):
            layers = self._compute([pixels[name] for name in names])
            counts = [sizes[name] for name in names]
            if (made := len(layers[0])) != sum(counts):
                paths = ", ".join(images[name].path or name for name in names)
                raise ValueError(f"the tower makes {made} features of {paths}, and {sum(counts)} have a place")
            by_image = zip(*(layer.split(counts) for layer in layers), strict=True)
            features |= dict(zip(names, map(list, by_image), strict=True))
        return features

    def _group(self, pixels: Mapping[str, Pixels]) -> list[list[str]]:
        """The names of images that the tower takes at once: those whose tensors can be joined."""
        if self.one_by_one:
            return [[name] for name in pixels]
        groups: dict[Any, list[str]] = {}
        for name, tensors in pixels.items():
            groups.setdefault(tensors["pixel_values"].shape[_find_axis(tensors) + 1 :], []).append(name)
        if self.is_sharded and len(groups) > 1:  # other ranks would wait for the collectives of one call
            raise NotImplementedError("the tower cannot take the images of a micro-batch at once: they differ in size")
        return [*groups.values()]

    def _compute(self, many: Sequence[Pixels]) -> Features:
        """The features of images, end to end: [n, H] of each layer."""
        owner, _, embeddings = self._modules
        parameter = next(p for p in owner.parameters() if p.is_floating_point() and not p.is_meta)
        device, dtype = parameter.device if embeddings.weight.is_meta else embeddings.weight.device, parameter.dtype
        names = self._feature_arguments.intersection(many[0])
        axis = _find_axis(many[0])
        inputs = {name: torch.cat([pixels[name] for pixels in many], axis).to(device) for name in names}
        inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
        out = owner.get_image_features(**inputs, return_dict=True)
        return [_flatten(layer) for layer in (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))]

    # ---- what the language model reads

    def embed(self, tokens: Tensor, spans: Sequence[ImageSpan], offset: int = 0) -> dict[str, Any]:
        """Arguments for the language model, for ``tokens`` i64[P]: a row with ``spans``, from position ``offset`` on.

        inputs_embeds [1, P, H]; with deepstack also where the features stand, and what is added there. Images without
        a placeholder among the tokens are not computed. ValueError for an image whose features are not as many as its
        placeholders in the row.
        """
        _, _, embeddings = self._modules
        # Before the embeddings, also where nobody reads them: all ranks compute, and reduce gradients, in one order.
        positions, layers = self.find_features(tokens, spans, offset)
        readable = tokens.index_fill(0, positions, 0)  # some ids are beyond the table
        row = place_features(embeddings(readable[None])[0], positions, layers)
        if self.has_deepstack and len(positions):
            mask = torch.zeros_like(tokens, dtype=torch.bool).index_fill(0, positions, True)
            added = [layer.to(row.dtype) for layer in layers[1:]]
            return {"inputs_embeds": row[None], "visual_pos_masks": mask[None], "deepstack_visual_embeds": added}
        return {"inputs_embeds": row[None]}

    def find_features(self, tokens: Tensor, spans: Sequence[ImageSpan], offset: int = 0) -> tuple[Tensor, Features]:
        """Compute the features of the placeholders among ``tokens`` (as in `embed`): their positions i64[n], and [n, H]
        of each layer. Without any, the features of an empty image are computed where a rank has to compute some."""
        here = sorted((p for s in spans if (p := _cut_span(s, offset, offset + len(tokens)))), key=lambda s: s.start)
        indices = [t - offset for span in here for t in range(span.start, span.stop)]
        positions = torch.tensor(indices, dtype=torch.int64, device=tokens.device)
        if not here:
            return positions, self._compute([self._blank]) if self.always else []
        needed = {span.image for span in here}
        features = self.encode([span for span in spans if span.image in needed])
        cut = ([layer[s.first : s.first + s.length] for layer in features[s.image]] for s in here)
        return positions, [torch.cat(layer) for layer in zip(*cut, strict=True)]

    @property
    def _blank(self) -> Pixels:
        """The smallest picture, whose features nobody reads."""
        return self.processor.prepare(draw_picture(BLANK))

    # ---- positions

    def find_positions(self, length: int, spans: Sequence[ImageSpan]) -> Tensor | None:
        """i64[3, length] of a sequence: M-RoPE's, in which an image takes fewer positions than tokens; None without."""
        if not self.has_axes:
            return None
        if not spans:
            return torch.arange(length).expand(3, -1)
        computed = self._cached_positions(tuple((s.start, s.length, s.grid, s.first, s.seconds) for s in spans))
        after = torch.arange(length - computed.shape[1]) + int(computed[0, -1]) + 1
        return torch.cat([computed, after.expand(3, -1)], 1)[:, :length]

    def find_shift(self, length: int, spans: Sequence[ImageSpan]) -> int:
        """By how much the rotary position of a token behind a prompt of ``length`` tokens is less than its index."""
        positions = self.find_positions(length + 1, spans)
        return 0 if positions is None else length - int(positions[0, -1])

    def _compute_positions(self, spans: tuple[tuple[int, int, tuple[int, int, int], int, float | None], ...]) -> Tensor:
        """i64[3, n] up to the token behind the last image; ``spans``: start, length, grid, first, seconds of each."""
        owner, *_ = self._modules
        if any(start == previous + length for (previous, length, *_), (start, *_) in pairwise(spans)):
            raise ValueError("two images stand side by side without a token between, which M-RoPE cannot tell apart")
        end = spans[-1][0] + spans[-1][1]
        token_types = torch.zeros(1, end + 1, dtype=torch.int32)
        grids: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
        for start, length, grid, first, seconds in spans:
            token_types[:, start : start + length] = IMAGE if seconds is None else VIDEO
            grids[seconds is not None] += [] if first else [grid]
        times = [seconds for *_, first, seconds in spans if seconds is not None and not first]
        more: dict[str, Any] = {"image_grid_thw": torch.tensor(grids[False])} if grids[False] else {}
        if times:
            more |= {"video_grid_thw": torch.tensor(grids[True]), "second_per_grid_ts": torch.tensor(times)}
        positions, _ = owner.get_rope_index(torch.zeros_like(token_types).long(), mm_token_type_ids=token_types, **more)
        return positions[:, 0]

    # ---- beside the model's own forward

    def list_plain_inputs(self, tokens: Tensor, spans: Sequence[ImageSpan]) -> dict[str, Any]:
        """The arguments of the model's own forward for one sequence i64[n], as its processor would make them."""
        token_types = torch.zeros_like(tokens)
        for span in spans:
            token_types[span.start : span.stop] = VIDEO if span.is_video else IMAGE
        inputs: dict[str, Any] = {"input_ids": tokens[None], "use_cache": False}
        media = [span for span in spans if not span.first]
        for pixel_group, renamed in (
            ([self.pixels.get(span) for span in media if not span.is_video], {}),
            ([self.pixels.get(span) for span in media if span.is_video], VIDEO_ARGUMENTS),
        ):
            for name in pixel_group[0] if pixel_group else ():
                if (argument := renamed.get(name, name)) in self._arguments:
                    joined = torch.cat([pixels[name] for pixels in pixel_group], _find_axis(pixel_group[0]))
                    inputs[argument] = joined.to(tokens.device)
        if "second_per_grid_ts" in self._arguments and (times := [s.seconds for s in media if s.is_video]):
            inputs["second_per_grid_ts"] = torch.tensor(times, device=tokens.device)
        names = [name for name in ("mm_token_type_ids", "token_type_ids") if name in self._arguments]
        return inputs | {name: token_types[None] for name in names}

    def make_probe(self) -> tuple[list[int], list[ImageSpan]]:
        """A prompt with two pictures of random pixels, and where they stand in it."""
        return make_probe(self.processor, self.plain)


def place_features(row: Tensor, positions: Tensor, layers: Features) -> Tensor:
    """Replace embeddings of ``row`` [P, H] by features. Those of an empty image add nothing, but have a gradient."""
    if len(positions):
        return row.index_copy(0, positions, layers[0].to(row.dtype))
    for layer in layers:
        row = row + layer.sum().to(row.dtype) * 0
    return row


def pack_with_images(images: ImageEmbedder, batch: Batch, *, share_prefix: bool) -> Layout:
    """The layout of ``batch`` for a model that sees by ``images``."""
    spans = batch.get("images") or [()] * len(batch)
    axes = [images.find_positions(n, row) for n, row in zip(batch.lengths.tolist(), spans, strict=True)]
    present = [row for row in axes if row is not None]
    return pack(
        batch,
        share_prefix=share_prefix,
        axes=torch.cat(present, 1) if present else None,
        two_way_images=images.has_two_way_images,
    )


def _cut_span(span: ImageSpan, start: int, stop: int) -> ImageSpan | None:
    """The part of a span between two positions of its row; None if there is none."""
    first, last = max(span.start, start), min(span.stop, stop)
    if first >= last:
        return None
    return replace(span, start=first, length=last - first, first=span.first + first - span.start)


def _find_axis(pixels: Pixels) -> int:
    """The dimension along which images are joined: the second one in [1, tiles, C, H, W], else the first."""
    return int(pixels["pixel_values"].dim() == 5)


def _flatten(features: Any) -> Tensor:
    """[n, H] of the features of several images, in any of the forms that transformers gives them."""
    if isinstance(features, list | tuple):
        return torch.cat([_flatten(feature) for feature in features])
    return features.flatten(0, -2)


@contextmanager
def install_embeddings(body: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Within this context ``body`` computes with these arguments in place of the embeddings of its tokens."""

    def replace_inputs(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "input_ids": None, **arguments}

    handle = body.register_forward_pre_hook(replace_inputs, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
