"""The RayJob: what KubeRay and Kubernetes take, with the code of the run in it."""

import base64
import io
import zipfile

import jsonschema
import kubernetes_validate
import pytest
import yaml

from coalign_jobs.job import plan_job
from coalign_jobs.kuberay import RAY_VERSION, KubeRayOptions, apply_rayjob, render_rayjob
from packages.jobs.tests.conftest import refused_in_one_line, write
from packages.jobs.tests.rayjob_schema import RAYJOB
from tests.runs import ROOT

SETTINGS = {"runtime": {"steps": 3}, "data": {"train": "/runs/rows.jsonl", "chat_template": "none"}}
OPTIONS = KubeRayOptions("registry/coalign:1", ("claim", "/runs"))


def render(here, options=OPTIONS, nodes=None, devices=None, overrides=(), **sections):
    name = write(here, **{**SETTINGS, **sections})
    text = render_rayjob(plan_job(here / name, overrides, nodes=nodes, devices=devices, ships=True), options)
    return text, *yaml.safe_load_all(text)


def list_groups(rayjob):
    cluster = rayjob["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]


@pytest.mark.parametrize("gpus", [0, 8, 24])
@pytest.mark.parametrize("secrets", [(), ("keys",)])
def test_kuberay_and_kubernetes_take_it(here, gpus, secrets):
    options = KubeRayOptions("registry/coalign:1", ("claim", "/runs"), "team", secrets=secrets)
    _, code, rayjob = render(here, options, models={"trainer": {"load": "own/model", "num_gpu": gpus}})
    jsonschema.validate(rayjob, RAYJOB)
    kubernetes_validate.validate(code, "1.37", strict=True)
    for group in list_groups(rayjob):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, "1.37", strict=True)


def test_the_schema_refuses_a_misspelt_field(here):
    _, _, rayjob = render(here)
    rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParam"] = {}
    with pytest.raises(jsonschema.ValidationError, match="rayStartParam"):
        jsonschema.validate(rayjob, RAYJOB)


def test_pods_are_the_nodes_of_the_plan(here):
    _, _, rayjob = render(here, models={"trainer": {"load": "own/model", "num_gpu": 24}})
    head, workers = list_groups(rayjob)
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
    for group in (head, workers):
        [container] = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8 and container["image"] == "registry/coalign:1"
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"code": "/coalign-code", "shm": "/dev/shm", "runs": "/runs"}
    assert len(list_groups(render(here, models={"trainer": {"load": "own/model", "num_gpu": 8}})[2])) == 1
    assert "nvidia.com/gpu" not in render(here)[0]


def test_the_code_travels_and_the_run_folder_is_on_the_volume(here):
    (here / "my_rewards.py").write_text("def score(sample):\n    return 1.0\n")
    _, code, rayjob = render(here, reward={"fn": "my_rewards:score"}, algorithm="grpo", models=GRPO)
    archive = zipfile.ZipFile(io.BytesIO(base64.b64decode(code["binaryData"]["code.zip"])))
    assert sorted(archive.namelist()) == ["my_rewards.py", "rows.jsonl", "run.yaml"]
    spec = rayjob["spec"]
    assert spec["entrypoint"].split()[:5] == ["python", "-m", "coalign.cli", "train", "run.yaml"]
    assert spec["entrypoint"].endswith("runtime.ray_address=auto output=/runs/runs/first")
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {"working_dir": "file:///coalign-code/code.zip"}
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}


GRPO = {"policy": {"load": "own/model", "num_gpu": 0}}


def test_secrets_are_named_and_never_written(here, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    monkeypatch.setenv("MY_STEPS", "7")
    sections = {
        "runtime": {"steps": "${env:MY_STEPS}", "trackers": [{"name": "wandb", "project": "${env:MY_API_KEY}"}]}
    }
    with pytest.raises(ValueError, match="MY_API_KEY from the environment") as refused:
        render(here, **sections)
    assert "hunter2" not in str(refused.value)
    options = KubeRayOptions("image", ("claim", "/runs"), secrets=("keys",))
    text, _, rayjob = render(here, options, **sections)
    [container] = list_groups(rayjob)[0]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}] and "hunter2" not in text
    assert {"name": "MY_STEPS", "value": "7"} in container["env"]


def test_each_variable_is_explained_once(here):
    text, _, rayjob = render(here, models={"trainer": {"load": "own/model", "num_gpu": 16}})
    lines = [line.strip() for line in text.splitlines()]
    [container] = list_groups(rayjob)[0]["template"]["spec"]["containers"]
    for variable in container["env"]:
        first = lines.index(f"- name: {variable['name']}")
        assert lines[first - 1].startswith("# "), variable


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"train": "data.bin", "chat_template": "none"}}, "is too large, or in a folder that stays here"),
        ({"runtime": {"accelerator": "chip"}, "models": {"trainer": {"load": "own/model", "num_gpu": 2}}}, "no chip"),
    ],
)
def test_what_pods_would_not_have_is_refused(here, sections, said):
    (here / "data.bin").write_bytes(b"0" * (11 * 2**20))
    with refused_in_one_line(said):
        render(here, **sections)


def test_code_that_is_too_large_is_refused_with_its_largest_files(here):
    import random

    (here / "table.py").write_bytes(random.Random(0).randbytes(2**20))
    with pytest.raises(ValueError, match=r"1\.0 MiB when packed, and 0\.7 MiB can travel.*table\.py 1\.0 MiB"):
        render(here)


def test_the_images_have_the_ray_that_kuberay_is_told(here):
    for lock in (ROOT / "docker").glob("pylock.*.toml"):
        assert f'name = "ray"\nversion = "{RAY_VERSION}"' in lock.read_text()
    assert f"ray=={RAY_VERSION}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_what_kubectl_says_is_passed_on(here, monkeypatch):
    program = here / "kubectl"
    program.write_text("#!/bin/sh\necho 'error: no context' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:/usr/bin:/bin")
    job = plan_job(here / write(here, **SETTINGS), [], ships=True)
    with pytest.raises(ValueError, match="kubectl refused the job: error: no context"):
        apply_rayjob(job, render_rayjob(job, OPTIONS))
