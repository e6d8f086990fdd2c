"""Public tables of step times and throughputs as jobs of the planner: what a row publishes, and how it is predicted.

A table's kind is recognised by its columns. What a row does not publish is assumed here, in one place for all tables:

- responses whose mean is not published: two fifths of the longest for models that reason at length (Qwen3, R1), else
  a quarter of it, at most 1,200 tokens;
- prompts: 200 tokens; a trainer's micro-batch: 16,384 tokens;
- verl's runs with FSDP2 shard over 8 GPUs, and colocated ones step the optimizer on the host, as its scripts say;
- engines in runs with the first FSDP are eager, and training pads (but in AMD's recipes), as verl did by default then;
- activations are recomputed fully where a run's column says so, and selectively in Megatron's pre-training tables.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from coalign_plan.constants import Constants
from coalign_plan.generation import EngineReplica
from coalign_plan.gpus import ClusterSpec, find_gpu
from coalign_plan.hf_config import read_model_size
from coalign_plan.job import JobShape, LengthDistribution, ModelWork, Parallelism
from coalign_plan.model_size import ModelSize
from coalign_plan.prediction import StepPrediction, predict_step
from coalign_plan.simulation import ReplicaSimulation, SequenceGroup
from coalign_plan.training import TokenBatch, TrainingModel
from coalign_plan.transfer import broadcast_seconds, count_tensors

DATA = Path(__file__).resolve().parent / "data" / "planner"
WEIGHT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5625}
FLASH2_TFLOPS = 330.0  # FlashAttention 2's best on any GPU: it does not use what Hopper and Blackwell added


@dataclass(frozen=True)
class PublishedFigure:
    """One figure of a table: ``published`` (seconds, or GPU-seconds), and the function that predicts it.

    ``workload`` and ``layout`` tell which rows are of the same work done in different ways. ``is_counted`` is False
    for rows that lack what a prediction needs, and are right or wrong in their direction only.
    """

    table: str
    name: str
    published: float
    predict: Callable[[Constants], float]
    workload: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    is_counted: bool = True


@dataclass
class PublicTable:
    """Figures of one CSV file, and the rows that could not be read, with the reason."""

    name: str
    figures: list[PublishedFigure] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@cache
def _models() -> tuple[dict[str, dict], dict[str, str]]:
    content = json.loads((DATA / "models.json").read_text(encoding="utf-8"))
    return content["models"], content["same_sizes"]


@cache
def find_model(name: str) -> ModelSize:
    """Return the sizes of a public model, its name in any spelling. Raises ValueError if it is not in models.json."""
    models, same = _models()
    names = {_plain(known): known for known in [*models, *same]}
    plain = _plain(name)
    if plain not in names:
        plain = re.sub(r"(instruct|chat|base|it|hf|thinking|\d{4})+$", "", plain)
    if plain not in names:
        raise ValueError(f"model '{name}' is not in models.json")
    known = same.get(names[plain], names[plain])
    return read_model_size(models[known], known)


def _plain(name: str) -> str:
    return re.sub(r"meta|[^a-z0-9]", "", name.split("/")[-1].lower())


def read_table(path: Path) -> PublicTable:
    """Read a CSV file of any of the kinds. Raises ValueError if its columns are of none of them."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = set(rows[0]) if rows else set()
    kinds: list[tuple[set[str], Callable[[str, dict], Iterator[PublishedFigure]]]] = [
        ({"output_tokens_per_s", "input_len", "output_len"}, _read_generation),
        ({"tokens_s_gpu", "gbs", "seq_len"}, _read_training),
        ({"mfu", "gbs", "seq_len"}, _read_mfu),
        ({"micro_batches", "seq_len", "step_s"}, _read_trainer_step),
        ({"step_s", "mode", "prompts", "n"}, _read_rl_step),
        ({"seconds", "how", "model"}, _read_sync),
        ({"what", "faster_over_slower"}, _read_ratio),
    ]
    for needed, read in kinds:
        if needed <= columns:
            table = PublicTable(path.stem)
            for number, row in enumerate(rows, 2):
                try:
                    table.figures += read(path.stem, row)
                except (ValueError, KeyError) as error:
                    table.refused.append(f"{path.name}: line {number}: {error}")
            return table
    raise ValueError(f"{path} has columns of no kind of table known here: {', '.join(sorted(columns))}")


def _number(row: dict, key: str, default: float | None = None) -> float:
    text = (row.get(key) or "").strip()
    if text in ("", "n/a", "-"):
        if default is None:
            raise ValueError(f"`{key}` is empty")
        return default
    return float(text)


