"""Writes the YAML of a job for people: texts of several lines as blocks, and a comment for each variable."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from coalign_jobs.environment import JobVariable


class _JobDumper(yaml.SafeDumper):
    """Repeats equal parts, since people do not read anchors, and writes texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_JobDumper.add_representer(str, _write_text)


def write_yaml(
    documents: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    head: Sequence[str],
    variables: Sequence[JobVariable],
) -> str:
    """Write one document or several, below the lines of ``head`` as comments.

    Each of the ``variables`` gets its reason as a comment where it stands first: `NAME: value`, or `- name: NAME` as
    Kubernetes has it.
    """
    several = [documents] if isinstance(documents, Mapping) else documents
    text = yaml.dump_all(several, Dumper=_JobDumper, sort_keys=False, width=10**9, allow_unicode=True)
    for variable in variables:
        name = re.escape(variable.name)
        line = re.compile(rf"^( *)((?:- name: {name}$|{name}: .*$))", re.MULTILINE)
        text = line.sub(lambda match, why=variable.reason: f"{match[1]}# {why}\n{match[0]}", text, count=1)
    return "".join(f"# {line}\n" for line in head) + text
