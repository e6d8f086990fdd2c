"""Who may import whom, read from the sources: the arrows of docs/design.md §2."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "coalign"

ALLOWED = {
    "types": {"data.batch"},  # for annotations only: under TYPE_CHECKING
    "config": set(),
    "files": set(),
    "algorithms": {"types"},
    "data": {"types", "algorithms", "config", "files"},
    "rewards": {"types", "config"},
    "rollout": {"types", "config", "data"},
    "weights": {"types", "config", "cluster", "files"},
    "generation": {"types"},
    "native": {"types", "generation"},
    "vllm": {"types", "config", "generation", "weights"},
    "memory": set(),
    "modules": {
        "types",
        "config",
        "algorithms",
        "data",
        "rewards",
        "rollout",
        "weights",
        "memory",
        "generation",
        "native",
        "vllm",
    },
    "cluster": {"types", "config", "data.batch", "data.balance", "memory"},
    "runtime": {
        "types",
        "files",
        "cluster",
        "data",
        "algorithms",
        "rewards",
        "rollout",
        "config",
        "weights",
        "modules",
    },
    "recipes": {"types", "runtime", "algorithms", "config", "data"},
    "vocab": set(),
    "api": {"config", "runtime"},
    "cli": {"api", "types", "config", "data", "runtime", "modules", "cluster", "vocab", "weights"},
}
HEAVY = {
    "ray": "cluster/ray.py",
    "vllm": "vllm/",
    "megatron": "modules/megatron_core/",
    "deepspeed": "backends/deepspeed.py",
    "math_verify": "rewards/symbolic.py",
    "httpx2": "rewards/remote.py",
    "uvicorn": "commands/serve.py",
    "starlette": "commands/serve.py",
    "datasets": "data/sources.py",
    "bitsandbytes": "backends/optim.py",
    "torchao": "backends/hf/float8.py",
    "peft": "backends/lora.py",
    "sentencepiece": "vocab/sources.py",
}


def imports(file: Path) -> list[str]:
    """Absolute names of everything that a file imports, lazily or not."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found += [node.module] if node.module != "coalign" else [f"coalign.{alias.name}" for alias in node.names]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_downwards(file):
    part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part in ("__init__", "__main__"):
        return
    for name in imports(file):
        if name.startswith("coalign."):
            target = name.removeprefix("coalign.")
            home = target.split(".")[0]
            fine = home == part or home in ALLOWED[part] or any(target.startswith(a) for a in ALLOWED[part] if "." in a)
            assert fine, f"{file.relative_to(PACKAGE)} imports {name}; {part} may import {sorted(ALLOWED[part])}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_heavy_packages_have_one_home(file):
    for name in imports(file):
        home = HEAVY.get(name.split(".")[0])
        where = str(file.relative_to(PACKAGE))
        assert home in (None, where) or (home.endswith("/") and where.startswith(home)), f"{name} belongs to {home}"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_and_the_configuration_loads_no_torch():
    code = "import sys, coalign.api, coalign.config, coalign.config.schema, coalign.cli; print('torch' in sys.modules)"
    assert run(code).strip() == "False"


def test_nothing_heavy_is_imported_until_it_is_used():
    code = (
        "import sys, coalign.engine.engine, coalign.recipes.grpo, coalign.recipes.ppo, coalign.recipes.sft;"
        "print([m for m in ('ray', 'vllm', 'datasets', 'matplotlib', 'transformers') if m in sys.modules])"
    )
    assert run(code).strip() == "[]"


@pytest.mark.slow
def test_start_up_times():
    def best(*command: str) -> float:
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, capture_output=True)
            times.append(time.perf_counter() - begun)
        return min(times)

    bare = best("-c", "pass")
    assert best("-c", "import coalign") - bare < 0.1
    assert best("-m", "coalign.cli", "--help") < 1.0
