"""Keeps secrets out of files, trackers and messages: these show `${env:NAME}` where the variable's value would stand.

A secret is the value of an environment variable that a configuration of this process has read, and that is named like
one, or that the client of a tracker or hub reads by itself. It is remembered here because errors rise far from the
configuration that it is part of. Whatever writes the configuration, the log, the screen or a traceback calls
`hide_secrets`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

_NAME = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_SHORTEST = 6  # characters: a shorter value is a number or a switch, and stands in many other words
_CLIENTS = (  # variables that clients read by themselves
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_TOKEN"),
    *("MLFLOW_TRACKING_PASSWORD", "RAY_AUTH_TOKEN"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "FSSPEC_S3_KEY", "FSSPEC_S3_SECRET"),
    *("FSSPEC_S3_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_SECRET"),
    *("OSS_ACCESS_KEY_SECRET", "OSS_SECURITY_TOKEN"),
)
_references: dict[str, str] = {}  # by the texts that they replace


def is_secret(name: str) -> bool:
    """Return whether an environment variable of this name holds a secret."""
    return bool(_NAME.search(name))


def remember_secret(name: str, text: str, value: Any) -> None:
    """Remember the environment variable's ``text`` and the ``value`` that is used, if its name is a secret's."""
    if is_secret(name):
        for spelled in (text, str(value)):
            # As `repr` and a URL write it in messages, and as a dumped configuration writes what could be a reference.
            for form in (spelled, repr(spelled)[1:-1], quote(spelled, safe=""), spelled.replace("${", "\\${")):
                if len(form) >= _SHORTEST:
                    _references[form] = f"${{env:{name}}}"


def hide_secrets(value: Any) -> Any:
    """Replace secrets by references to their variables, in texts and numbers at any depth."""
    for name in _CLIENTS:
        if text := os.environ.get(name):
            remember_secret(name, text, text)
    return _hide(value) if _references else value


def _hide(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_hide(name): _hide(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(item) for item in value]
    if not isinstance(value, str):
        return _references.get(str(value), value)
    for secret in sorted(_references, key=len, reverse=True):  # one may contain another
        value = value.replace(secret, _references[secret])
    return value
