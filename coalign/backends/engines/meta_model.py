"""The model that an engine in this process computes with: a transformers causal LM and the weights loaded into it.

It is built on the meta device and owns no memory until ``MetaModel.load`` adopts the tensors of another model (zero
copy) or copies them. The native engine and the one on transformers' cache share the classes of this file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from coalign.backends import pretrained
from coalign.backends.engines.contract import GenerationSession, InferenceEngine
from coalign.backends.engines.native.kernels import choose_compute_dtype
from coalign.backends.engines.request import Decoder
from coalign.backends.engines.rollout_module import RolloutModule
from coalign.backends.pretrained import build_model, building, choose_attention, find_auto_class, read_context_length
from coalign.backends.vision import ImageEmbedder
from coalign.backends.vision_language import drop_towers
from coalign.config.schema import ImagesConfig, ModelConfig
from coalign.data.images.processor import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


KEPT_PIXELS = 2**28  # bytes; an engine needs the pixels of the prompts that it starts
# Largest difference of logits that rounding explains, relative to their spread; wrong tokens give about 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


class MetaModel:
    """A causal LM on ``device`` in ``dtype``. attention: the name of transformers' implementation; None: the one that
    it chooses. images: the processor of a model that sees; None drops the towers. Raises what ``check`` raises,
    ``refusal`` for a class that does not know the implementation, and ValueError without a causal LM for ``config``."""

    @building()
    def __init__(
        self,
        config: PreTrainedConfig,
        refusal: Exception,
        *,
        dtype: torch.dtype,
        device: str,
        trust_remote_code: bool = False,
        attention: str | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        auto = find_auto_class(config, trust_remote_code=trust_remote_code)
        self.dtype = dtype
        self.device = torch.device(device)
        chosen = attention and choose_attention(config, attention, sees=images is not None)
        options = {"dtype": dtype, "attn_implementation": chosen, "trust_remote_code": trust_remote_code}
        with torch.device("meta"):
            model = build_model(auto.from_config, refusal, copy.deepcopy(config), **options)
        if images is None:
            drop_towers(model)
        self.module: PreTrainedModel = model.eval()
        self.vocabulary = cast(Tensor, self.module.get_input_embeddings().weight).shape[0]
        self.context = read_context_length(self.module.config)  # tokens; None: no limit
        self.images: ImageEmbedder | None = None
        self.forbidden: Tensor | None = None  # i64, tokens that it must not say; None: there are none
        if images is not None:
            self.images = ImageEmbedder(model, images, keep=KEPT_PIXELS, one_by_one=True)
        self.check()
        self.module.requires_grad_(False)
        _materialise_buffers(self.module, self.device)
        self._aliases = _find_aliases(self.module)
        self._adopted: set[str] = set()  # names whose storage belongs to another model
        self.loads = 0  # how often weights were loaded: then parameters may be other tensors

    def check(self) -> None:
        """Raise ValueError or NotImplementedError for an architecture that the engine cannot run; all is on meta."""

    def forbid(self, logits: Tensor) -> Tensor:
        """The logits [B, V] without what must not be said (`list_forbidden_ids`)."""
        return logits if self.forbidden is None else logits.index_fill(1, self.forbidden, -torch.inf)

    def load(self, weights: Iterable[tuple[str, Tensor]], *, adopt: bool) -> None:
        """Take parameters and persistent buffers by Hugging Face names: the first time all, later those that changed.

        One of several tied weights is enough. ``adopt`` uses the given tensors as storage where dtype and device allow.
        Otherwise they are copied into storage that is allocated the first time. Raises ValueError for missing,
        unexpected or misshapen weights.
        """
        self.loads += 1
        unexpected = []
        for name, tensor in weights:
            if name in self._aliases:
                self._take(name, tensor.detach(), adopt)
            else:
                unexpected.append(name)
        missing = sorted({names[0] for names in self._aliases.values() if self._get(names[0]).is_meta})
        if missing or unexpected:
            model = type(self.module).__name__
            raise ValueError(f"the weights do not fit {model}: missing {missing}, unexpected {sorted(unexpected)}")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what ``load`` takes: (name, live tensor), tied ones once."""
        for name in dict.fromkeys(names[0] for names in self._aliases.values()):
            yield name, self._get(name)

    @property
    def weights_dtype(self) -> torch.dtype | None:
        """The dtype of all weights, if there is one."""
        dtypes = {tensor.dtype for _, tensor in self.weights() if tensor.is_floating_point()}
        return dtypes.pop() if len(dtypes) == 1 else None

    def _take(self, name: str, tensor: Tensor, adopt: bool) -> None:
        aliases = self._aliases[name]
        current = self._get(name)
        if tensor.shape != current.shape:
            raise ValueError(f"weight '{name}' has shape {list(tensor.shape)}; the model needs {list(current.shape)}")
        if adopt and tensor.dtype == current.dtype and tensor.device == self.device:
            self._adopted.add(aliases[0])
        elif current.is_meta or aliases[0] in self._adopted:
            self._adopted.discard(aliases[0])
            tensor = tensor.to(self.device, current.dtype, copy=True)
        else:
            current.copy_(tensor)
            return
        tensor = nn.Parameter(tensor, requires_grad=False) if isinstance(current, nn.Parameter) else tensor
        for alias in aliases:
            path, _, leaf = alias.rpartition(".")
            setattr(self.module.get_submodule(path), leaf, tensor)

    def _get(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        return getattr(self.module.get_submodule(path), leaf)


def compare_logits(logits: Tensor, expected: Tensor) -> float:
    """Return the median distance of logits [N, V], relative to the spread of those expected; see TOLERANCE."""
    expected = expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return ((logits.float() - expected).norm(dim=-1) / spread).median().item()


def _materialise_buffers(module: PreTrainedModel, device: torch.device) -> None:
    """Compute non-persistent buffers (rotary frequencies, embedding scales), which no checkpoint holds."""
    from transformers import PreTrainedModel

    rebuilt = []
    owner_of: dict[str, PreTrainedModel] = {}  # module -> the innermost model, whose initialiser knows the module
    for name, child in module.named_modules():
        owner_of[name] = child if isinstance(child, PreTrainedModel) else owner_of[name.rpartition(".")[0]]
        for key in child._non_persistent_buffers_set:
            if (buffer := child._buffers[key]) is not None:
                fill = float("nan") if buffer.is_floating_point() else 0
                child._buffers[key] = torch.full_like(buffer, fill, device=device)
                rebuilt.append((f"{name}.{key}", child, key))
        # The initialiser writes what the constructor computes on other devices than meta.
        if child._non_persistent_buffers_set:
            owner_of[name]._init_weights(child)
    lost = lambda: [name for name, child, key in rebuilt if child._buffers[key].isnan().any()]  # noqa: E731
    for owner in {path.rpartition(".")[0] for path in lost()}:  # some are written by the initialiser of a module above
        while owner:
            owner = owner.rpartition(".")[0]
            owner_of[owner]._init_weights(module.get_submodule(owner))
    if still := lost():
        name = type(module).__name__
        raise ValueError(f"cannot rebuild the buffers {still} of {name}: its _init_weights does not set them")


def _find_aliases(module: nn.Module) -> dict[str, list[str]]:
    """Map every name of a weight to all of its names (tied weights share a tensor), its main name first."""
    named = [*module.named_parameters(remove_duplicate=False)]
    named += [(n, b) for n, b in module.named_buffers(remove_duplicate=False) if b.is_meta]
    groups: dict[int, list[str]] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), []).append(name)
    return {name: names for names in groups.values() for name in names}


