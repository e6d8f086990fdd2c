"""Names of data, and the locations of their files: files, directories, datasets of the Hugging Face hub, URLs.

    openai/gsm8k:main:train           repository, configuration, split; `openai/gsm8k@REVISION:main:train`
    org/name:train, org/name          a dataset with one configuration (or a default one); with one split
    https://host/rows.jsonl.gz        a file; `…#sha256=DIGEST` is refused if its content is another one

`pin_data` puts commits and digests in, `fetch_data` downloads and returns the files. `datasets` says which files are
the rows of a split; no code of a dataset is run.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.files import find_cache, hash_file, write_atomically, write_text_atomically
from coalign.hub import HubError, HubFile, explain, fetch_dataset, is_hub_name, pin, split_name

if TYPE_CHECKING:
    import datasets
    import pyarrow

log = logging.getLogger(__name__)

FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
FILE = re.compile(rf"\.({'|'.join(e[1:] for e in (*FORMATS, *CODECS, '.idx', '.bin'))})$", re.IGNORECASE)
URL = re.compile(r"https?://[^/]+/.*")
DIGEST = re.compile(r"#sha256=([0-9a-f]{64})$")
MIN_FREE_BYTES = 1 << 30  # a download leaves so much of the disk free


def is_url(name: str) -> bool:
    return URL.fullmatch(name) is not None


def is_dataset(name: str) -> bool:
    """Whether ``name`` can be a dataset of the hub: no existing path, and no name with the ending of a data file."""
    repository, *selection = name.split(":")
    return (
        len(selection) <= 2
        and is_hub_name(repository)
        and not FILE.search(repository)
        and all(text and "/" not in text for text in selection)
    )


def describe_source(name: str) -> str:
    """Return a short name for messages: a path's or URL's file name, a dataset's name without organisation and commit.

    Example: `openai/gsm8k@12ab…:main:train` is `gsm8k:main:train`.
    """
    if is_dataset(name):
        repository, *selection = name.split(":")
        return ":".join([split_name(repository)[0].rpartition("/")[2], *selection])
    return Path(urllib.parse.urlsplit(name).path if is_url(name) else name).name


def pin_data(name: str) -> str:
    """Return a dataset's name with its commit, a URL with the digest of its content, and paths as they are.

    A URL that is not in the cache is downloaded. Raises HubError.
    """
    if is_url(name):
        return name if DIGEST.search(name) else f"{name}#sha256={_fetch_url(name)[1]}"
    if not is_dataset(name):
        return name
    repository, *selection = name.split(":")
    return ":".join([pin(repository, "dataset"), *selection])


def fetch_data(name: str, *, rows: bool = True) -> list[Path] | list[HubFile]:
    """Return the files of a dataset or URL that `pin_data` pinned, downloaded unless they are here.

    Without ``rows`` a dataset's files stay on the hub, to be read there. Raises HubError for a split or configuration
    that the dataset does not have, with those that it has.
    """
    if is_url(name):
        return [_fetch_url(name)[0]]
    repository, *selection = name.split(":")
    files = _find_split(repository, selection)
    if not rows:
        return [HubFile(repository, file) for file in files]
    directory = fetch_dataset(repository, files)
    return [directory / file for file in files]


def load_features(schema: pyarrow.Schema) -> datasets.Features:
    """Read the column types that `datasets` stores in a table; it decodes objects that are written as texts, no media.

    Its classes for images, sounds, videos and documents open whatever file, URL or format a table names.
    """
    import datasets

    features = datasets.Features.from_arrow_schema(schema)
    _leave_media_encoded(features)
    return features


def _leave_media_encoded(feature: Any) -> None:
    if isinstance(feature, dict):
        feature = list(feature.values())
    if isinstance(feature, list | tuple):
        for inner in feature:
            _leave_media_encoded(inner)
    elif hasattr(feature, "feature"):
        _leave_media_encoded(feature.feature)
    elif getattr(feature, "decode", False) and type(feature).__name__ != "Json":
        feature.decode = False


def _find_split(repository: str, selection: list[str]) -> list[str]:
    config = selection[0] if len(selection) == 2 else None
    name = ":".join([split_name(repository)[0], *selection[:-1]])
    splits = _list_splits(repository, config)
    if not selection and len(splits) > 1:
        raise HubError(f"{name} has the splits {', '.join(splits)}: name one of them, `{name}:{next(iter(splits))}`")
    split = selection[-1] if selection else next(iter(splits))
    if split not in splits:
        raise HubError(
            f"{name} has no split '{split}'; it has {', '.join(splits)} (a name is REPOSITORY:CONFIGURATION:SPLIT, "
            "and max_samples takes a part of a split)"
        )
    if endings := sorted({Path(file).suffix or file for file in splits[split] if not FILE.search(file)}):
        raise HubError(
            f"{name}:{split} is of files that end in {', '.join(endings)}; rows are read of {', '.join(FORMATS)}"
        )
    return splits[split]


def _list_splits(repository: str, config: str | None) -> dict[str, list[str]]:
    """Return the files of each split, in order. They are asked for once for each commit and configuration."""
    folder = find_cache() / "datasets" / repository.replace("/", "--")
    record = folder / f"{hashlib.sha256(str(config).encode()).hexdigest()[:16]}.json"
    if record.is_file():
        return json.loads(record.read_text())
    with explain(repository, "dataset"):
        splits = _ask_splits(repository, config)
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(record, json.dumps(splits))
    return splits


def _ask_splits(repository: str, config: str | None) -> dict[str, list[str]]:
    import datasets
    from datasets.config import HF_HUB_OFFLINE

    name, commit = split_name(repository)
    if HF_HUB_OFFLINE:
        raise HubError(
            f"which files {repository} has for {config or 'its rows'} is not in the cache {find_cache()}, and "
            "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE forbids to ask"
        )
    try:
        builder = datasets.load_dataset_builder(name, config, revision=commit)
    except RuntimeError as error:
        raise HubError(
            f"{name} is made by code of its own, which is not run ({error}). The hub keeps many such datasets as "
            f"parquet: `{name}@refs/convert/parquet`, or a URL of one of its files"
        ) from error
    except ValueError as error:
        names = datasets.get_dataset_config_names(name, revision=commit)
        if config in names:
            raise HubError(f"{name}: {error}") from error
        said = f"no configuration '{config}'; it has" if config else "several configurations:"
        raise HubError(f"{name} has {said} {', '.join(names)}. Name one of them, `{name}:{names[0]}:SPLIT`") from error
    except FileNotFoundError as error:
        raise HubError(f"{name} has no files that can be read as rows ({', '.join(FORMATS)}): {error}") from error
    if config and config not in (names := list(builder.builder_configs) or ["default"]):
        raise HubError(f"{name} has no configuration '{config}'; it has {', '.join(names)}")
    start = f"hf://datasets/{repository}/"
    files = builder.config.data_files or {}
    return {str(split): [str(file).removeprefix(start) for file in paths] for split, paths in files.items()}


def _fetch_url(name: str) -> tuple[Path, str]:
    """Return the file of a URL and the SHA-256 of its content; it is downloaded to the cache once. Raises HubError."""
    url, _, wanted = name.partition("#sha256=")
    folder = find_cache() / "urls" / hashlib.sha256(url.encode()).hexdigest()[:32]
    for cached in folder.glob(f"{wanted or '*'}/*"):
        if _hash_once(cached, cached.stat().st_size, cached.stat().st_mtime_ns) == cached.parent.name:
            return cached, cached.parent.name
        log.warning("%s: what the cache has of it is damaged; downloading again", url)
        cached.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    with write_atomically(folder / f"download-{os.getpid()}", flush=True) as aside:
        digest = _download_url(url, aside)
        if wanted and digest != wanted:
            raise HubError(f"{url} is not the file that it was: its SHA-256 is {digest}, not {wanted}")
    file = folder / digest / describe_source(url)
    file.parent.mkdir(exist_ok=True)
    (folder / f"download-{os.getpid()}").replace(file)
    return file, digest


@cache
def _hash_once(file: Path, size: int, written: int) -> str:
    """Hash a file of this size and time once in a process."""
    return hash_file(file)


def _download_url(url: str, path: Path) -> str:
    """Write a URL's answer to ``path``; return its SHA-256. HubError for no answer, an incomplete one, or no space."""
    digest, size = hashlib.sha256(), 0
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, open(path, "wb") as file:
            expected = int(answer.headers.get("Content-Length") or -1)
            space = shutil.disk_usage(path.parent).free - MIN_FREE_BYTES
            while block := answer.read(1 << 20):
                size += len(block)
                if max(size, expected) > space:
                    raise HubError(
                        f"{url} has {max(size, expected):,} bytes or more, and {path.parent} has room for "
                        f"{max(space, 0):,}; COALIGN_CACHE names another place"
                    )
                digest.update(block)
                file.write(block)
    except urllib.error.HTTPError as error:
        raise HubError(f"{url}: the server answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, HubError):
            raise
        raise HubError(f"{url} cannot be downloaded, and it is not in the cache: {error}") from error
    if 0 <= size < expected:
        raise HubError(f"{url}: {size:,} of {expected:,} bytes came; the same command tries again")
    return digest.hexdigest()
