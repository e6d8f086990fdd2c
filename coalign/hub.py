"""Names of models, and the locations of their files: directories, repositories of the Hugging Face hub, GGUF files.

A name of the hub is `org/name` or `org/name@revision`. `pin` replaces the revision by its commit, `fetch` downloads to
huggingface_hub's cache (HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE count), `find_directory` needs no network.
`coalign/hub_data.py` has the names of data.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

import huggingface_hub  # imports its submodules when they are used
from huggingface_hub import constants

from coalign.companions import FORMATS, load
from coalign.files import find_cache, list_weight_files, read_json_object, require_inner_name, write_text_atomically

if TYPE_CHECKING:
    from coalign.config.schema import ModelConfig

log = logging.getLogger(__name__)

HUB_NAME = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
TEXTS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
INDEX = "model.safetensors.index.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
RepositoryType = Literal["model", "dataset"]


class HubError(ValueError):
    """A model or dataset is not available: unknown name, no access, no connection, or no space."""


def is_hub_name(name: str) -> bool:
    """Whether ``name`` can be one of the hub. A path that exists is none, nor is `RUN/model`, which a run makes."""
    match = HUB_NAME.fullmatch(name)
    return match is not None and not match["id"].endswith("/model") and not os.path.exists(name)


def is_gguf(name: str) -> bool:
    """Whether ``name`` is a GGUF file."""
    return name.endswith(".gguf") and Path(name).is_file()


def pin(name: str, repo_type: RepositoryType = "model") -> str:
    """Return a hub's name as `org/name@commit`, and others as they are. Offline the cache is asked. Raises HubError."""
    if not is_hub_name(name):
        return name
    repository, revision = split_name(name)
    if COMMIT.fullmatch(revision):
        return name
    reference = _cache_of(repository, repo_type) / "refs" / revision
    try:
        with explain(name, repo_type):
            commit = huggingface_hub.HfApi().repo_info(repository, repo_type=repo_type, revision=revision).sha
    except HubError:
        if not (commit := _read_commit(reference)):
            raise
        log.warning("%s: the hub does not answer; the commit is that of the cache, %s", name, commit)
    else:
        reference.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(reference, str(commit))
    return f"{repository}@{commit}"


def find_directory(name: str) -> Path:
    """Return the Hugging Face directory of a model that was fetched. HubError if it was not."""
    if is_gguf(name):
        return _directory_of_gguf(Path(name))
    if not is_hub_name(name):
        return Path(name)
    repository, revision = split_name(name)
    commit = _read_commit(_cache_of(repository) / "refs" / revision) or revision
    directory = _cache_of(repository) / "snapshots" / commit
    if not os.path.isdir(directory):
        raise HubError(f"{name} is not in the cache {constants.HF_HUB_CACHE}, and there is no directory of this name")
    return directory


def fetch(name: str, *, weights: bool = True, code: bool = False, pickles: bool = False) -> Path:
    """Download the missing files of a model, verify them, and return its directory. A GGUF file is converted to one.

    Without ``weights`` only the configuration and the tokenizer are fetched. ``code``: Python files, too. ``pickles``:
    weights in pickles, where there are no others. Several processes may fetch the same at once. Raises HubError.
    """
    if is_gguf(name):
        directory = _directory_of_gguf(Path(name))
        load(FORMATS, "gguf", "the reader of GGUF files")(Path(name), directory, weights=weights)
        return directory
    if not is_hub_name(name):
        if weights:
            for single in WEIGHTS:
                list_weight_files(Path(name), single)  # transformers would follow an index out of the folder
        return Path(name)
    repository, commit = split_name(pin(name))
    directory = _cache_of(repository) / "snapshots" / commit
    contents = [content for content, wanted in (("weights", weights), ("code", code), ("pickles", pickles)) if wanted]
    record = find_cache() / "complete" / f"{repository.replace('/', '--')}@{'+'.join([commit, *contents])}.json"
    if _is_complete(record, directory):
        return directory
    try:
        with explain(name):
            sizes = _list_files(repository, commit)
    except HubError:
        if not (directory / "config.json").is_file() or (weights and not list(directory.glob("*.safetensors"))):
            raise
        return directory  # fetched by another tool
    wanted = [file for file in sizes if file.endswith(TEXTS) or (code and file.endswith(".py"))]
    _download(name, commit, wanted, sizes)
    chosen = _choose_weights(name, directory, sizes, pickles)
    if weights:
        _download(name, commit, chosen, sizes)
    _verify(name, directory, record, [*wanted, *(chosen if weights else ())])
    return directory


