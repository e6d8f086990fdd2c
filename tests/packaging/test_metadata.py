"""What pyproject.toml, the lock of versions and the files beside them say of the package, compared with the package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import coalign
from tests.packaging.licences import ROOT, read_extras

FILES = sorted((ROOT / "coalign").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
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
    declared = {canonicalize_name(Requirement(need).name) for needs in read_extras().values() for need in needs}
    wrong = set()
    for file in FILES:
        neighbours = {path.stem for path in file.parent.glob("*.py")}  # the sandbox runs its files as programs
        for name in read_imports(file, late=True) - {"coalign", *neighbours, *sys.stdlib_module_names}:
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
