"""What pyproject.toml, the lock of versions and the files beside them say of the package, compared with the package."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import coalign
from coalign import companions
from tests.packaging.licences import ROOT, read_extras

FILES = sorted((ROOT / "coalign").rglob("*.py"))


def read_project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


PROJECT = read_project(ROOT)
COMPANIONS = {folder.name: read_project(folder) for folder in sorted(ROOT.glob("packages/*")) if folder.is_dir()}
# What a module is called, where its package has another name.
PACKAGES = {
    "google": "protobuf",
    "grpc": "grpcio",
    "latex2sympy2_extended": "math-verify",  # its parser
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "PIL": "pillow",
    "yaml": "pyyaml",
}
NAMED = {*companions.GROUPS} - {companions.EXPLAINS}  # groups whose entries people ask for
# Modules that come with a package that is declared.
WITH_OTHERS = {
    "h11": "uvicorn",
    "mpmath": "math-verify",
    "pydantic_core": "pydantic",
    "sympy": "math-verify",
}


def read_git_files(folder: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return listed.stdout.split()


def read_imports(file: Path, *, late: bool) -> set[str]:
    """Read the top names of what a file imports from its lines; with ``late`` also within functions."""
    space = r"[ \t]*" if late else ""
    found = re.findall(rf"(?m)^{space}(?:from (\w+)[\w.]* import |import (\w+))", file.read_text(encoding="utf-8"))
    return {name for names in found for name in names if name}


def test_every_import_is_of_a_package_that_is_declared():
    check_imports(FILES, {*itertools.chain(*read_extras().values())})


@pytest.mark.parametrize("name", COMPANIONS)
def test_a_companion_declares_what_it_imports(name):
    project = COMPANIONS[name]["project"]
    needs = {*project["dependencies"], *itertools.chain(*project.get("optional-dependencies", {}).values())}
    needs |= (
        set(PROJECT["project"]["dependencies"]) if "coalign" in {Requirement(need).name for need in needs} else set()
    )
    check_imports(sorted((ROOT / "packages" / name / f"coalign_{name}").rglob("*.py")), needs)


@pytest.mark.parametrize("name", COMPANIONS)
def test_a_companion_is_of_one_version_with_the_core_and_whole(name):
    folder, project = ROOT / "packages" / name, COMPANIONS[name]["project"]
    assert project["name"] == f"coalign-{name}" and project["version"] == coalign.__version__
    pins = [need for need in project["dependencies"] if Requirement(need).name.startswith("coalign")]
    assert pins == [f"{Requirement(need).name}=={coalign.__version__}" for need in pins]
    assert len((folder / "README.md").read_text(encoding="utf-8").splitlines()) >= 10
    patterns = COMPANIONS[name]["tool"]["setuptools"].get("package-data", {}).get(f"coalign_{name}", [])
    matched = {path for pattern in patterns for path in (folder / f"coalign_{name}").glob(pattern)}
    data = [ROOT / file for file in read_git_files(f"packages/{name}/coalign_{name}") if not file.endswith(".py")]
    assert not [str(path) for path in data if path not in matched]


def test_the_core_knows_what_its_companions_bring():
    """So a missing one is named: each entry point stands in `coalign/companions.py`, and nothing else does."""
    for name, project in COMPANIONS.items():
        brought = {group: {*entries} for group, entries in project["project"]["entry-points"].items() if group in NAMED}
        assert brought == {group: {*names} for group, names in companions.COMPANIONS[f"coalign-{name}"].items()}
    assert companions.COMPANIONS.keys() == {f"coalign-{name}" for name in COMPANIONS}


def check_imports(files: list[Path], needs: set[str]) -> None:
    """Assert that files import nothing but Coalign, Python's own modules and packages that are declared."""
    declared = {canonicalize_name(Requirement(need).name) for need in needs}
    wrong = set()
    for file in files:
        neighbours = {path.stem for path in file.parent.glob("*.py")}  # the sandbox runs its files as programs
        for name in read_imports(file, late=True) - {"coalign", *neighbours, *sys.stdlib_module_names}:
            if name.startswith("coalign_"):  # tests/architecture reads these
                continue
            if canonicalize_name(PACKAGES.get(name, name)) not in declared and name not in WITH_OTHERS:
                wrong.add(f"{file.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(sorted(wrong))


def test_the_wheel_holds_every_file_of_the_package():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["coalign"]
    matched = {path for pattern in patterns for path in (ROOT / "coalign").glob(pattern)}
    data = [ROOT / name for name in read_git_files("coalign") if not name.endswith(".py")]
    assert data and not [str(path) for path in data if path not in matched]


def test_the_version_and_the_hooks_are_those_of_the_project():
    assert re.fullmatch(r"\d+\.\d+\.\d+", coalign.__version__)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == coalign.__version__ and citation["license"] == PROJECT["project"]["license"]
    assert re.search(rf"(?m)^## \[.*{re.escape(coalign.__version__)}", (ROOT / "CHANGELOG.md").read_text("utf-8"))
    pinned = set((ROOT / "constraints.txt").read_text(encoding="utf-8").split())
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    needs = [each for hook in hooks["repos"][0]["hooks"] for each in hook.get("additional_dependencies", ())]
    assert needs and set(needs) <= pinned


def test_forms_for_issues_are_those_that_code_hosts_read():
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert forms
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys()
        for field in form["body"]:
            assert field["type"] in ("checkboxes", "dropdown", "input", "markdown", "textarea")
            assert field["attributes"].get("label") and field["id"]


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md"])
def test_links_of_a_page_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing = {target for target in targets if target and not (ROOT / target).exists()}
    assert not missing


def test_optional_packages_are_not_imported_at_the_start_of_a_module():
    """Except in modules that are imported late themselves."""
    optional = {"matplotlib", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "ray", "gguf", "PIL", "peft"}
    allowed = ("cluster/ray/", "cluster/survivors/", "data/images/", "backends/lora.py")
    files = [file for file in FILES if not str(file.relative_to(ROOT / "coalign")).startswith(allowed)]
    wrong = {str(file.relative_to(ROOT)): read_imports(file, late=False) & optional for file in files}
    assert not {file: names for file, names in wrong.items() if names}