def list_sources(model: ModelConfig) -> Iterator[tuple[str, bool]]:
    """Yield each name of another model in a model's settings, and whether its weights are read."""
    if model.load:
        yield model.load, model.init == "load"
    if model.lora and model.lora.load:
        yield model.lora.load, True
    if model.tokenizer:
        yield model.tokenizer, False


def fetch_model(model: ModelConfig, *, weights: bool = True) -> None:
    """Fetch all that a model of a run reads; without ``weights`` configuration and tokenizer. Raises as `fetch`."""
    for source, read in list_sources(model):
        fetch(source, weights=weights and read, code=model.trust_remote_code, pickles=model.pickled_weights)


def split_name(name: str) -> tuple[str, str]:
    """Return the repository and the revision of a name of the hub."""
    match = HUB_NAME.fullmatch(name)
    assert match is not None
    return match["id"], match["revision"] or constants.DEFAULT_REVISION


def _cache_of(repository: str, repo_type: RepositoryType = "model") -> Path:
    return Path(constants.HF_HUB_CACHE) / f"{repo_type}s--{repository.replace('/', '--')}"


def _read_commit(reference: Path) -> str:
    """Return the commit that the cache knows for a revision; empty for none."""
    return reference.read_text().strip() if os.path.isfile(reference) else ""  # False for a name too long


def _is_complete(record: Path, directory: Path) -> bool:
    """Whether all files were verified that ``record`` lists, and are still there."""
    return record.is_file() and all((directory / file).is_file() for file in json.loads(record.read_text()))


def _directory_of_gguf(file: Path) -> Path:
    state = file.stat()
    content = json.dumps([str(file.resolve()), state.st_size, state.st_mtime_ns])
    return find_cache() / "gguf" / f"{file.stem}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _list_files(repository: str, commit: str) -> dict[str, int]:
    """Return the sizes of the files at the top of a repository, bytes."""
    info = huggingface_hub.HfApi().model_info(repository, revision=commit, files_metadata=True)
    return {file.rfilename: file.size or 0 for file in info.siblings or () if "/" not in file.rfilename}


def _choose_weights(name: str, directory: Path, files: Mapping[str, int], pickles: bool) -> list[str]:
    """Return the files that transformers would load. HubError for pickles without ``pickles``."""
    if INDEX in files:
        mapped = read_json_object(directory / INDEX).get("weight_map")
        if not isinstance(mapped, dict):
            raise HubError(f"{name}: {INDEX} has no `weight_map` of the tensors' files")
        shards = {require_inner_name(shard, directory / INDEX) for shard in mapped.values()}
        if lost := sorted(shards - files.keys()):
            raise HubError(f"{name}: {INDEX} names files that the repository does not have: {', '.join(lost)}")
        return sorted(shards)
    if weights := [file for file in ("model.safetensors", "adapter_model.safetensors") if file in files]:
        return weights
    weights = [file for file in files if file.startswith("pytorch_model") and file.endswith((".bin", ".json"))]
    if not weights:
        raise HubError(
            f"{name} has no weights that can be trained (model.safetensors); of its files: "
            f"{', '.join(sorted(files)[:8])}. A GGUF file is loaded by its path, once downloaded"
        )
    if not pickles:
        raise HubError(
            f"{name} has its weights in pickles only ({', '.join(sorted(weights)[:3])}). Take a revision with "
            f"safetensors (`{name}@refs/pr/N` if somebody has proposed one), or set `pickled_weights: true`: they are "
            "then read as tensors alone"
        )
    return weights


