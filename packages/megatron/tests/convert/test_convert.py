import errno
import json
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import load as load_distributed
from typer.testing import CliRunner

from coalign.cli import app
from coalign.weights.sync.transport import WeightError
from coalign_megatron.convert import ConversionRequest, convert, torch_dist
from coalign_megatron.convert.convert import MANIFEST
from coalign_megatron.convert.files import hash_file
from coalign_megatron.convert.plan import TorchDistOutput
from packages.megatron.tests.convert import made
from packages.megatron.tests.convert.made import same, stored
from tests.tiny import tiny_model_dir


def megatron(source, output, **options):
    return convert(ConversionRequest(source=source, output=output, to="megatron", **options))


def huggingface(source, output, **options):
    return convert(ConversionRequest(source=source, output=output, to="hf", **options))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return made.model(tmp_path_factory.mktemp("hf") / "llama", made.LLAMA)


@pytest.mark.parametrize("flavour", ["te", "local"])
@pytest.mark.parametrize(
    "hf", [made.LLAMA, made.QWEN2, made.MIXTRAL, made.GPT2, made.OPT], ids=lambda hf: hf["model_type"]
)
def test_there_and_back_is_bit_for_bit_the_same(tmp_path, hf, flavour):
    source = made.model(tmp_path / "hf", hf)
    report = megatron(source, tmp_path / "megatron", tensor=2, flavour=flavour, verify=True)
    assert report.verified == report.tensors == len(stored(source))
    assert huggingface(tmp_path / "megatron", tmp_path / "back", verify=True).family == hf["model_type"]
    same(stored(tmp_path / "back"), stored(source))
    for file in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "megatron"]


