"""Who may import whom, read from the sources: the arrows of docs/design.md §2."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "coalign"
COMPANIONS = sorted(ROOT.glob("packages/*/coalign_*"))

BELOW_BACKENDS = {
    *("companions", "cpu", "types", "roles", "config", "files", "devices", "hub", "hub_data", "services", "threads"),
    *("processes", "data", "algorithms", "rewards", "environments", "weights"),
}
ALLOWED = {
    "types": set(),
    "roles": {"types"},
    "companions": set(),
    "config": {"companions", "files", "hub", "hub_data"},
    "files": set(),
    "cpu": {"companions"},
    "run_files": {"files"},
    "hub": {"companions", "files"},
    "hub_data": {"files", "hub"},
    "services": set(),
    "threads": set(),
    "http_server": {"http_types"},
    "http_types": set(),
    "interpreter_watch": set(),
    "processes": {"companions", "types", "config", "threads"},
    "devices": {"processes"},
    "memory": {"devices"},
    "algorithms": {"types", "cpu"},
    "data": {"companions", "types", "algorithms", "config", "files", "hub", "hub_data", "processes"},
    "rewards": {"companions", "types", "config", "data", "services", "threads", "processes"},
    "environments": {"config", "data", "interpreter_watch", "processes", "services", "threads", "types"},
    "weights": {"types", "roles", "cpu", "config", "cluster", "devices", "files", "memory", "threads"},
    "report": {"types", "config", "data", "files", "threads", "run_files"},
    "backends": {*BELOW_BACKENDS, "memory"},
    "cluster": {
        *("types", "roles", "config", "data", "devices", "files", "hub", "memory", "processes", "run_files", "threads"),
    },
    "engine": {*BELOW_BACKENDS, "backends", "cluster", "run_files"},
    "checkpoint": {*("cluster", "config", "data", "engine", "files", "threads", "types")},
    "resilience": {"checkpoint", "cluster", "engine"},
    "recipes": {"types", "roles", "engine", "cluster", "algorithms", "config", "data"},
    "launch": {*BELOW_BACKENDS, "backends", "checkpoint", "cluster", "engine", "report", "resilience", "run_files"},
    "api": {"config", "launch", "report", "run_files"},
    "cli": {*BELOW_BACKENDS, "api", "backends", "cluster", "launch", "report", "run_files"},
}
HEAVY = {
    "ray": (
        *("cluster/ray/", "cluster/survivors/", "coalign_diagnose/doctor/ray_nodes.py"),
        *("coalign_jobs/ray_client.py", "coalign_jobs/sweep/tune.py"),
    ),
    "vllm": "coalign_vllm/",
    "megatron": "coalign_megatron/backend/",
    "deepspeed": "coalign_deepspeed/",
    "latex2sympy2_extended": "coalign_graders/checks.py",  # math-verify's parser
    "huggingface_hub": "hub.py",
    "gguf": "coalign_prepare/gguf.py",
    "httpx2": "coalign_graders/services/client.py",
    "mcp": "coalign_agents/mcp.py",
    "cloudpickle": "processes/function_process.py",
    "matplotlib": ("report/plots.py",),
    "fsspec": "checkpoint/remote.py",
    "uvicorn": "http_server.py",
    "starlette": "http_server.py",
    "h11": "http_server.py",
    "datasets": "hub_data.py",
    "bitsandbytes": "backends/optim.py",
    "torchao": "backends/hf/linear_layers.py",
    "peft": "backends/lora.py",
    "sentencepiece": "coalign_megatron/vocab/tokenizer.py",
    "tensorboard": "report/trackers.py",
    "wandb": "report/trackers.py",
    "mlflow": "report/trackers.py",
    "swanlab": "report/trackers.py",
    "trackio": "report/trackers.py",
    "textual": "coalign_board/watch.py",
    "textual_plotext": "coalign_board/watch.py",
}


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imports(file: Path, *, annotations: bool = True) -> list[str]:
    """Absolute names of everything that a file imports, lazily or not; with ``annotations``, for annotations too."""
    tree = parse(file)
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    left_out = set() if annotations else {id(node) for check in checks for node in ast.walk(check)}
    found = []
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found += [node.module] if node.module != "coalign" else [f"coalign.{alias.name}" for alias in node.names]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))
COMPANION_FILES = [file for package in COMPANIONS for file in sorted(package.rglob("*.py"))]


def name_file(file: Path) -> str:
    """`engine/engine.py` for a file of the core, `coalign_board/server.py` for one of a companion."""
    base = PACKAGE if file.is_relative_to(PACKAGE) else next(c.parent for c in COMPANIONS if file.is_relative_to(c))
    return str(file.relative_to(base))


def test_the_core_imports_no_companion():
    wrong = [f"{name_file(file)} imports {name}" for file in FILES for name in imports(file) if "coalign_" in name]
    assert not wrong, "\n".join(wrong)


def test_companions_import_themselves_the_core_and_what_they_require():
    wrong = []
    for package in COMPANIONS:
        project = tomllib.loads((package.parent / "pyproject.toml").read_text())["project"]
        allowed = {package.name, *(re.split("[=[]", name)[0].replace("-", "_") for name in project["dependencies"])}
        for file in sorted(package.rglob("*.py")):
            names = {name for name in imports(file) if name.startswith("coalign_")}
            wrong += [f"{name_file(file)} imports {name}" for name in names if name.partition(".")[0] not in allowed]
    assert not wrong, "\n".join(wrong)


def test_imports_point_downwards():
    wrong = []
    for file in FILES:
        part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):
            continue
        for name in imports(file, annotations=False):
            if name.startswith("coalign.") and (home := name.split(".")[1]) not in {part, *ALLOWED[part]}:
                wrong.append(f"{file.relative_to(PACKAGE)} imports {name}; {part} may not import {home}")
    assert not wrong, "\n".join(wrong)


# Everything else calls torch.accelerator.
CUDA = {
    "devices.py",
    "coalign_megatron/backend/cpu.py",  # names what megatron-core asks of CUDA
}


def test_cuda_has_one_home():
    found = {name_file(file) for file in FILES + COMPANION_FILES if "torch.cuda." in file.read_text()}
    assert found <= CUDA


def test_heavy_packages_have_one_home():
    wrong = []
    for file in FILES + COMPANION_FILES:
        where = name_file(file)
        for name in imports(file):
            known = HEAVY.get(name.split(".")[0], where)
            homes = (known,) if isinstance(known, str) else known
            if not any(home == where or (home.endswith("/") and where.startswith(home)) for home in homes):
                wrong.append(f"{where} imports {name}, which belongs to {', '.join(homes)}")
    assert not wrong, "\n".join(wrong)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_the_configuration_and_the_display_loads_no_torch():
    code = (
        "import sys, coalign.api, coalign.config, coalign.config.schema, coalign.cli, coalign.report.display;"
        "import coalign.report.plots;"
        "print([m for m in ('torch', 'transformers', 'ray', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    assert run(code).strip() == "[]"


def test_help_on_all_commands_loads_no_torch():
    code = (
        "import sys; from coalign.companions import COMMANDS, list_entries;"
        "print(len([entry.load() for entry in list_entries(COMMANDS).values()]) > 15,"
        "[m for m in ('torch', 'transformers', 'ray', 'matplotlib') if m in sys.modules])"
    )
    assert run(code).strip() == "True []"


def test_nothing_heavy_is_imported_until_it_is_used():
    code = (
        "import sys, coalign.engine.engine, coalign.recipes.grpo, coalign.recipes.ppo, coalign.recipes.sft;"
        "from coalign.cluster.dry import DryCluster; from coalign.config.schema import *;"
        "from coalign.roles import Context;"
        "DryCluster(RunConfig(algorithm='none')).spawn('m', ModelConfig(), Context());"  # stands in for a backend
        "heavy = ('ray', 'vllm', 'datasets', 'matplotlib', 'transformers', 'coalign.backends.hf.fsdp');"
        "print([m for m in heavy if m in sys.modules])"
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


def test_no_folder_holds_more_than_15_modules():
    for folder in {file.parent for file in FILES + COMPANION_FILES}:
        modules = [file for file in folder.glob("*.py") if file.name not in ("__init__.py", "__main__.py")]
        assert len(modules) <= 15, f"{folder.relative_to(ROOT)} holds {len(modules)} modules"


def test_every_package_says_what_is_inside():
    for file in FILES + COMPANION_FILES:
        if file.name == "__init__.py":
            assert ast.get_docstring(parse(file)), f"{name_file(file)} has no docstring"


def test_public_class_names_are_unique():
    homes: dict[str, list[str]] = {}
    for file in FILES + COMPANION_FILES:
        for node in parse(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name_file(file))
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    assert not twice, twice


def test_json_lines_are_split_at_newlines_alone():
    """A text is split at U+2028, too, which JSON leaves as it is; bytes are not."""
    split = re.compile(r"(json\.loads|jsonl).*read_text\(.*\)\.splitlines")
    folders = [PACKAGE.parent / name for name in ("coalign", "packages", "tests", "examples", "benchmarks")]
    sources = [file for folder in folders for file in folder.rglob("*.py")]
    assert not [str(file) for file in sources if split.search(file.read_text(encoding="utf-8"))]


def test_a_file_that_cannot_be_read_is_named_before_torch_is_imported(tmp_path):
    (tmp_path / "run.yaml").write_text("models: [")
    code = (
        "import sys, coalign\n"
        "for call in (coalign.load_config, coalign.train):\n"
        f"    try: call({str(tmp_path / 'run.yaml')!r})\n"
        "    except ValueError as error: print(error, 'torch' in sys.modules)"
    )
    shown = run(code).splitlines()
    assert len(shown) == 2 and all("run.yaml:1" in line and line.endswith("False") for line in shown), shown
