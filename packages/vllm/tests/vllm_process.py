"""Processes that can import vLLM's models of images where no torchvision fits torch.

vLLM asks transformers for a model's whole processor, which needs torchvision. For CPUs there is none that fits. So a
wheel is unpacked in a folder of its own, and the operators that its missing library would define are declared in it.
Nothing of it computes: Coalign makes the pixels. transformers looks for torchvision once a process, and vLLM looks at
models in further processes, so these find the folder in their environment.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from coalign.config.functions import resolve

WHEEL = "torchvision==0.28.0"
FOLDER = Path.home() / ".cache" / "coalign-tests" / f"declared-{WHEEL.replace('==', '-')}"
OPERATORS = (
    *("_deform_conv2d_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward", "_roi_align_backward"),
    *("_roi_pool_backward", "deform_conv2d", "nms", "ps_roi_align", "ps_roi_pool", "qnms", "qroi_align", "roi_align"),
    "roi_pool",
)
DECLARATION = f"""import torch
_library = torch.library.Library("torchvision", "DEF")
for _name in {OPERATORS}:
    _library.define(_name + "(Tensor dets) -> Tensor")
"""


def find_torchvision() -> bool:
    """Whether there is a torchvision to import; unpacks a wheel the first time."""
    if find_spec("torchvision") is not None or FOLDER.is_dir():
        return True
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=FOLDER.parent) as made:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", made, WHEEL]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            return False
        own = Path(made) / "torchvision" / "__init__.py"
        own.write_text(DECLARATION + own.read_text())
        shutil.copytree(made, FOLDER, dirs_exist_ok=True)
    return True


def call(function: str, *arguments: Any, scratch: Path, seconds: float = 900) -> Any:
    """What the function with this dotted path returns in a process of its own."""
    given, result = scratch / "given.pickle", scratch / "result.pickle"
    given.write_bytes(pickle.dumps((function, arguments)))
    command = [sys.executable, "-m", "packages.vllm.tests.vllm_process", str(given), str(result)]
    paths = [os.environ.get("PYTHONPATH", ""), *([] if find_spec("torchvision") else [str(FOLDER)])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return pickle.loads(result.read_bytes())


def main(given: str, result: str) -> None:
    function, arguments = pickle.loads(Path(given).read_bytes())
    answer = resolve(function, "")(*arguments)
    Path(result).write_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
