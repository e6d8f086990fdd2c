"""Licences of what Coalign installs: every one is known, and docs/licences.md has it."""

from __future__ import annotations

import re

from tests.packaging.licences import PAGE, PROPRIETARY, find_licence, find_packages, is_known, is_permissive

PACKAGES = find_packages()


def test_every_licence_is_known():
    assert {"torch", "transformers", "matplotlib", "ray"} <= PACKAGES.keys()
    unknown = {name: find_licence(name) for name in PACKAGES if not is_known(find_licence(name))}
    assert unknown.keys() <= PROPRIETARY.keys(), unknown


def test_coalign_itself_needs_nothing_proprietary_and_no_strong_copyleft():
    core = {name for name, extras in PACKAGES.items() if "" in extras}
    assert not core & PROPRIETARY.keys()
    assert {name for name in core if not is_permissive(find_licence(name))} <= {"certifi", "tqdm"}


def test_the_page_has_every_package_with_its_licence():
    rows = dict(re.findall(r"(?m)^\| ([\w.-]+) \| \**([^|*]+?)\** \|", PAGE.read_text(encoding="utf-8")))
    wrong = {name: rows.get(name) for name in PACKAGES if rows.get(name) != find_licence(name)}
    assert not wrong, f"run python -m tests.packaging.licences: {wrong}"
