"""Models by the names of the hub: downloads, commits, refusals."""

import json
import sys

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

import coalign
from coalign import cli
from coalign import hub as module
from coalign.hub import HubError, fetch, find_directory, is_hub_name, pin
from coalign.launch.check import check
from coalign.report.display import Display
from tests.data.reading import write
from tests.hub.conftest import settings_of_a_run
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("tiny") / "model")


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("org/name") and is_hub_name("org/name@main") and is_hub_name("org/name@refs/pr/3")
    for path in ("./org/name", "/org/name", "org/name/model", "name", "runs/model", "../name", "org/name@", "a b/c"):
        assert not is_hub_name(path), path
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_name("org/name")


def test_a_model_is_fetched_once_and_found_without_a_network(hub, model, monkeypatch):
    commit = hub.add("org/tiny", model)
    name = pin("org/tiny")
    assert name == f"org/tiny@{commit}"
    directory = fetch(name)
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == {
        file.name: file.read_bytes() for file in model.iterdir()
    }
    asked = len(hub.requests)
    assert fetch(name) == find_directory(name) == find_directory("org/tiny") == directory
    assert len(hub.requests) == asked
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert pin("org/tiny") == name
    assert fetch("org/tiny") == directory


def test_configuration_and_tokenizer_alone(hub, model):
    hub.add("org/tiny", model)
    directory = fetch("org/tiny", weights=False)
    assert (directory / "config.json").is_file() and (directory / "tokenizer.json").is_file()
    assert not list(directory.glob("*.safetensors")) and "model.safetensors" not in hub.downloads()
    assert fetch("org/tiny") == directory
    assert load_file(directory / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()
    assert hub.downloads().count("config.json") == 1


def test_only_what_is_loaded_is_downloaded(hub, model):
    more = {name: b"x" for name in ("consolidated.safetensors", "model.py", "README.md", "pytorch_model.bin", "x.onnx")}
    hub.add("org/tiny", model, files=more)
    assert not {file.name for file in fetch("org/tiny").iterdir()} & more.keys()
    assert {file.name for file in fetch("org/tiny", code=True).iterdir()} & more.keys() == {"model.py"}


@pytest.mark.parametrize("at", [0, 1, 1000, -1])
def test_a_download_that_is_cut_off_goes_on_where_it_was(hub, model, at, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)  # what is written at once
    size = (model / "model.safetensors").stat().st_size
    hub.add("org/tiny", model)
    hub.cut["model.safetensors"] = [at % size]
    directory = fetch("org/tiny")
    assert (directory / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    ranges = [asked for _, path, asked in hub.requests if path.endswith("model.safetensors") and asked]
    written = at % size // 100 * 100
    assert ranges == ([f"bytes={written}-"] if written else [])


def test_a_damaged_download_is_noticed_and_fetched_again(hub, model):
    hub.add("org/tiny", model)
    hub.damage.add("model.safetensors")
    with pytest.raises(HubError, match=r"model\.safetensors was damaged .* fetches it again"):
        fetch("org/tiny")
    directory = fetch("org/tiny")
    assert (directory / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_shards_are_those_of_the_index(hub, model, tmp_path):
    from safetensors.torch import save_file

    weights = load_file(model / "model.safetensors")
    names = sorted(weights)
    shards = {"one.safetensors": names[:3], "two.safetensors": names[3:]}
    files = {}
    for shard, own in shards.items():
        save_file({n: weights[n] for n in own}, tmp_path / shard, metadata={"format": "pt"})
        files[shard] = (tmp_path / shard).read_bytes()
    index = {"metadata": {}, "weight_map": {n: shard for shard, own in shards.items() for n in own}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    commit = hub.add("org/tiny", model, files=files)
    hub.repositories["org/tiny"].commits[commit].pop("model.safetensors")
    assert {file.name for file in fetch("org/tiny").glob("*.safetensors")} == shards.keys()
    hub.repositories["org/tiny"].commits[commit].pop("two.safetensors")
    with pytest.raises(HubError, match=r"names files that the repository does not have: two\.safetensors"):
        fetch("org/tiny@" + commit, code=True)


def test_pickles_are_refused_unless_asked_for(hub, model):
    weights = load_file(model / "model.safetensors")
    commit = hub.add("org/tiny", model, files={"pytorch_model.bin": b""})
    repository = hub.repositories["org/tiny"]
    repository.commits[commit].pop("model.safetensors")
    with pytest.raises(HubError, match="weights in pickles only"):
        fetch("org/tiny", weights=False)
    torch.save(weights, pickled := model.parent / "pytorch_model.bin")
    repository.commits[commit]["pytorch_model.bin"] = pickled.read_bytes()
    assert (fetch("org/tiny", pickles=True) / "pytorch_model.bin").read_bytes() == pickled.read_bytes()


def test_refusals_name_what_to_do(hub, model, monkeypatch):
    hub.add("org/tiny", model)
    hub.add("org/gated", model, gated=True)
    hub.add("org/empty", model)
    hub.repositories["org/empty"].commits = {
        commit: {"model.gguf": b"", "config.json": b"{}"} for commit in hub.repositories["org/empty"].commits
    }
    for name, message in (
        ("org/other", r"no directory 'org/other' here .* and no model of this name on http://127"),
        ("org/tiny@v9", r"org/tiny@v9: the repository org/tiny has no revision 'v9'"),
        ("org/gated", r"org/gated is gated: accept its terms on http.*/org/gated, then give a token"),
        ("org/empty", r"org/empty has no weights that can be trained .*model\.gguf"),
    ):
        with pytest.raises(HubError, match=message):
            fetch(name)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert fetch("org/gated").is_dir()
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5}))
    hub.add("org/large", model, files={"more.json": b"1"})
    with pytest.raises(HubError, match=r"org/large: .* GiB are to be downloaded, and .* HF_HOME names another place"):
        fetch("org/large")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"not in the cache .*; HF_HUB_OFFLINE forbids"):
        fetch("org/new")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(HubError, match=r"http://127\.0\.0\.1:1 cannot be reached"):
        fetch("org/new")