def test_what_is_written_is_what_plain_torch_reads(tmp_path, llama):
    megatron(llama, tmp_path / "megatron", tensor=2)
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text().strip() == "release"
    folder = tmp_path / "megatron" / "release"
    found = {
        "embedding.word_embeddings.weight": torch.full((512, 16), torch.nan),  # 300, padded to 128 × 2
        "decoder.layers.self_attention.linear_qkv.weight": torch.full((4, 32, 16), torch.nan),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": torch.full((4, 16), torch.nan),
        "decoder.layers.mlp.linear_fc1.weight": torch.full((4, 48, 16), torch.nan),
    }
    load_distributed(found, checkpoint_id=folder, no_dist=True)
    weights = stored(llama)
    embedding = found["embedding.word_embeddings.weight"]
    assert torch.equal(embedding[:300], weights["model.embed_tokens.weight"])
    assert not embedding[300:].any()
    q, k, v = (weights[f"model.layers.3.self_attn.{name}_proj.weight"] for name in "qkv")
    groups = [q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]]  # two queries, a key, a value; heads of 4
    assert torch.equal(found["decoder.layers.self_attention.linear_qkv.weight"][3], torch.cat(groups))
    gate, up = (weights[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(found["decoder.layers.mlp.linear_fc1.weight"][1], torch.cat([gate, up]))
    norm = weights["model.layers.2.input_layernorm.weight"]
    assert torch.equal(found["decoder.layers.self_attention.linear_qkv.layer_norm_weight"][2], norm)
    assert torch.load(folder / "common.pt") == {"checkpoint_version": 3.0, "iteration": 0}


def test_a_model_of_transformers_loads_again_and_computes_the_same(tmp_path):
    from transformers import AutoModelForCausalLM

    source = tiny_model_dir(tmp_path / "hf", tied=True)
    megatron(source, tmp_path / "megatron")
    huggingface(tmp_path / "megatron", tmp_path / "back", file_size=20_000)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    tokens = torch.arange(12)[None]
    before, after = (AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (source, tmp_path / "back"))
    assert torch.equal(before, after)


def test_another_dtype(tmp_path, llama):
    megatron(llama, tmp_path / "megatron", dtype="bfloat16", verify=True)
    huggingface(tmp_path / "megatron", tmp_path / "back")
    same(stored(tmp_path / "back"), {name: tensor.bfloat16() for name, tensor in stored(llama).items()})
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_big_tensors_are_cut_into_blocks(tmp_path, llama, monkeypatch):
    blocks = lambda shape, itemsize: [(i, min(i + 5, shape[0])) for i in range(0, shape[0], 5)]  # noqa: E731
    for name in ("plan", "convert"):
        monkeypatch.setattr(import_module(f"coalign_megatron.convert.{name}"), "split_rows", blocks)
    megatron(llama, tmp_path / "megatron", verify=True)
    huggingface(tmp_path / "megatron", tmp_path / "back", verify=True)
    same(stored(tmp_path / "back"), stored(llama))


@pytest.mark.backends
def test_several_processes_write_the_same_files(tmp_path, llama):
    megatron(llama, tmp_path / "megatron", file_size=10_000)
    megatron(llama, tmp_path / "side by side", file_size=10_000, processes=2)
    one, two = (
        {path.name: hash_file(path) for path in (tmp_path / name / "release").glob("*.distcp")}
        for name in ("megatron", "side by side")
    )
    assert one == two and len(one) > 3
    huggingface(tmp_path / "side by side", tmp_path / "back", processes=2, file_size=10_000)
    same(stored(tmp_path / "back"), stored(llama))


def test_the_manifest_knows_source_and_output(tmp_path, llama):
    megatron(llama, tmp_path / "megatron")
    manifest = json.loads((tmp_path / "megatron" / MANIFEST).read_text())
    assert manifest["source"]["files"] == {"model.safetensors": hash_file(llama / "model.safetensors")}
    assert {name: hash_file(tmp_path / "megatron" / name) for name in manifest["files"]} == manifest["files"]
    assert (manifest["family"], manifest["vocab_size"], manifest["padded_vocab_size"]) == ("llama", 300, 384)
    assert (manifest["flavour"], manifest["source"]["format"]) == ("te", "hf")


def test_the_command(tmp_path, llama):
    given = [str(llama), "-o", str(tmp_path / "megatron"), "--to", "megatron", "--tp", "2", "--verify"]
    result = CliRunner().invoke(app, ["convert", *given])
    assert result.exit_code == 0, result.output
    assert "llama" in result.stderr and "the same bit for bit" in result.stderr


# ---- pickles


def test_pickles_are_read_on_request_and_run_nothing(tmp_path, llama):
    source = made.model(tmp_path / "hf", made.LLAMA)
    torch.save(stored(source), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin .*--pickles"):
        megatron(source, tmp_path / "megatron")
    megatron(source, tmp_path / "megatron", pickles=True)
    huggingface(tmp_path / "megatron", tmp_path / "back")
    same(stored(tmp_path / "back"), stored(llama))


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_pickle_that_would_run_something_does_not(tmp_path):
    source = made.model(tmp_path / "hf", made.LLAMA)
    torch.save(stored(source) | {"x": Runs(str(tmp_path / "was run"))}, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"extra \['x'\]"):
        megatron(source, tmp_path / "megatron", pickles=True)
    assert not (tmp_path / "was run").exists()


# ---- interrupted


def ended_by(error, llama, tmp_path, monkeypatch, message=None):
    """A conversion that ``error`` ends after two of its files: what it leaves."""
    write = TorchDistOutput.write

    def some(self, number, folder, advance):
        if number == 2:
            raise error
        return write(self, number, folder, advance)

    with monkeypatch.context() as patched:
        patched.setattr(TorchDistOutput, "write", some)
        with pytest.raises(type(error), match=message):
            megatron(llama, tmp_path / "megatron", file_size=10_000)
    assert [path.name for path in tmp_path.iterdir()] == ["megatron.writing"]
    return tmp_path / "megatron.writing"


@pytest.fixture
def interrupted(tmp_path, llama, monkeypatch):
    return ended_by(KeyboardInterrupt(), llama, tmp_path, monkeypatch)


def test_what_is_finished_is_not_done_again(tmp_path, llama, interrupted, monkeypatch):
    written = []
    write = TorchDistOutput.write
    monkeypatch.setattr(TorchDistOutput, "write", lambda self, n, **rest: written.append(n) or write(self, n, **rest))
    report = megatron(llama, tmp_path / "megatron", file_size=10_000, resume=True)
    assert report.reused == 2 and written == list(range(2, report.files))
    assert not interrupted.exists()
    huggingface(tmp_path / "megatron", tmp_path / "back")
    same(stored(tmp_path / "back"), stored(llama))


def test_a_finished_file_that_was_damaged_is_done_again(tmp_path, llama, interrupted):
    file = interrupted / "release" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert megatron(llama, tmp_path / "megatron", file_size=10_000, resume=True, verify=True).reused == 1


def test_another_conversion_does_not_go_on_from_it(tmp_path, llama, interrupted):
    with pytest.raises(FileExistsError, match=r"megatron\.writing was left by an interrupted conversion: --resume"):
        megatron(llama, tmp_path / "megatron", file_size=10_000)
    with pytest.raises(ValueError, match=r"left by another conversion \(different: file_size\)"):
        megatron(llama, tmp_path / "megatron", file_size=20_000, resume=True)


def test_a_difference_is_found_by_verifying(tmp_path, llama, monkeypatch):
    finish = TorchDistOutput.finish

    def damaging(self, folder, records):
        finish(self, folder, records)
        file = folder / "release" / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        data[data.index(stored(llama)["model.embed_tokens.weight"].numpy().tobytes()[:64])] ^= 1
        file.write_bytes(data)

    monkeypatch.setattr(TorchDistOutput, "finish", damaging)
    with pytest.raises(WeightError, match=r"'model\.embed_tokens\.weight' .* differs from .* in .*llama"):
        megatron(llama, tmp_path / "megatron", verify=True)
    assert not (tmp_path / "megatron").exists()


# ---- refused, and nothing is left


RENAMED = {"model.layers.1.mlp.up_proj.weight": None, "model.layers.9.mlp.up_proj.weight": torch.zeros(3)}
REFUSED = [  # what is changed of config.json and of the tensors, options, and what is said
    ({"architectures": ["LamaForCausalLM"]}, {}, {}, "known are Llama"),
    ({}, RENAMED, {}, r"missing \['\S+\.1\.mlp\.up_proj\.weight'\], extra \['\S+\.9\.mlp\.up_proj\.weight'\]"),
    ({}, {"model.norm.weight": torch.zeros(17)}, {}, r"'model\.norm\.weight' \[17\] \(config\.json: \[16\]\)"),
    ({}, {}, {"tensor": 3}, "num_attention_heads 4 does not divide by 3"),
    ({}, {}, {"pipeline": 3}, "4 layers do not divide by 3 stages"),
    ({}, {}, {"expert": 2}, "--ep 2 --etp 1: the model has no experts"),
]


@pytest.mark.parametrize(("config", "changed", "options", "message"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_a_source_that_does_not_fit_is_refused(tmp_path, config, changed, options, message):
    weights = made.tensors(made.LLAMA) | changed
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    source = made.model(tmp_path / "hf", made.LLAMA | config, kept)
    with pytest.raises(ValueError, match=message):
        megatron(source, tmp_path / "megatron", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-8])


def test_a_file_that_is_cut_off(tmp_path):
    source = made.model(tmp_path / "hf", made.LLAMA)
    cut_off(source / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read, is it cut off\?"):
        megatron(source, tmp_path / "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_megatron_file_that_is_cut_off(tmp_path, llama, name):
    megatron(llama, tmp_path / "megatron")
    cut_off(tmp_path / "megatron" / "release" / name)
    with pytest.raises(ValueError, match=f"{name} .*cut off"):
        huggingface(tmp_path / "megatron", tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]


def test_a_source_that_was_damaged_since_it_was_written(tmp_path, llama):
    megatron(llama, tmp_path / "megatron")
    file = tmp_path / "megatron" / "release" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.index(stored(llama)["model.embed_tokens.weight"].numpy().tobytes()[:64])
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(ValueError, match=r"__0_0\.distcp is .*, but coalign_convert\.json in its folder says"):
        huggingface(tmp_path / "megatron", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    file.write_bytes(data[:100] + b"\xff" * 50 + data[150:])
    with pytest.raises(ValueError, match=r"__0_0\.distcp is damaged at byte 0"):
        huggingface(tmp_path / "megatron", tmp_path / "back 2")
    assert not (tmp_path / "back 2").exists()


def test_a_megatron_checkpoint_of_another_model(tmp_path, llama):
    megatron(llama, tmp_path / "megatron")
    other = made.model(tmp_path / "other", made.QWEN2 | {"tie_word_embeddings": False})
    with pytest.raises(ValueError, match=r"missing \['decoder\.layers\.\S+\.linear_qkv\.bias'\], extra \[\]"):
        huggingface(tmp_path / "megatron", tmp_path / "back", hf=other)


def test_a_megatron_checkpoint_without_a_configuration(tmp_path, llama):
    megatron(llama, tmp_path / "megatron")
    (tmp_path / "megatron" / "hf" / "config.json").unlink()
    with pytest.raises(ValueError, match="--hf names a Hugging Face directory"):
        huggingface(tmp_path / "megatron", tmp_path / "back")


def test_a_disk_that_fills(tmp_path):
    import resource

    # A limit on the size of files: writing fails in the middle of a file, as on a full disk.
    source = made.model(tmp_path / "hf", made.LLAMA)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
        with pytest.raises(OSError, match="File too large"):
            megatron(source, tmp_path / "megatron")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_disk_that_fills_within_a_tensor(tmp_path):
    class Full:
        size = 0

        def write(self, data):
            self.size += memoryview(data).nbytes
            if self.size > 5000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return memoryview(data).nbytes

        def flush(self):
            pass

    with pytest.raises(OSError, match="No space left on device"):
        torch_dist.append_archive(Full(), torch.zeros(100_000))


def test_a_disk_that_fills_after_some_files_says_what_is_finished(tmp_path, llama, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    message = r"No space left .*: 2 of \d+ files are finished in .*megatron\.writing; --resume"
    ended_by(full, llama, tmp_path, monkeypatch, message)
    assert megatron(llama, tmp_path / "megatron", file_size=10_000, resume=True, verify=True).reused == 2
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]


@pytest.mark.backends
def test_a_process_that_is_killed_leaves_what_resume_goes_on_from(tmp_path, llama):
    """SIGKILL in the middle of the second file."""
    code = """
import os, sys
from pathlib import Path
from coalign_megatron.convert import ConversionRequest, convert, files
calls, fsync = [], files.os.fsync
def counted(number):
    calls.append(number)
    if len(calls) == 5:
        os.kill(os.getpid(), 9)
    fsync(number)
files.os.fsync = counted
convert(ConversionRequest(source=Path(sys.argv[1]), output=Path(sys.argv[2]), to="megatron", file_size=10_000))
"""
    output = tmp_path / "megatron"
    killed = subprocess.run([sys.executable, "-c", code, str(llama), str(output)], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    left = {path.name for path in (tmp_path / "megatron.writing" / "release").iterdir()}
    assert not output.exists() and any(name.startswith(".writing-") for name in left)
    assert megatron(llama, output, file_size=10_000, resume=True, verify=True).reused == 1
    assert not list(tmp_path.rglob(".writing-*")) and [path.name for path in tmp_path.iterdir()] == ["megatron"]


def test_a_disk_that_has_too_little_room_is_found_before(tmp_path, llama, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("", (), {"free": 1000})())
    with pytest.raises(OSError, match="MiB free"):
        megatron(llama, tmp_path / "megatron")
    assert not list(tmp_path.iterdir())


def test_an_output_that_holds_something_is_left_alone(tmp_path, llama):
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(FileExistsError, match="--output"):
        megatron(llama, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