class MetaModelEngine(InferenceEngine):
    """Generates with ``model``, in this process. seed: that of sampling. end_tokens: ids that end a response. decoder:
    see coalign.backends.engines.request. forbidden: ids that the model must not say. reserve: called with the bytes
    that the KV cache is about to have; may raise."""

    def __init__(
        self,
        model: MetaModel,
        *,
        seed: int,
        end_tokens: Iterable[int],
        decoder: Decoder,
        forbidden: Sequence[int] = (),
        reserve: Callable[[int], None] = lambda size: None,
    ) -> None:
        super().__init__()
        self.model, self.vocabulary, self.context = model, model.vocabulary, model.context
        if forbidden:
            model.forbidden = torch.tensor(forbidden, device=model.device)
        self.seed, self.end_tokens, self.decoder = seed, frozenset(end_tokens), decoder
        self._reserve = reserve
        self._reserved: dict[GenerationSession, int] = {}

    def reserve(self, session: GenerationSession, size: int) -> None:
        """Announce the bytes that the KV cache of a session is about to have; 0 for one that ends."""
        reserved = self._reserved | {session: size}
        self._reserve(sum(reserved.values()))
        self._reserved = {key: held for key, held in reserved.items() if held}

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Steps run in inference mode; between two of them the thread may compute with gradients."""
        with super().stepping(), torch.inference_mode():
            yield

    @property
    def weights_dtype(self) -> torch.dtype | None:
        return self.model.weights_dtype


class MetaModelModule(RolloutModule):
    """Generates with a MetaModelEngine."""

    adopts = True
    reads_images = True
    compares_itself = True
    engine: MetaModelEngine

    @classmethod
    def build_model(
        cls, architecture: PreTrainedConfig, config: ModelConfig, device: str, images: ImagesConfig | None = None
    ) -> MetaModel:
        """Build the model without weights. ``images``: how a model that sees reads them. ValueError or
        NotImplementedError if the engine cannot run it."""
        raise NotImplementedError

    @classmethod
    def choose_dtype(cls, config: ModelConfig, device: str) -> torch.dtype:
        return choose_compute_dtype(getattr(torch, config.compute_dtype or config.dtype), torch.device(device))

    @classmethod
    def find_model_settings(cls, config: ModelConfig, device: str, images: ImagesConfig | None) -> dict[str, Any]:
        """The arguments of MetaModel but for the architecture."""
        settings = {"dtype": cls.choose_dtype(config, device), "device": device}
        processor = pretrained.read_processor(config, images)
        return settings | {"trust_remote_code": config.trust_remote_code, "images": processor}

    @classmethod
    def check_architecture(cls, config: ModelConfig, name: str) -> None:
        cls.build_model(pretrained.read_config(config), config, "cpu")

    @classmethod
    def notes(cls, config: ModelConfig) -> Sequence[str]:
        limit = pretrained.find_rope_limit(config)
        return [f"sequences end at {limit[1]} tokens, above which `{limit[0]}` changes all positions"] if limit else []

    def find_engine_settings(self, architecture: PreTrainedConfig) -> dict[str, Any]:
        """The arguments of MetaModelEngine but for the model."""
        return {
            "forbidden": self.list_forbidden(architecture),
            "seed": self.context.seed,
            "end_tokens": self.find_end_tokens(architecture),
            "decoder": self.decoder,
            "reserve": lambda size: self.arena.reserve(self.context.model, "kv", size),
        }

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, live tensor) of all weights, to compare them with the trainer's."""
        return self.engine.model.weights()

    def tensors(self, component: str) -> Iterable[Tensor]:
        return self.engine.model.module.parameters() if component == "weights" else ()