def settings_of_a_model(tmp_path, name):
    rows = write(tmp_path / "rows.jsonl", [{"prompt": f"say {n}", "answer": f"{n}"} for n in range(8)])
    return settings_of_a_run(tmp_path, name, steps=1, train=rows)


def test_a_run_keeps_the_commit_that_it_began_with(hub, tmp_path, monkeypatch):
    commit = hub.add("org/tiny", tiny_model_dir(tmp_path / "one"))
    path = settings_of_a_model(tmp_path, "org/tiny@main")
    monkeypatch.chdir(tmp_path)
    check(coalign.load_config(path), Display(quiet=True))
    assert "model.safetensors" not in hub.downloads()
    coalign.train(path, quiet=True)
    kept = json.loads((tmp_path / "run" / "hub.json").read_text())
    assert kept == {"org/tiny@main": f"org/tiny@{commit}"}
    assert f"org/tiny@{commit}" in (tmp_path / "run" / "config.yaml").read_text()
    hub.add("org/tiny", tiny_model_dir(tmp_path / "two", seed=1))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    coalign.train(path, ["runtime.steps=2"], quiet=True)
    assert json.loads((tmp_path / "run" / "hub.json").read_text()) == kept
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_an_unknown_name_ends_in_one_line(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # to which the command adds
    monkeypatch.setattr(sys, "argv", ["coalign", "train", str(settings_of_a_model(tmp_path, "org/other"))])
    with pytest.raises(SystemExit) as left:
        cli.main()
    shown = "".join(capsys.readouterr())
    assert left.value.code == 2 and "Traceback" not in shown
    assert "models.trainer.load: there is no directory 'org/other' here" in " ".join(shown.split())
    assert not (tmp_path / "run").exists()