def fetch_dataset(name: str, files: list[str]) -> Path:
    """Download ``files`` of a dataset (`org/name@commit`), verify them, and return the directory that they are in.

    Nothing is asked of the hub for files that were verified before. Raises HubError.
    """
    repository, commit = split_name(name)
    directory = _cache_of(repository, "dataset") / "snapshots" / commit
    content = hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]
    record = find_cache() / "complete" / f"datasets--{repository.replace('/', '--')}@{commit}+{content}.json"
    if _is_complete(record, directory):
        return directory
    try:
        with explain(name, "dataset"):
            infos = huggingface_hub.HfApi().get_paths_info(repository, files, revision=commit, repo_type="dataset")
    except HubError:
        if not all((directory / file).is_file() for file in files):
            raise
        return directory  # fetched by another tool
    _download(name, commit, files, {file.path: getattr(file, "size", 0) for file in infos}, "dataset")
    _verify(name, directory, record, files)
    return directory


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset at a commit, of which only those bytes are downloaded that are read."""

    repository: str  # org/name@commit
    path: str

    def __str__(self) -> str:
        return f"hf://datasets/{self.repository}/{self.path}"

    @property
    def suffixes(self) -> list[str]:
        return Path(self.path).suffixes

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def stem(self) -> str:
        return Path(self.path).stem

    def open(self, mode: Literal["rb"] = "rb") -> BinaryIO:
        """Raises HubError where the hub cannot be reached."""
        with explain(self.repository, "dataset"):
            system = huggingface_hub.HfFileSystem(endpoint=constants.ENDPOINT)
            return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, system.open(str(self), mode)), 1 << 20))


def _download(
    name: str, commit: str, files: list[str], sizes: Mapping[str, int], repo_type: RepositoryType = "model"
) -> None:
    repository, _ = split_name(name)
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    snapshot = _cache_of(repository, repo_type) / "snapshots" / commit
    missing, free = sum(sizes[file] for file in files if not (snapshot / file).exists()), shutil.disk_usage(cache).free
    if missing > free:
        raise HubError(
            f"{name}: {missing / 2**30:.1f} GiB are to be downloaded, and {cache} has {free / 2**30:.1f} GiB of space; "
            "HF_HOME names another place"
        )
    with explain(name, repo_type):
        huggingface_hub.snapshot_download(
            repository, repo_type=repo_type, revision=commit, allow_patterns=list(map(glob.escape, files))
        )


def _verify(name: str, directory: Path, record: Path, files: list[str]) -> None:
    """Compare contents with their hashes, which name them in the cache, and note which files are complete.

    A file that differs is deleted, so that it is downloaded again. HubError names it.
    """
    for file in files:
        blob = (directory / file).resolve()
        if len(blob.name) == 64:
            digest = hashlib.sha256()
        elif len(blob.name) == 40:  # as git does
            digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
        else:
            continue  # a server, or a file system without links, that keeps no hashes
        with open(blob, "rb") as content:
            while block := content.read(1 << 22):
                digest.update(block)
        if digest.hexdigest() != blob.name:
            blob.unlink()
            (directory / file).unlink(missing_ok=True)
            raise HubError(f"{name}: {file} was damaged on its way and is deleted; the same command fetches it again")
    record.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(record, json.dumps(files))


@contextmanager
def explain(name: str, repo_type: RepositoryType = "model") -> Iterator[None]:
    """Turn errors of the hub's client into HubError, with the remedy."""
    from huggingface_hub.errors import (  # slow to import, and directories do without
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] (of the HTTP client, which differs by version)
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, revision = split_name(name)
    hub = constants.ENDPOINT
    page = "" if repo_type == "model" else "datasets/"
    here = "directory" if repo_type == "model" else "file or directory"
    try:
        yield
    except GatedRepoError as error:
        raise HubError(
            f"{name} is gated: accept its terms on {hub}/{page}{repository}, then give a token of that account "
            "(HF_TOKEN, or `hf auth login`)"
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(f"{name}: the repository {repository} has no revision '{revision}'") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"there is no {here} '{name}' here ({Path.cwd()}) and no {repo_type} of this name on {hub}; a "
            "private one needs a token (HF_TOKEN, or `hf auth login`)"
        ) from error
    except OfflineModeIsEnabled as error:
        raise HubError(
            f"there is no {here} '{name}' here, and as a name of the hub it is not in the cache "
            f"{constants.HF_HUB_CACHE}; HF_HUB_OFFLINE forbids to download it"
        ) from error
    except HfHubHTTPError as error:
        raise HubError(f"{name}: {hub} answers {error.response.status_code}: {error}") from error
    except LocalEntryNotFoundError as error:
        raise HubError(f"{name} is not in the cache {constants.HF_HUB_CACHE}, and {hub} cannot be reached") from error
    except HFValidationError as error:
        raise HubError(f"{name} is no name of the hub: {error}") from error
    except (OSError, HTTPError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise HubError(
                f"{name}: no space is left in {constants.HF_HUB_CACHE}; HF_HOME names another place"
            ) from error
        raise HubError(f"{name}: there is no {here} of this name, and {hub} cannot be reached: {error}") from error
