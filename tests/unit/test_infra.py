"""The files of `infra/`: manifests that Kubernetes accepts, and an image of this project."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path, PurePath
from typing import Any

import kubernetes_validate
import pytest
import yaml

from areal_flow.cluster.launchers import make_launcher
from areal_flow.cluster.placement import place_workers
from areal_flow.config import Recipe
from areal_flow.core.settings import nest
from pipelines.cli.main import app
from pipelines.jobs.job import chosen_recipe
from tests.kubernetes_api import RELEASE

ROOT = Path(__file__).parents[2]
OVERLAYS = ("cpu", "gpu")

Manifest = dict[str, Any]


def built(overlay: str) -> list[Manifest]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    command = ["kubectl", "kustomize", f"infra/kubernetes/overlays/{overlay}"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return list(yaml.safe_load_all(text))


def of_kind(kind: str, manifests: list[Manifest]) -> Manifest:
    (manifest,) = [each for each in manifests if each["kind"] == kind]
    return manifest


def command_of(manifests: list[Manifest], folder: Path, *, run: str = "new") -> list[str]:
    """Return the arguments of `areal-flow` in the driver's Pod, whose files are in the folder."""
    for name, text in of_kind("ConfigMap", manifests)["data"].items():
        local = text.replace("/etc/areal-flow", str(folder)).replace("/runs/$", f"{folder}/$")
        (folder / name).write_text(local)
    (folder / "areal-flow").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "areal-flow").chmod(0o755)
    (container,) = of_kind("Job", manifests)["spec"]["template"]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    local = [each.replace("/etc/areal-flow", str(folder)) for each in command]
    variables = {"PATH": f"{folder}:/usr/bin:/bin", "RUN": run}
    done = subprocess.run(local, env=variables, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def recipe_of(manifests: list[Manifest], folder: Path) -> Recipe:
    """Return the recipe that the driver of an overlay trains."""
    given = command_of(manifests, folder)[5:]
    _, bound, *_ = app["train"].parse_args(given)
    return chosen_recipe(bound.arguments["recipe"], nest(bound.arguments["settings"]))[1]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_and_the_pods_that_its_driver_starts_are_valid(
    overlay: str, tmp_path: Path
) -> None:
    manifests = built(overlay)
    for manifest in manifests:
        kubernetes_validate.validate(manifest, RELEASE, strict=True)
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == "areal-flow"
    driver = of_kind("Job", manifests)["spec"]["template"]["spec"]
    claim = {"claimName": of_kind("PersistentVolumeClaim", manifests)["metadata"]["name"]}
    recipe = recipe_of(manifests, tmp_path)
    assert recipe.cluster.network.host == "0.0.0.0"
    assert recipe.model == ("tiny" if overlay == "cpu" else "/runs/models/Qwen2.5-1.5B-Instruct")
    workers = place_workers(recipe)
    launcher = make_launcher("tls://10.0.0.5:1", recipe.cluster, logs=Path("/runs/mine/jobs"))
    assert len(workers) > 3
    for worker in workers:
        pod = yaml.safe_load(launcher.preview(worker))
        kubernetes_validate.validate(pod, RELEASE, strict=True)
        assert {"name": "runs", "mountPath": "/runs"} in mounts(pod["spec"])
        assert mounts(pod["spec"])[0] == mounts(driver)[0]
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        assert volumes["runs"]["persistentVolumeClaim"] == claim
        is_on_gpu = overlay == "gpu" and worker.role != "reward"
        assert ("nodeSelector" in pod["spec"]) == ("shm" in volumes) == is_on_gpu
        (container,) = pod["spec"]["containers"]
        assert ("limits" in container["resources"]) == is_on_gpu
        for spec in (driver, pod["spec"]):
            security = spec["containers"][0]["securityContext"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not security["allowPrivilegeEscalation"]
            assert spec["securityContext"]["runAsNonRoot"]
            assert spec["securityContext"]["fsGroup"] == 1000


def mounts(spec: Manifest) -> list[Manifest]:
    return list(spec["containers"][0]["volumeMounts"])


def test_driver_has_the_rights_that_it_needs_and_no_other() -> None:
    manifests = built("cpu")
    role, account = of_kind("Role", manifests), of_kind("ServiceAccount", manifests)
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete", "get", "list"]}
    ]
    (subject,) = of_kind("RoleBinding", manifests)["subjects"]
    assert subject["name"] == account["metadata"]["name"]
    driver = of_kind("Job", manifests)["spec"]["template"]["spec"]
    assert driver["serviceAccountName"] == account["metadata"]["name"]
    assert not [each for each in manifests if each["kind"] == "Secret"]


def test_drivers_script_starts_a_run_once_and_then_resumes_it(tmp_path: Path) -> None:
    manifests = built("gpu")
    (tmp_path / "known").mkdir()
    resumed = command_of(manifests, tmp_path, run="known")
    assert " ".join(resumed) == "train --resume known --runs /runs"
    began = command_of(manifests, tmp_path)
    assert " ".join(began[:5]) == "train --name new --runs /runs"
    assert began[-1] == f"{tmp_path}/recipe.toml"


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions and arguments, joining continued lines."""
    text = (ROOT / "infra/docker/Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parsed = [line.partition(" ") for line in joined.splitlines()]
    return [(name, rest.strip()) for name, _, rest in parsed]


def test_image_runs_without_privileges_and_uses_only_sent_files() -> None:
    build = pytest.importorskip("docker.utils.build")
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in ignored if line and not line.startswith("#")]
    sent = {PurePath(path).parts[0] for path in build.exclude_paths(str(ROOT), patterns)}
    sent.remove(".dockerignore")  # always sent
    assert sent == {
        *("areal_flow", "pipelines", "schemas"),
        *("constraints.txt", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"),
    }
    copied: set[str] = set()
    for name, arguments in instructions():
        assert name in ("FROM", "ARG", "COPY", "RUN", "WORKDIR", "USER", "CMD")
        if name == "COPY" and not arguments.startswith("--from"):
            copied |= {*arguments.split()[:-1]}
    assert copied == sent
    assert [rest for name, rest in instructions() if name == "USER"] == ["1000:1000"]
    assert instructions()[-1] == ("CMD", '["areal-flow", "--help"]')


def test_image_installs_what_the_project_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {*packages} == {"areal_flow", "pipelines", "schemas"}
    assert "areal-flow" in project["project"]["scripts"]
    assert re.search(r"^FROM python:3\.11-slim$", dockerfile(), re.MULTILINE)
    runs = [rest for name, rest in instructions() if name == "RUN" and "pip install" in rest]
    arguments = [pip_arguments(run, index) for run in runs for index in ("INDEX", "")]
    torch = "torch==2.13.0"
    index = ["--index-url", "INDEX"]
    plain = ["install", "--no-cache-dir"]
    with_lora = [*plain, ".[lora]", "-c", "constraints.txt"]
    assert arguments == [[*plain, *index, torch], [*plain, torch], with_lora, with_lora]
    assert any(each.startswith("torch>=2.13") for each in project["project"]["dependencies"])


def dockerfile() -> str:
    return (ROOT / "infra/docker/Dockerfile").read_text()


def pip_arguments(script: str, index: str) -> list[str]:
    """Run a RUN instruction with a `pip` that prints its arguments."""
    fake = 'pip() { printf "%s\\n" "$@"; }; '
    variables = {"PATH": "/usr/bin:/bin", "TORCH_INDEX": index, "EXTRAS": "[lora]"}
    command = ["sh", "-ec", fake + script]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    return shlex.split(done.stdout)
