"""Reader of Megatron's older checkpoints, `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`: one pickle per rank.

Layers count from 0 in each stage, experts from 0 in each rank. With virtual stages a rank has `model0`, `model1` …
Pickles are read without running code from them: unknown classes become empty stand-ins.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coalign_megatron.families import MegatronConfig, Parameter
from coalign_megatron.layouts.megatron import Coordinates, MegatronLayout, Mesh, Stages
from coalign_megatron.layouts.megatron_model import TIED_HEAD, LayerSpec
from coalign_megatron.layouts.shards import Shard


class SkippedObject:
    """Stand-in for an object whose class is not imported."""

    def __new__(cls, *args: Any, **kwargs: Any) -> SkippedObject:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


def load_pickle(path: Path, *, mmap: bool = False) -> Any:
    """Load a file of torch.save (1.6 or later) with `weights_only`. Raises ValueError for a damaged file."""
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not an archive of torch.save")
        refuse_compressed(zipfile.ZipFile(path))
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(_make_stand_in(name), name) for name in unknown]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as problem:  # a damaged pickle raises almost anything
        reason = (str(problem) or type(problem).__name__).splitlines()[0]
        raise ValueError(f"{path} cannot be read, is it cut off? ({reason})") from problem


def refuse_compressed(archive: zipfile.ZipFile) -> None:
    """Refuse records that could become much larger than the file; torch.save compresses none."""
    for record in archive.infolist():
        if record.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{record.filename} is compressed, which torch.save never does")


def _make_stand_in(name: str) -> type:
    module, _, class_name = name.rpartition(".")
    return type(class_name, (SkippedObject,), {"__module__": module})


FILES = ("model_optim_rng.pt", "model_rng.pt")
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")
EMBEDDING, LAST = "embedding.word_embeddings.weight", "final_layernorm.weight"
SPECS: tuple[LayerSpec, ...] = ("local", "te", "legacy")
RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(module\.)+", ""),
        (r"\.input_norm\.", ".input_layernorm."),  # Megatron-LM of the second half of 2023
        (r"\.post_attention_norm\.", ".post_attention_layernorm."),
        (r"\.final_norm\.", ".final_layernorm."),
    )
]


@dataclass(frozen=True, slots=True)
class LegacyRank:
    """One file: the coordinates of its rank, and the tensors of each chunk (virtual stage) by name."""

    path: Path
    tensor: int
    stage: int
    expert: int
    chunks: list[dict[str, Tensor]]


class LegacyWeights:
    """The weights of all ranks. Raises ValueError for ranks, names or shapes that do not fit."""

    def __init__(self, ranks: list[LegacyRank], parameters: Mapping[str, Parameter], config: MegatronConfig) -> None:
        self.files = ranks
        sizes = [1 + max(indices) for indices in zip(*((r.tensor, r.stage, r.expert) for r in ranks), strict=True)]
        coordinates = {(r.tensor, r.stage, r.expert) for r in ranks}
        if len(coordinates) != sizes[0] * sizes[1] * sizes[2]:
            raise ValueError(
                f"{ranks[0].path.parent.parent} has {len(coordinates)} ranks, which are not {sizes[0]} tensor × "
                f"{sizes[1]} pipeline × {sizes[2]} expert parallel ones: files are missing"
            )
        mesh = Mesh(sizes[0], sizes[1], sizes[2], sizes[2], sizes[0])
        stages = _list_stages(ranks, config)
        held = [self._list_shards(MegatronLayout(config, mesh, stages, spec), ranks, parameters) for spec in SPECS]
        chosen = min((shards for shards in held if shards is not None), key=lambda s: _count_missing(ranks, s))
        self.ranks: list[list[Shard]] = []
        self.dtypes: dict[str, torch.dtype] = {}
        self._tensors: list[dict[str, Tensor]] = []
        for rank, chunks in zip(ranks, chosen, strict=True):
            self._take(rank, chunks, config)

    @staticmethod
    def _list_shards(
        layout: MegatronLayout, ranks: list[LegacyRank], parameters: Mapping[str, Parameter]
    ) -> list[list[dict[str, Shard]]] | None:
        """Return the expected shards of each chunk of each rank; None if this spec has no names for the model."""
        sizes = layout.mesh.tensor, layout.mesh.pipeline, layout.mesh.expert
        held = []
        for rank in ranks:
            tensor, stage, expert = zip((rank.tensor, rank.stage, rank.expert), sizes, strict=True)
            at = Coordinates(tensor, stage, expert, tensor)
            try:
                chunks = [layout.shards(parameters, at, chunk) for chunk in range(len(rank.chunks))]
            except ValueError:
                if layout.spec == "local":
                    raise
                return None
            held.append([{shard.name: shard for shard in shards} for shards in chunks])
        return held

    def _take(self, rank: LegacyRank, chunks: list[dict[str, Shard]], config: MegatronConfig) -> None:
        held: list[Shard] = []
        taken: dict[str, Tensor] = {}
        for chunk, (shards, tensors) in enumerate(zip(chunks, rank.chunks, strict=True)):
            missing = [name for name in shards if name not in tensors]
            tied = tuple(TIED_HEAD.values()) if config.share_embeddings_and_output_weights else ()
            extra = [name for name in tensors if name not in shards and name not in tied]
            if missing or extra:
                raise ValueError(f"{rank.path} does not match config.json: missing {missing}, extra {extra}")
            for name, shard in shards.items():
                if tuple(tensors[name].shape) != shard.shape:
                    raise ValueError(
                        f"{rank.path}: '{name}' has the shape {list(tensors[name].shape)}; config.json and the number "
                        f"of ranks require {list(shard.shape)}"
                    )
                held.append(replace(shard, name=f"{chunk}:{name}"))
                taken[f"{chunk}:{name}"] = tensors[name]
                self.dtypes |= {piece.name: tensors[name].dtype for piece in shard.pieces}
        self.ranks.append(held)
        self._tensors.append(taken)

    def fetch(self, rank: int, name: str) -> Tensor:
        return self._tensors[rank][name]


def _count_missing(ranks: list[LegacyRank], held: list[list[dict[str, Shard]]]) -> int:
    pairs = (
        (shards, tensors)
        for rank, chunks in zip(ranks, held, strict=True)
        for shards, tensors in zip(chunks, rank.chunks, strict=True)
    )
    return sum(len(shards.keys() - tensors.keys()) for shards, tensors in pairs)


def is_legacy(folder: Path) -> bool:
    """Return whether an iteration's folder has this format."""
    return next(_list_folders(folder), None) is not None


