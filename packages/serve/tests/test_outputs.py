"""Outputs of commands: what exists stays, unless this command began it or is told to replace it; inputs always stay."""

import json
import os

import pytest

from coalign.config.schema import DataConfig, RewardConfig, SourceConfig
from coalign.files import require_free_output
from coalign.report.display import Display
from coalign_serve.config.stages import ScoreConfig
from coalign_serve.resumable import ResumableOutput, list_inputs, require_writable
from coalign_serve.score import score

ROWS = '{"prompt": "1 + 1", "response": "2", "answer": "2"}\n'


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    data = DataConfig(train=[SourceConfig(path="rows.jsonl")])
    return ScoreConfig(data=data, reward=[RewardConfig(fn="exact_match")])


def test_a_file_that_is_there_stays(config, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    with pytest.raises(FileExistsError, match=r"--output: .*out\.jsonl exists, and is left as it is; .*--overwrite"):
        score(config, output, Display(quiet=True))
    assert output.read_text() == "mine" and not (tmp_path / "out.jsonl.partial").exists()
    assert score(config, output, Display(quiet=True), overwrite=True)["rows"] == 1
    with pytest.raises(FileExistsError):
        score(config, output, Display(quiet=True))


LINKS = {
    "same": lambda path: path,
    "dot": lambda path: path.parent / "." / path.name,
    "back": lambda path: path.parent / ".." / path.parent.name / path.name,
    "relative": lambda path: type(path)(path.name),
    "link": lambda path: _link(os.symlink, path),
    "link of a link": lambda path: _link(os.symlink, _link(os.symlink, path, "b"), "c"),
    "hard link": lambda path: _link(os.link, path),
    "folder": lambda path: _link(os.symlink, path.parent, f"to_{path.parent.name}") / path.name,
}


def _link(make, path, name="linked.jsonl"):
    make(path, path.parent / name)
    return path.parent / name


@pytest.mark.parametrize("way", LINKS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_input_is_never_overwritten(way, overwrite, config, tmp_path):
    output = LINKS[way](tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"--output: .* is an input of the command \(rows\.jsonl\)"):
        score(config, output, Display(quiet=True), overwrite=overwrite)
    assert (tmp_path / "rows.jsonl").read_text() == ROWS


@pytest.mark.parametrize("path", ["*.jsonl", ".", "**/*.jsonl"])
def test_an_input_may_be_a_pattern_or_a_folder(path, config, tmp_path):
    os.link(tmp_path / "rows.jsonl", tmp_path.parent / "linked.jsonl")
    for output in (tmp_path / "rows.jsonl", tmp_path.parent / "linked.jsonl"):
        with pytest.raises(ValueError, match="is an input of the command"):
            require_free_output(output, [path], overwrite=True)
    (tmp_path.parent / "linked.jsonl").unlink()
    require_free_output(tmp_path / "new.jsonl", [path])


def test_the_partial_file_is_no_input_either(config, tmp_path):
    (tmp_path / "out.jsonl.partial").write_text(ROWS)
    with pytest.raises(ValueError, match="is an input of the command"):
        ResumableOutput(tmp_path / "out.jsonl", {}, [str(tmp_path / "out.jsonl.partial")], overwrite=True)
    assert (tmp_path / "out.jsonl.partial").read_text() == ROWS


def test_what_this_command_began_is_its_own(config, tmp_path):
    output = tmp_path / "out.jsonl"
    with ResumableOutput(output, {"a": 1}) as partial:
        partial.add([{"x": 1}])
    output.write_text("written, and then killed before the partial file was deleted")
    with pytest.raises(FileExistsError):
        ResumableOutput(output, {"a": 2})
    with ResumableOutput(output, {"a": 1}) as partial:
        assert partial.done == 1
        partial.finish()
    assert json.loads(output.read_text()) == {"x": 1}


@pytest.mark.parametrize("put", ["folder", "FIFO", "device"])
def test_what_is_no_file_is_never_replaced(put, config, tmp_path):
    output = tmp_path / "out"
    if put == "folder":
        output.mkdir()
    elif put == "FIFO":
        os.mkfifo(output)
    else:
        output.symlink_to("/dev/null")
    with pytest.raises(FileExistsError, match="exists and is no regular file"):
        score(config, output, Display(quiet=True), overwrite=True)
    assert output.exists() and not output.is_file()


def test_files_of_settings_are_inputs(config, tmp_path):
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    config = config.model_copy(update={"reward_template": "template.jinja", "reward_model": "model"})
    assert {"rows.jsonl", "template.jinja", "model"} <= set(list_inputs(config))
    with pytest.raises(ValueError, match=r"is an input of the command \(template\.jinja\)"):
        require_writable(tmp_path / "template.jinja", config, True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    with pytest.raises(ValueError, match=r"is an input of the command \(model\)"):
        require_writable(tmp_path / "model/config.json", config, True)


def test_a_dangling_link_is_there(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    with pytest.raises(FileExistsError):
        require_free_output(tmp_path / "a")
