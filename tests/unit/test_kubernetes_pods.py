"""The Pods that the Kubernetes launcher requests and the states it parses, without Kubernetes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from areal_flow.cluster.launch import check_cluster
from areal_flow.cluster.launchers import make_launcher
from areal_flow.cluster.launchers.kubernetes import merged, pod_state
from areal_flow.cluster.launchers.queued import JobState, cause_of_end
from areal_flow.cluster.placement import VISIBLE_GPUS, WorkerPlacement, place_workers
from areal_flow.config import Recipe, build_recipe
from areal_flow.core.errors import ConfigError, EngineError
from tests.kubernetes_api import IMAGE, RELEASE

ALL = """
kind: Pod
spec:
  volumes: [{name: runs, persistentVolumeClaim: {claimName: runs}}]
  containers:
    - name: worker
      volumeMounts: [{name: runs, mountPath: /runs}, {name: runs, mountPath: /models}]
      resources: {requests: {memory: 4Gi}}
"""
TRAINER = """
kind: Pod
metadata: {labels: {team: rl}}
spec:
  restartPolicy: Always
  nodeSelector: {gpu: h100}
  volumes: [{name: shm, emptyDir: {medium: Memory}}]
  containers:
    - name: worker
      volumeMounts: [{name: shm, mountPath: /dev/shm}]
      resources: {requests: {memory: 64Gi, cpu: 12}}
    - name: watcher
      image: watcher:1