def _list_folders(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob("mp_rank_*")) if RANK.match(path.name))


def read_ranks(folder: Path) -> list[LegacyRank]:
    """Read all ranks of an iteration's folder, mapped into memory.

    Raises ValueError for a file that is missing, cut off, or older than checkpoint version 2, whose queries, keys and
    values are in another order.
    """
    files = []
    for rank_folder in _list_folders(folder):
        path = next((rank_folder / name for name in FILES if (rank_folder / name).is_file()), None)
        if path is None:
            raise ValueError(f"{rank_folder} has none of the files {', '.join(FILES)}")
        match = RANK.match(rank_folder.name)
        assert match is not None
        state = load_pickle(path, mmap=True)
        if (version := state.get("checkpoint_version", 0)) < 2:
            raise ValueError(f"{path} has checkpoint_version {version}; 2.0 and later can be read")
        keys = [key for key in state if re.fullmatch(r"model\d*", key)]
        chunks = [_collect_tensors(state[key]) for key in sorted(keys, key=lambda key: int(key[5:] or 0))]
        files.append((path, tuple(int(number) for number in match.groups() if number is not None), chunks))
    # A single number after the tensor rank is the stage; but if stage 0 has the last norm, there is only one stage, and
    # the number is the expert rank.
    experts = any(
        len(at) == 2 and at[1] == 0 and any(name.endswith(LAST) for name in chunks[-1]) for _, at, chunks in files
    )
    ranks = []
    for path, at, chunks in files:
        tensor, stage, expert = (at[0], 0, at[1]) if len(at) == 2 and experts else (*at, 0, 0)[:3]
        ranks.append(LegacyRank(path, tensor, stage, expert, chunks))
    return ranks


def _collect_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by name in megatron-core, without `_extra_state`."""
    tensors = {}
    for name, value in _flatten(state, ""):
        if isinstance(value, Tensor) and not name.endswith("_extra_state"):
            for pattern, new in RENAMED:
                name = pattern.sub(new, name)
            tensors[name] = value
    return tensors


def _flatten(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _list_stages(ranks: list[LegacyRank], config: MegatronConfig) -> Stages:
    """Return the layers of each stage and chunk. Layers run through chunk 0 of all stages, then chunk 1 …"""
    first = {rank.stage: rank for rank in ranks}
    chunks = {len(rank.chunks) for rank in ranks}
    if len(chunks) != 1:
        raise ValueError(f"{ranks[0].path.parent.parent}: the ranks have different numbers of models: {sorted(chunks)}")
    stages: list[list[tuple[int, ...]]] = [[] for _ in first]
    at = 0
    for chunk in range(chunks.pop()):
        for stage in range(len(first)):
            pattern = (re.search(r"coder\.layers\.(\d+)\.", name) for name in first[stage].chunks[chunk])
            count = 1 + max((int(match[1]) for match in pattern if match), default=-1)
            stages[stage].append(tuple(range(at, at + count)))
            at += count
    if at != config.num_layers:
        raise ValueError(f"{ranks[0].path.parent.parent} has {at} layers, config.json says {config.num_layers}")
    return tuple(map(tuple, stages))


def count_vocabulary_rows(ranks: list[LegacyRank]) -> int:
    """Count the rows of the word embedding over all ranks, padding included."""
    tensors = 1 + max(rank.tensor for rank in ranks)
    for rank in ranks:
        for name, tensor in rank.chunks[0].items():
            if name.endswith(EMBEDDING):
                return len(tensor) * tensors
    raise ValueError(f"{ranks[0].path} has no {EMBEDDING}")