def _whole(row: dict, key: str, default: int = 1) -> int:
    return int(_number(row, key, default))


def _cluster(row: dict, gpus: int) -> ClusterSpec:
    gpu = find_gpu(row["gpu"])
    node = min(gpus, 8)
    return ClusterSpec(math.ceil(gpus / node), node, gpu, gpu.network_gb_s)


# ---- training --------------------------------------------------------------------------------------------------------


def _training_work(row: dict, size: ModelSize, gpus: int, recompute: str) -> ModelWork:
    tensor, pipeline, context = (_whole(row, key) for key in ("tp", "pp", "cp"))
    expert = _whole(row, "ep", min(8, gpus))
    layout = Parallelism(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert if size.is_moe else 1,
        data=max(1, gpus // (tensor * pipeline * context)),
        virtual_pipeline=_whole(row, "vp"),
        sharding="weights" if _whole(row, "fsdp", 0) else "optimizer",
    )
    micro = _whole(row, "mbs") * _whole(row, "seq_len") // context
    return ModelWork(
        "trainer", "trainer", size, layout, precision=row["precision"].removeprefix("mx"), micro_batch_tokens=micro,
        recompute=recompute if recompute in ("none", "selective", "full") else "none",
        attention_tflops=FLASH2_TFLOPS if row.get("attention") == "flash_attention_2" else None,
    )  # fmt: skip


def _read_training(table: str, row: dict) -> Iterator[PublishedFigure]:
    size, gpus = find_model(row["model"]), _whole(row, "n_gpus")
    length, batch = _number(row, "seq_len"), _number(row, "gbs")
    work = _training_work(row, size, gpus, row.get("recompute") or "none")
    cluster = _cluster(row, gpus)
    tokens = TokenBatch(batch * length, length, length)
    keys = ("gpu", "n_gpus", "precision", "seq_len", "gbs")
    yield PublishedFigure(
        table,
        f"{row['model']} {row['gpu']} x{gpus} {row['precision']} tp{work.layout.tensor} pp{work.layout.pipeline} "
        f"ep{work.layout.expert} {length:.0f}",
        batch * length / gpus / _number(row, "tokens_s_gpu"),
        lambda constants: TrainingModel(work, cluster, constants).train(tokens).seconds,
        (row["model"], *(row[key] for key in keys)),
        tuple(row.get(key) or "" for key in ("fsdp", "tp", "pp", "cp", "vp", "ep", "mbs", "recompute")),
    )


def _read_mfu(table: str, row: dict) -> Iterator[PublishedFigure]:
    size, gpus = find_model(row["model"]), _whole(row, "n_gpus")
    length, batch = _number(row, "seq_len"), _number(row, "gbs", 1152)
    tensor, pipeline = _usual_layout(size, gpus)
    expert = 8 if size.is_moe else 1
    chunks = 4 if pipeline > 1 else 1
    assumed = {"tp": tensor, "pp": pipeline, "ep": expert, "mbs": 1, "vp": chunks}
    filled = {key: str(value) for key, value in assumed.items()} | row
    work = _training_work(filled, size, gpus, "selective")
    cluster = _cluster(row, gpus)
    tokens = TokenBatch(batch * length, length, length)
    peak = cluster.gpu.bf16_tflops * 1e12 * gpus
    flops = 3 * size.forward_flops(length) * tokens.tokens

    yield PublishedFigure(
        table,
        f"{row['model']} {row['gpu']} x{gpus}",
        flops / peak / _number(row, "mfu"),
        lambda constants: TrainingModel(work, cluster, constants).train(tokens).seconds,
    )


def _usual_layout(size: ModelSize, gpus: int) -> tuple[int, int]:
    """Return tensor and pipeline parallelism of a run that does not publish them: such that 18 bytes a number fit."""
    dense = size.parameters - size.expert_parameters * (7 / 8)
    for pipeline in range(1, size.layer_count + 1):
        for tensor in (1, 2, 4, 8) if pipeline == 1 else (8,):
            if gpus % (tensor * pipeline) == 0 and dense * 8 / tensor / pipeline < 40e9:
                return tensor, pipeline
    return 8, size.layer_count


def _read_trainer_step(table: str, row: dict) -> Iterator[PublishedFigure]:
    """Read prime-rl's benchmarks: FSDP over all GPUs, packed sequences of one length, one of them a micro-batch."""
    size, gpus = find_model(row["model"]), _whole(row, "n_gpus")
    length = _number(row, "seq_len")
    rank = _whole(row, "lora_rank", 0)
    context = _whole(row, "cp")
    work = ModelWork(
        "trainer",
        "trainer",
        size,
        Parallelism(context=context, expert=_whole(row, "ep"), data=gpus // context),
        micro_batch_tokens=int(length) // context,
        recompute="full",
        offload_activations=row["ac"] == "Offload",
        lora_rank=rank or None,
        attention_tflops=FLASH2_TFLOPS if row.get("attention") == "flash_attention_2" else None,
        is_eager=True,
    )
    cluster = _cluster(row, gpus)
    tokens = TokenBatch(gpus / context * _number(row, "micro_batches") * length, length, length)
    yield PublishedFigure(
        table,
        f"{size.name} {cluster.gpu.name} x{gpus} {row['kind']} lora {rank} {row['ac']} {length:.0f} "
        f"{(row.get('attention') or '')[-1:]}",
        _number(row, "step_s"),
        lambda constants: TrainingModel(work, cluster, constants).train(tokens).seconds,
        (size.name, row["kind"], row["gpu"], row["n_gpus"], row["seq_len"], row["micro_batches"]),
        tuple(row.get(key) or "" for key in ("lora_rank", "ac", "attention", "cp", "ep")),
    )


# ---- generation ------------------------------------------------------------------------------------------------------


def _read_generation(table: str, row: dict) -> Iterator[PublishedFigure]:
    size = find_model(row["model"])
    tensor, pipeline = _whole(row, "tp"), _whole(row, "pp")
    expert = _whole(row, "ep", tensor if size.is_moe else 1)  # TensorRT-LLM's page: attention_dp for MoE models
    precision = row["precision"]
    native = row["model"].startswith("GPT-OSS")  # their checkpoints are in 4 bits
    work = ModelWork(
        "policy", "rollout", size, Parallelism(tensor=tensor, pipeline=pipeline, expert=expert),
        precision=precision if not (native and precision == "fp8") else "bf16",
        weight_bytes=0.5625 if native else WEIGHT_BYTES[precision],
        kv_bytes=2.0 if precision in ("bf16", "fp16") or (native and precision == "fp8") else 1.0,
        max_sequences=2048 * (tensor if expert > 1 else 1), memory_share=0.95,
    )  # fmt: skip
    cluster = _cluster(row, tensor * pipeline)
    prompt, answer, requests = (_number(row, key) for key in ("input_len", "output_len", "requests"))

    def predict(constants: Constants) -> float:
        replica = ReplicaSimulation(EngineReplica(work, cluster, constants), work.max_sequences)
        replica.submit([SequenceGroup(requests, 0, prompt, answer)])
        while replica.has_work:
            replica.advance()
        return replica.time * tensor * pipeline

    layout = f"tp{tensor} pp{pipeline}" + (f" ep{expert}" if expert > 1 else "")
    yield PublishedFigure(
        table,
        f"{row['model']} {row['gpu']} {layout} {precision} {prompt:.0f}/{answer:.0f}",
        requests * answer / _number(row, "output_tokens_per_s") * tensor * pipeline,
        predict,
        (row["model"], row["gpu"], precision, row["input_len"], row["output_len"]),
        (layout,),
    )


# ---- reinforcement learning ------------------------------------------------------------------------------------------


def _read_rl_step(table: str, row: dict) -> Iterator[PublishedFigure]:
    gpus = _whole(row, "n_gpus")
    is_whole = bool(row.get("prompts") and row.get("resp_max")) and "direction only" not in (row.get("notes") or "")
    job, cluster, parts = _rl_job(row)
    keys = ("model", "gpu", "n_gpus", "prompts", "n", "resp_max", "gen_precision")
    workload = tuple(row.get(key) or "" for key in keys) if not row["id"].startswith(("openrlhf", "dschat")) else (
        row["model"], row["gpu"], str(gpus))  # fmt: skip
    layout = (row["mode"], row.get("train_backend") or "", row.get("gen_gpus") or "", row.get("notes") or "")
    tested = re.search(r"step includes ([\d.]+) s of testing", row.get("notes") or "")
    yield PublishedFigure(
        table,
        row["id"],
        _number(row, "step_s") - (float(tested[1]) if tested else 0.0),
        lambda constants: _predicted(job, cluster, constants).seconds * parts,
        workload,
        layout,
        is_whole,
    )
    if not is_whole or row["mode"] != "colocate" or not row.get("gen_s"):
        return
    phases = f"{table}_phases"
    yield PublishedFigure(
        phases, row["id"] + " generate", _number(row, "gen_s"),
        lambda c: sum(_predicted(job, cluster, c).phase_seconds().get(k, 0.0) for k in ("generate", "load", "sync")),
    )  # fmt: skip
    if row.get("logp_s") and _whole(row, "forwards"):
        yield PublishedFigure(
            phases, row["id"] + " score", _number(row, "logp_s"),
            lambda c: _predicted(job, cluster, c).phase_seconds().get("score", 0.0),
        )  # fmt: skip
    if row.get("train_s"):
        yield PublishedFigure(
            phases, row["id"] + " train", _number(row, "train_s"),
            lambda c: _predicted(job, cluster, c).phase_seconds()["train"],
        )  # fmt: skip


@cache
def _predicted(job: JobShape, cluster: ClusterSpec, constants: Constants) -> StepPrediction:
    return predict_step(job, cluster, constants)


def _rl_job(row: dict) -> tuple[JobShape, ClusterSpec, int]:
    """Return the job of a row, its cluster, and how many of the job's steps are one of the row's."""
    size, gpus = find_model(row["model"]), _whole(row, "n_gpus")
    cluster = _cluster(row, gpus)
    mode = row["mode"]
    gen_gpus, train_gpus = _whole(row, "gen_gpus", gpus), _whole(row, "train_gpus", gpus)
    if mode != "colocate" and gen_gpus + train_gpus > gpus:  # halves; with critic and scorers quarters
        gen_gpus = train_gpus = gpus // (4 if mode == "split_sync" else 2)
    longest = _number(row, "resp_max", 1024)
    mean = _number(row, "resp_mean", 0.4 * longest if _reasons(row["model"]) else min(longest / 4, 1200))
    gen_tensor = _whole(row, "gen_tp", _usual_engine_tensor(size, cluster, gen_gpus))
    gen_precision = (row.get("gen_precision") or "bf16").split("/")[-1]
    notes = row.get("notes") or ""
    policy = ModelWork(
        "policy", "rollout", size,
        Parallelism(
            tensor=gen_tensor, data=max(1, gen_gpus // gen_tensor), expert=_whole(row, "gen_ep") if size.is_moe else 1
        ),
        group="shared" if mode == "colocate" else "rollout",
        precision=gen_precision, weight_bytes=WEIGHT_BYTES[gen_precision],
        gathers_weights="DeepSpeed-Chat" in row.get("framework", "") or "DS-Chat" in row.get("framework", ""),
        is_eager=row.get("train_backend") in ("fsdp", "deepspeed-z3", "deepspeed-hybrid"),
        memory_share=0.6 if mode == "colocate" else 0.9,
    )  # fmt: skip
    critic = bool(_whole(row, "critic", 0))
    fsdp2 = row.get("train_backend") == "fsdp2"
    offload = row.get("optimizer_offload") or ("full" if fsdp2 and mode == "colocate" else "")
    group = "shared" if mode == "colocate" else "trainer"
    separate = mode == "split_sync"
    layout = _trainer_layout(row, size, train_gpus)
    trainer = ModelWork(
        "trainer", "trainer", size, layout, group=group, micro_batch_tokens=16384,
        precision=row.get("train_precision") or "bf16",
        recompute="full" if row.get("recompute") == "full" else "selective",
        offload_optimizer=offload == "full", is_moved=offload == "param+optim",
        offload_weights=offload == "full" and layout.sharding == "weights",
    )  # fmt: skip
    models = [policy, trainer]
    for number in range(_whole(row, "forwards", 1)):
        models.append(replace(trainer, name=f"scorer{number}", role="scorer", group="score" if separate else group))
    if critic:
        models.append(replace(trainer, name="value", head_outputs=1, group="value" if separate else group))
        models.append(
            replace(trainer, name="values", role="scorer", head_outputs=1, group="value" if separate else group)
        )
    prompts, samples = _whole(row, "prompts", 512), _whole(row, "n", 8)
    parts = 4 if mode == "async" and "4 sync" in notes else 1
    staleness = {"one_off": 1.0, "async": 0.5}.get(mode, 0.0)
    if found := re.search(r"staleness(?:_threshold)?\s*([\d.]+)", notes):
        staleness = float(found[1])
    if mode != "colocate" and (found := re.search(r"(\d+)-step off", notes)):
        staleness = float(found[1])
    job = JobShape(
        tuple(models),
        max(1, prompts // parts),
        samples,
        _number(row, "prompt_len", 200),
        LengthDistribution(mean, longest),
        max_staleness=staleness,
        partial_rollout=mode == "async",
        in_order=mode != "async",
        mini_batches=max(1, _whole(row, "mini_batches", 1) // parts),
        is_padded=row.get("train_backend") == "fsdp" and cluster.gpu.name != "MI300X",
    )
    return job, cluster, parts


def _reasons(model: str) -> bool:
    return bool(re.search(r"qwen3|r1|thinking|glm-4.5|intellect", model.lower()))


def _trainer_layout(row: dict, size: ModelSize, gpus: int) -> Parallelism:
    tensor, context, pipeline, expert = (_whole(row, key) for key in ("tp", "cp", "pp", "ep"))
    backend = row.get("train_backend") or "fsdp"
    return Parallelism(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert if size.is_moe else 1,
        data=max(1, gpus // (tensor * context * pipeline)),
        sharding="optimizer" if backend == "megatron" else "weights",
        shard_group=8 if backend == "fsdp2" and gpus % 8 == 0 else None,
    )


def _usual_engine_tensor(size: ModelSize, cluster: ClusterSpec, gpus: int) -> int:
    tensor = 1
    while size.parameters * 2 / tensor > 0.5 * cluster.gpu.memory_gib * 2**30 and tensor < gpus:
        tensor *= 2
    return tensor


# ---- weight syncs and ratios -----------------------------------------------------------------------------------------


def _read_sync(table: str, row: dict) -> Iterator[PublishedFigure]:
    size = find_model(row["model"])
    cluster = _cluster({"gpu": row["gpu"] or "H20"}, 64)
    devices = _whole(row, "train_gpus", 64) + _whole(row, "rollout_gpus", 64)
    is_narrow = row["dtype"].startswith("fp8")
    sent = size.parameters * (1.0 if is_narrow else 2.0)
    by_tensor = row["how"] == "per tensor" or is_narrow  # what is quantised is cast tensor by tensor

    def predict(constants: Constants) -> float:
        seconds = broadcast_seconds(sent, devices, cluster, constants)
        return seconds + (count_tensors(size) * constants.sync_tensor if by_tensor else 0.0)

    yield PublishedFigure(table, f"{row['model']} {row['dtype']} {row['how']}", _number(row, "seconds"), predict,
                          (row["model"], row["dtype"]), (row["how"],))  # fmt: skip


def _read_ratio(table: str, row: dict) -> Iterator[PublishedFigure]:
    """Read a published ratio between two ways of the same work; only the direction is predicted."""
    what = row["what"]
    if not row["faster_over_slower"]:
        return
    if "async vs sync" in what:
        ways = ("async", "colocate")
        base = {"model": "Qwen3-8B", "gpu": "H100", "n_gpus": "64", "prompts": "256", "n": "16", "resp_max": "32768"}
    elif found := re.search(r"(\d+)B\+\d+B, (\d+) GPUs", what):
        ways = ("split_sync", "colocate")
        model = {"7": "Llama-2-7B", "70": "Llama-2-70B"}[found[1]]
        base = {"model": model, "gpu": "A100", "n_gpus": found[2], "prompts": "512", "n": "1", "resp_max": "1024"}
    else:
        return
    for way, published in zip(ways, (1.0, float(row["faster_over_slower"])), strict=True):
        settings = {"mode": way, "critic": "0" if "async" in ways else "1", "recompute": "full", "notes": "2-step off"}
        settings["train_backend"] = "fsdp2" if "async" in ways else _CHAT_BACKENDS[way]
        settings["framework"] = "DeepSpeed-Chat" if settings["train_backend"] == "deepspeed-hybrid" else ""
        splits = [base | settings]
        if way == "async":  # the split of devices that is best for it
            gpus = int(base["n_gpus"])
            splits = [
                splits[0] | {"gen_gpus": str(gpus * part // 8), "train_gpus": str(gpus - gpus * part // 8)}
                for part in range(2, 7)
            ]
        jobs = [_rl_job(split)[:2] for split in splits]
        yield PublishedFigure(
            table, f"{what}: {way}", published,
            lambda constants, jobs=jobs: min(_predicted(job, cluster, constants).seconds for job, cluster in jobs),
            (what,), (way,), is_counted=False,
        )  # fmt: skip


_CHAT_BACKENDS = {"split_sync": "megatron", "colocate": "deepspeed-hybrid"}
