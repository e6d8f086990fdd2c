"""What the board's server answers, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from coalign.run_files.control import ControlResult, read_request, write_answer
from coalign.run_files.lock import lock_folder
from coalign_board.access import list_own_names, read_token
from coalign_board.server import STATIC, build_board, make_readers, serve_board
from packages.board.tests.folders import add_log, add_samples, add_steps, make_run

TOKEN = "0123456789abcdef"
HOST = "http://127.0.0.1:7070"


@pytest.fixture
def runs(tmp_path):
    root = tmp_path / "runs"
    for seed in (0, 1):
        folder = make_run(root / "sums" / f"seed{seed}", seed=seed)
        add_steps(folder, range(1, 21))
    make_run(root / "other run", lr=2e-4)
    return root


@pytest.fixture
def client(runs):
    return TestClient(build_board(runs), base_url=HOST)


def test_runs_are_listed_wherever_they_lie(client):
    answer = client.get("/api/runs").json()
    assert [run["id"] for run in answer["runs"]] == ["other run", "sums/seed0", "sums/seed1"]
    assert [run["status"] for run in answer["runs"]] == ["failed", "ended", "ended"]
    assert (answer["root"], answer["can_control"]) == ("runs", False)


def test_a_run_folder_itself_can_be_shown(runs):
    client = TestClient(build_board(runs / "sums" / "seed0"), base_url=HOST)
    assert [run["id"] for run in client.get("/api/runs").json()["runs"]] == ["seed0"]
    assert client.get("/api/runs/seed0/state").json()["step"] == 20
    assert client.get("/api/runs/seed1/state").status_code == 400


def test_readers_answer(client, runs):
    add_samples(runs / "sums" / "seed0", 8)
    run = "/api/runs/sums/seed0"
    metrics = client.get(f"{run}/metrics", params={"names": '["reward/mean"]', "from": 5, "to": 7}).json()
    assert metrics["steps"] == [5, 6, 7] and metrics["series"]["reward/mean"]["mean"] == [0.05, 0.06, 0.07]
    whole = client.get(f"{run}/metrics", params={"from": "-inf", "to": "1e999", "names": "[]"}).json()
    assert whole["steps"] == list(range(1, 21))
    assert client.get(f"{run}/metrics", params={"from": "inf"}).json()["steps"] == [20]
    assert metrics["all"] == ["loss/value", "reward/mean", "time/run", "tokens/trained"]
    samples = client.get(f"{run}/samples", params={"last": 2}).json()["samples"]
    assert [sample["response"] for sample in samples] == ["It is 14.", "It is 12."]
    assert "algorithm: grpo" in client.get(f"{run}/configuration").json()["text"]
    assert client.get("/api/runs/other%20run/metrics").json()["complete"]


def test_secrets_stay_references(client, runs, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "the secret itself")
    for number, name in enumerate(("seed0", "seed1")):
        with open(runs / "sums" / name / "config.yaml", "a") as file:
            file.write(f"url: https://host{number}/?key=${{env:WANDB_API_KEY}}\n")
    text = client.get("/api/runs/sums/seed0/configuration").text
    text += client.get("/api/compare", params={"runs": '["sums/seed0", "sums/seed1"]'}).text
    assert text.count("${env:WANDB_API_KEY}") == 3 and "the secret itself" not in text


def test_the_log_is_sent_in_pieces_of_whole_lines(client, runs):
    folder = runs / "sums" / "seed0"
    for number in range(2000):
        add_log(folder, f"INFO here: line {number} of a long log \u2028 é")
    text = (folder / "log.txt").read_text()
    run = "/api/runs/sums/seed0/log"
    last = client.get(run).json()
    assert last["end"] == last["size"] and text.endswith(last["text"]) and len(last["text"]) > 2**15
    pieces, start = [last["text"]], last["start"]
    while start:
        piece = client.get(run, params={"before": start}).json()
        pieces.insert(0, piece["text"])
        start = piece["start"]
    assert "".join(pieces) == text
    with open(folder / "log.txt", "a") as file:
        file.write("half a")
    assert client.get(run, params={"from": last["end"]}).json()["text"] == ""
    with open(folder / "log.txt", "a") as file:
        file.write(" line\n")
    assert client.get(run, params={"from": last["end"]}).json()["text"] == "half a line\n"
    (folder / "log.txt").write_text("another one\n")
    assert client.get(run, params={"from": last["end"]}).json()["text"] == "another one\n"


def test_stalls_and_their_stacks(client, runs):
    stall = runs / "sums" / "seed0" / "stalls" / "20261124-114500"
    stall.mkdir(parents=True)
    (stall / "report.txt").write_text("no process has been busy for 900 s\n")
    (stall / "driver.txt").write_text("File run.py, line 3")
    run = "/api/runs/sums/seed0/stalls"
    found = client.get(run).json()["stalls"]
    assert found == [{"time": stall.name, "report": "no process has been busy for 900 s\n", "files": ["driver.txt"]}]
    assert client.get(run, params={"time": stall.name, "file": "driver.txt"}).json() == {"text": "File run.py, line 3"}
    for time, file in (("..", "config.yaml"), ("../..", "secret.txt"), (stall.name, "../../log.txt"), ("", "x.txt")):
        assert client.get(run, params={"time": time, "file": file}).status_code in (400, 404)


def test_settings_that_a_person_wrote(client, runs):
    folder = runs / "sums" / "seed0"
    assert client.get("/api/runs/sums/seed0/configuration").json()["written"] is None
    (folder / "written.json").write_text('{"seed": "override", "runtime.steps": "run.yaml:2", "gone": "run.yaml:3"}')
    written = client.get("/api/runs/sums/seed0/configuration").json()["written"]
    assert written == [["seed", "0", "override"], ["runtime.steps", "20", "run.yaml:2"], ["gone", None, "run.yaml:3"]]
    (folder / "written.json").write_text("[1, 2]")
    assert client.get("/api/runs/sums/seed0/configuration").json()["written"] is None


def test_what_differs_between_runs(client):
    compare = lambda *runs: client.get("/api/compare", params={"runs": json.dumps(runs)})  # noqa: E731
    answer = compare("sums/seed0", "sums/seed1", "other run").json()
    assert answer == {
        "settings": [["seed", ["0", "1", "0"]], ["models.trainer.optimizer.lr", ["0.0001", "0.0001", "0.0002"]]],
        "alike": [0, 0, 1],
    }
    assert compare("sums/seed0", "sums/seed0").json() == {"settings": [], "alike": [0, 0]}
    assert compare().json() == {"settings": [], "alike": []}
    assert compare(*["other run"] * 13).status_code == 400
    assert client.get("/api/compare", params={"runs": "[1]"}).status_code == 400


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/runs/nothing/metrics", 404, "there is no run 'nothing'"),
        ("/api/runs/sums/metrics", 404, "there is no run 'sums'"),
        ("/api/runs/sums/seed0/metric", 404, "there are answer, cause, checkpoints, configuration"),
        ("/api/runs/sums/seed0/metrics?names=x", 400, "expected a list"),
        ("/api/runs/sums/seed0/metrics?from=x&to=3", 400, "from is 'x'; expected a step"),
        ("/api/runs/sums/seed0/metrics?from=nan", 400, "from is 'nan'; expected a step"),
        ("/api/runs/sums/seed0/samples?last=-1", 400, "last is '-1'; expected a whole number"),
        ("/api/runs/sums/seed0/configuration?file=../x", 404, "there are config.yaml"),
        ("/api/runs/%2e%2e/secret/state", 400, "leads out of the folder"),
        ("/api/runs/sums%2f..%2f..%2fsecret/state", 400, "leads out of the folder"),
        ("/api/runs/%2fetc/state", 400, "leads out of the folder"),
        ("/api/runs/link/state", 400, "leads out of the folder"),
        ("/api/runs/a%00b/state", 400, "leads out of the folder"),
        ("/static/%2e%2e/server.py", 404, "there is no file"),
        ("/static//etc/passwd", 404, "there is no file"),
    ],
)
def test_what_is_refused(client, runs, path, status, says):
    make_run(runs.parent / "secret")
    (runs / "link").symlink_to(runs.parent / "secret")
    answer = client.get(path)
    assert (answer.status_code, says in answer.json()["error"]) == (status, True), answer.text
    assert str(runs.parent) not in answer.text


def test_files_of_a_run_that_are_links_to_elsewhere_are_not_read(client, runs):
    (runs.parent / "secret").write_text("2026-11-24 11:43:48,451 INFO here: secret\n")
    folder = make_run(runs / "bad")
    for name in ("log.txt", "metrics.jsonl", "samples.jsonl", "config.yaml"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(runs.parent / "secret")
    (folder / "stalls").symlink_to(runs.parent)
    for reader in make_readers():
        assert "secret" not in client.get(f"/api/runs/bad/{reader}").text.replace("'stalls' leads", "")


def test_every_answer_says_what_the_page_may_load(client):
    for path in ("/", "/static/app.js", "/api/runs", "/api/runs/nothing/metrics", "/nothing"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def test_the_page_is_sent_once(client):
    first = client.get("/static/app.js")
    assert first.status_code == 200 and first.headers["content-type"].startswith("text/javascript")
    assert client.get("/static/app.js", headers={"If-None-Match": first.headers["etag"]}).status_code == 304


def test_a_board_bound_to_loopback_has_no_other_names():
    assert list_own_names("127.0.0.1") == ("127.0.0.1",)
    assert len(list_own_names("0.0.0.0")) == 3


def test_a_token_is_asked_for_once(runs):
    application = build_board(runs, TOKEN)
    client = TestClient(application, base_url=HOST, follow_redirects=False)
    for path in ("/", "/static/app.js", "/api/runs", "/?token=wrong", f"/?token={TOKEN}x", "/?token="):
        assert client.get(path).status_code == 401
    first = client.get(f"/?token={TOKEN}&x=1")
    assert (first.status_code, first.headers["location"]) == (303, "/?x=1")
    cookie = first.headers["set-cookie"]
    assert TOKEN not in cookie and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert client.get("/api/runs").json()["can_control"] is True
    other = TestClient(application, base_url=HOST)
    assert other.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert other.get("/api/runs", headers={"Authorization": "Bearer é".encode()}).status_code == 401
    name = cookie.partition("=")[0]
    assert other.get("/api/runs", headers={"Cookie": f"{name}=wrong"}).status_code == 401
    away = client.get(f"//other.example/?token={TOKEN}")
    assert away.headers.get("location", "/").startswith("/") and not away.headers.get("location", "/").startswith("//")


def test_a_run_is_asked_only_with_a_token(client, runs):
    url, body = "/api/runs/sums/seed0/control", json.dumps({"do": "save"})
    assert "--token-file" in client.post(url, content=body).json()["error"]
    with_token = TestClient(build_board(runs, TOKEN), base_url=HOST, headers={"Authorization": f"Bearer {TOKEN}"})
    assert "no run is going" in with_token.post(url, content=body).json()["error"]
    folder = runs / "sums" / "seed0"
    with lock_folder(folder):
        other_site = {"Origin": "http://evil.example"}
        assert with_token.post(url, content=body, headers=other_site).status_code == 403
        assert "did you mean 'save'" in with_token.post(url, content='{"do": "safe"}').json()["error"]
        assert "expected {" in with_token.post(url, content="[" * 9999).json()["error"]
        assert with_token.post(url, content=" " * 2**17).status_code == 413
        assert read_request(folder) is None
        answer = with_token.post(url, content=body, headers={"Origin": HOST})
        assert answer.status_code == 200
        assert "another request" in with_token.post(url, content=body).json()["error"]
        identity = {"id": answer.json()["id"]}
        assert with_token.get("/api/runs/sums/seed0/answer", params=identity).json() == {"results": None}
        write_answer(folder, identity["id"], [ControlResult("save", True, "saved step 20")])
        answered = with_token.get("/api/runs/sums/seed0/answer", params=identity).json()
    assert answered == {"results": [{"done": True, "text": "saved step 20"}]}


def test_the_token_is_a_long_line(tmp_path):
    file = tmp_path / "token"
    with pytest.raises(FileNotFoundError, match="--token-file: there is no file"):
        read_token(file)
    file.write_text(f"{TOKEN}\n")
    assert read_token(file) == TOKEN
    for text in ("", "short", "with spaces in between", "non-ASCII character é"):
        file.write_text(text)
        with pytest.raises(ValueError, match="openssl rand -hex 16"):
            read_token(file)


def test_other_machines_need_a_token(runs):
    with pytest.raises(ValueError, match="give --token-file"):
        serve_board(runs, "0.0.0.0", 0, None)
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        serve_board(runs / "nothing", "127.0.0.1", 0, None)


def test_both_languages_have_the_same_texts():
    keys = {}
    for language in ("en", "zh"):
        text = (STATIC / "i18n" / f"{language}.js").read_text()
        found = re.findall(r'^  "([\w.]+)": "((?:[^"\\]|\\.)*)",$', text, re.MULTILINE)
        assert len(found) == len(re.findall(r"^  \S", text, re.MULTILINE)), "a line is no text"
        keys[language] = {key: set(re.findall(r"\{(\w+)\}", value)) for key, value in found}
    assert keys["en"] == keys["zh"]


def test_pages_ask_for_texts_that_there_are():
    known = set(re.findall(r'^  "([\w.]+)":', (STATIC / "i18n" / "en.js").read_text(), re.MULTILINE))
    for file in STATIC.rglob("*.js"):
        if file.parent.name not in ("vendor", "i18n"):
            used = re.findall(r'\bt\("([\w.]+)"|title = "([\w.]+)"|, "([a-z]+\.[\w.]+)", \(', file.read_text())
            assert {key for keys in used for key in keys if key} <= known, file.name


def test_the_page_asks_nothing_of_other_hosts():
    for file in STATIC.rglob("*"):
        if file.is_file() and "vendor" not in file.parts and file.suffix in (".js", ".html", ".css"):
            text = file.read_text().replace('"http://www.w3.org/2000/svg"', "")  # the name of a namespace
            assert not re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text), file.name
            assert "innerHTML" not in text, file.name


def test_the_page_is_small():
    files = [file for file in Path(STATIC).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 300_000
