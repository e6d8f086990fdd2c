"""Builds the archives of the package, installs each into an empty environment, and trains there for three steps.

    python -m tests.packaging.installation [pip|uv ...]      takes minutes and a package index; by default both

Nothing of the checkout is seen: the working directory is another one, and the path is that of the new environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.packaging.licences import ROOT
from tests.tiny import tiny_model_dir

STEPS = 3


def build_archives(folder: Path) -> tuple[Path, Path]:
    """Build the source archive, the wheel from it, and those of companions; return Coalign's wheel and archive."""
    build(ROOT, folder)
    [wheel], [archive] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    for companion in sorted(ROOT.glob("packages/*/pyproject.toml")):
        build(companion.parent, folder)
    return wheel, archive


def build(project: Path, folder: Path) -> None:
    """Build a source archive, and the wheel from that: so no folder `build` stays beside the sources."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(project)], folder)


def write_task(folder: Path, coalign: list[str], environment: dict[str, str]) -> None:
    """Write a tiny model, prompts, and what `init grpo` writes with its brackets filled in: run.yaml."""
    tiny_model_dir(folder / "model", hidden=8, layers=1, heads=2, kv_heads=1)
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = run([*coalign, "init", "grpo"], folder, environment)
    (folder / "run.yaml").write_text(
        text.replace("<data file>", "prompts.jsonl").replace("<model directory or name of the hub>", "model")
    )


def try_commands(folder: Path, coalign: list[str], environment: dict[str, str]) -> str:
    """Run the first commands of a stranger in ``folder``, and a run of STEPS steps; return what `--version` says."""
    version = run([*coalign, "--version"], folder, environment).strip()
    assert "grpo" in run([*coalign, "recipes"], folder, environment)
    write_task(folder, coalign, environment)
    settings = [
        "reward=exact_match",
        "output=run",
        "data.chat_template=none",
        "models.policy.sampling.max_new_tokens=4",
    ]
    settings += [f"runtime.steps={STEPS}", "runtime.prompts_per_step=2", "runtime.samples_per_prompt=2"]
    make_mistakes(folder, coalign, environment)
    assert max(map(len, run([*coalign, "recipes"], folder, environment).splitlines())) <= 100
    report = json.loads(run([*coalign, "check", "run.yaml", *settings, "--json"], folder, environment))
    assert report["problems"] == [] and report["algorithm"] == "grpo"
    shown = run([*coalign, "train", "run.yaml", *settings], folder, environment)
    assert f"step {STEPS}/{STEPS} │ reward" in shown and "next: coalign chat run · coalign board run" in shown
    words = ["generate", "run", "--prompt", "1+1=", "--max-new-tokens", "2", "--chat-template", "none"]
    run([*coalign, *words], folder, environment)
    lines = (folder / "run" / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    assert (folder / "run" / "model" / "model.safetensors").exists()
    return version


MISTAKES = [  # what a stranger types, and what the one line says that comes back
    (["check", "run.yaml", "models.trainer.lr=1e-6"], "did you mean 'models.trainer.optimizer.lr'?"),
    (["check", "run.yaml", "runtime.gpus=2"], "did you mean 'models.NAME.num_gpu'?"),
    (["check", "run.yaml", "lora.r=8"], "did you mean 'models.trainer.lora.rank'?"),
    (["check", "run.yaml", "learning_rate=1e-6"], "is TRL's; here it is models.trainer.optimizer.lr"),
    (["check", "run.yaml", "loss.fn=sigmoid", "reward=exact_match"], "did you mean 'dpo'?"),
    (["check", "run.yaml", "reward=rw.py:score"], "such as `rw:score`"),
    (["train", "verl.yaml"], "`coalign import-config verl.yaml > run.yaml` translates it"),
    (["train", "nowhere.yaml"], "there is no file 'nowhere.yaml'"),
    (["generate", "nowhere", "-p", "x"], "MODEL: there is no directory 'nowhere'"),
    (["tran", "run.yaml"], "there is no command 'tran'; did you mean 'train'?"),
]


def make_mistakes(folder: Path, coalign: list[str], environment: dict[str, str]) -> None:
    """Make the mistakes of a first hour: each ends with exit code 2 and one line that says what is right."""
    (folder / "verl.yaml").write_text("actor_rollout_ref: {model: {path: model}}\n")
    for words, expected in MISTAKES:
        done = subprocess.run([*coalign, *words], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and expected in done.stderr, done.stderr


def run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """Run a command in ``folder``; return what it printed. RuntimeError with its output if it fails."""
    environment = environment or {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def install(tool: str, archive: Path, folder: Path) -> Path:
    """Install an archive with pip or uv into a new environment in ``folder``; return its folder of programs."""
    venv = folder / "venv"
    if tool == "uv":
        run(["uv", "venv", "--quiet", "--python", sys.executable, str(venv)], folder)
        command = ["uv", "pip", "install", "--quiet", "--python", str(venv / "bin" / "python")]
    else:
        run([sys.executable, "-m", "venv", str(venv)], folder)
        command = [str(venv / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--find-links", str(archive.parent)]
    run([*command, "torch", f"{archive}[migrate,plan]"], folder)
    return venv / "bin"


def main(tools: list[str]) -> None:
    with TemporaryDirectory() as built:
        archives = build_archives(Path(built))
        for tool in tools or ["pip", "uv"]:
            for archive in archives:
                with TemporaryDirectory() as home:
                    begun = time.perf_counter()
                    programs = install(tool, archive, Path(home))
                    installed = time.perf_counter()
                    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": home, "HF_HUB_OFFLINE": "1"}
                    (Path(home) / "work").mkdir()
                    version = try_commands(Path(home) / "work", [str(programs / "coalign")], environment)
                    seconds = f"{installed - begun:.0f} s to install, {time.perf_counter() - installed:.0f} s to run"
                    sys.stdout.write(f"{tool} {archive.name}: {version}: {seconds}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