"""


def recipe(**kubernetes: object) -> Recipe:
    cluster = {"launcher": "kubernetes", "num_trainer_threads": 6, "kubernetes": kubernetes}
    return build_recipe({"trainer": {"device": "cuda"}, "cluster": cluster}, source="test")


def pod_of(role: str, given: Recipe) -> dict[str, Any]:
    launcher = make_launcher("tls://10.0.0.5:1", given.cluster, logs=Path("/runs/a B_/jobs"))
    placement = next(each for each in place_workers(given) if each.role == role)
    pod = yaml.safe_load(launcher.preview(placement))
    kubernetes_validate.validate(pod, RELEASE, strict=True)
    return dict(pod)


def test_pod_asks_for_cores_and_gpus_and_has_few_rights() -> None:
    pod = pod_of("trainer", recipe(image=IMAGE))
    (container,) = pod["spec"]["containers"]
    assert container["image"] == IMAGE
    assert container["resources"] == {"requests": {"cpu": 6}, "limits": {"nvidia.com/gpu": 1}}
    assert VISIBLE_GPUS not in {each["name"] for each in container["env"]}
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not pod["spec"]["automountServiceAccountToken"]
    labels = pod["metadata"]["labels"]
    assert labels.pop("areal-flow/driver")
    assert labels == {
        "areal-flow/run": "a B",
        "areal-flow/role": "trainer",
        "areal-flow/worker": "trainer-0",
    }
    assert pod["metadata"]["name"].startswith("a-b-trainer-0-")
    reward = pod_of("reward", recipe(image=IMAGE))["spec"]["containers"][0]
    assert "limits" not in reward["resources"]
    assert {"name": VISIBLE_GPUS, "value": ""} in reward["env"]


def test_pod_runs_as_the_driver_who_alone_reads_the_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for uid, expected in ((1234, 1234), (0, None)):
        monkeypatch.setattr(os, "getuid", lambda uid=uid: uid)
        security = pod_of("reward", recipe(image=IMAGE))["spec"]["securityContext"]
        assert security.get("runAsUser") == expected
        assert security["runAsNonRoot"]


def test_pod_names_files_of_secrets_and_holds_none() -> None:
    pod = pod_of("generator", recipe(image=IMAGE))
    (container,) = pod["spec"]["containers"]
    script = container["command"][2]
    assert "--driver 10.0.0.5 PORT CERTIFICATES '/runs/a B_/jobs/generator-0-ID.token'" in script
    assert "tee '/runs/a B_/jobs/generator-0-ID.log'" in script, "`logs` finds the worker's name"


def test_templates_add_to_a_pod_and_a_roles_own_comes_last(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(ALL)
    (tmp_path / "trainer.yaml").write_text(TRAINER)
    files = {role: str(tmp_path / f"{role}.yaml") for role in ("all", "trainer")}
    trainer = pod_of("trainer", recipe(image=IMAGE, templates=files))
    worker, watcher = trainer["spec"]["containers"]
    assert watcher == {"name": "watcher", "image": "watcher:1"}
    assert worker["resources"]["requests"] == {"cpu": 12, "memory": "64Gi"}
    assert [each["mountPath"] for each in worker["volumeMounts"]] == [
        "/runs",
        "/models",
        "/dev/shm",
    ]
    assert [each["name"] for each in trainer["spec"]["volumes"]] == ["runs", "shm"]
    assert trainer["metadata"]["labels"]["team"] == "rl"
    assert trainer["spec"]["restartPolicy"] == "Never"
    reward = pod_of("reward", recipe(image=IMAGE, templates=files))
    assert "nodeSelector" not in reward["spec"]
    assert reward["spec"]["containers"][0]["resources"]["requests"] == {"cpu": 1, "memory": "4Gi"}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (None, r"cluster.kubernetes.templates: .*No such file"),
        ("kind: Deployment", r"all.yaml to have `kind: Pod`"),
        ("- 1", r"all.yaml to have `kind: Pod`"),
        ("a: [", r"cluster.kubernetes.templates: .*all.yaml"),
    ],
)
def test_template_that_is_no_pod_is_refused_early(
    text: str | None, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "all.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rule):
        check_cluster(recipe(templates={"all": str(path)}))


def test_driver_without_kubectl_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"launcher = 'kubernetes': there is no kubectl"):
        check_cluster(recipe())


async def test_kubectl_that_prints_no_pod_ends_the_start_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho broken\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    launcher = make_launcher("tls://127.0.0.1:1", recipe().cluster, logs=tmp_path / "jobs")
    with pytest.raises(EngineError, match="reward-0 cannot be submitted"):
        await launcher.start(WorkerPlacement("reward-0", "reward", 1), pytest.fail)


def test_each_run_makes_its_own_certificates_so_that_the_scheduler_may_listen_anywhere() -> None:
    table = {"cluster": {"launcher": "kubernetes", "network": {"host": "0.0.0.0"}}}
    assert build_recipe(table, source="test").cluster.network.tls_directory is None


def test_of_two_equal_keys_the_second_counts_and_lists_without_names_are_replaced() -> None:
    under = {
        "a": {"b": 1, "c": [1, 2], "e": [{"key": 1}]},
        "d": [{"name": "x", "e": 1}, {"name": "y"}],
    }
    over = {
        "a": {"c": [3], "e": [{"key": 2}, {"key": 3}]},
        "d": [{"name": "x", "f": 2}, {"name": "z"}],
    }
    assert merged(under, over) == {
        "a": {"b": 1, "c": [3], "e": [{"key": 2}, {"key": 3}]},
        "d": [{"name": "x", "e": 1, "f": 2}, {"name": "y"}, {"name": "z"}],
    }


def seen(status: dict[str, Any], **metadata: str) -> JobState:
    return pod_state({"metadata": {"name": "a", **metadata}, "status": status})


def container(**state: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": "sidecar", "state": {}}, {"name": "worker", "state": state}]


EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
OOM = container(terminated={"exitCode": 137, "reason": "OOMKilled"})
UNSCHEDULABLE = {"reason": "Unschedulable", "message": "0/3 nodes are available."}
PREEMPTED = {"type": "DisruptionTarget", "reason": "PreemptionByScheduler", "message": "preempting"}
UNREADABLE = {"exitCode": 1, "reason": "Error", "message": "much\nno file\n"}
DELETED = "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (seen(EVICTED), "Pod a: Evicted: The node was low on memory."),
        (seen({"phase": "Failed", "containerStatuses": OOM}), "Pod a: OOMKilled"),
        (
            seen({"phase": "Running", "conditions": [PREEMPTED]}, deletionTimestamp=DELETED),
            "Pod a: PreemptionByScheduler: preempting",
        ),
        (seen({"phase": "Running"}, deletionTimestamp=DELETED), "Pod a: deleted"),
        (
            seen(
                {
                    "phase": "Running",  # a container beside the worker still runs
                    "containerStatuses": container(terminated={"exitCode": 3, "reason": "Error"}),
                }
            ),
            "exit status 3: no module",
        ),
        (
            seen(
                {
                    "phase": "Failed",
                    "containerStatuses": container(terminated={"exitCode": 137, "reason": "Error"}),
                }
            ),
            "killed by signal 9",
        ),
        (seen({"containerStatuses": container(terminated=UNREADABLE)}), "exit status 1: no file"),
        (seen({"phase": "Failed"}), "Pod a: no status"),
        (None, "Pod a ended, and is no longer listed"),
    ],
)
def test_end_of_a_pod_is_explained(state: JobState | None, cause: str) -> None:
    assert state is None or state.has_ended
    line = "" if cause.endswith("no file") else "no module"
    assert cause_of_end("Pod a", state, line) == cause


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (
            {"conditions": [{"type": "PodScheduled", **UNSCHEDULABLE}]},
            "Unschedulable: 0/3 nodes are available.",
        ),
        (
            {
                "conditions": [{"type": "PodScheduled", "status": "True"}],
                "containerStatuses": container(
                    waiting={"reason": "ImagePullBackOff", "message": "not found"}
                ),
            },
            "ImagePullBackOff: not found",
        ),
        ({}, "not scheduled yet"),
    ],
)
def test_reason_why_a_pod_waits_is_reported(status: dict[str, Any], reason: str) -> None:
    assert seen({"phase": "Pending", **status}) == JobState(is_waiting=True, reason=reason)
    assert seen({"phase": "Running", **status}) == JobState()
