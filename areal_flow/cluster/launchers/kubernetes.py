"""Starts each worker as a Pod, by `kubectl`, which finds the cluster as it does for its user.

A Pod is `pod.yaml`, then the user's templates, then what makes it this worker; later parts win.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import socket
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from areal_flow.cluster.launchers.child import last_line, run_command
from areal_flow.cluster.launchers.fork_server import ForkServer
from areal_flow.cluster.launchers.queued import JobState, QueuedLauncher
from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.config.cluster import ClusterSettings
from areal_flow.core.errors import ConfigError

Manifest = Mapping[Any, Any]
"""A Kubernetes object or a part of one, as in JSON."""

BASE = Path(__file__).with_name("pod.yaml")
SCRIPT = "{{\n{commands}\n}} 2>&1 | tee {log}\nexit ${{PIPESTATUS[0]}}"
"""What a worker prints is in the Pod's log and stays in the run directory when the Pod is gone."""


class _Dumper(yaml.SafeDumper):
    def represent_str(self, text: str) -> Any:  # a script as it is read
        return self.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_str)


class KubernetesLauncher(QueuedLauncher):
    """Workers whose nodes and GPUs Kubernetes chooses; a Pod is never restarted, but replaced."""

    program = "kubectl"
    noun = "Pod"
    poll_s = 5.0
    needs_delete = True

    def __init__(
        self, scheduler: str, settings: ClusterSettings, fork_server: ForkServer, logs: Path
    ) -> None:
        super().__init__(scheduler, settings, fork_server, logs)
        files = settings.kubernetes.templates
        self._templates: dict[str, Manifest] = {role: _read(files[role]) for role in files}
        self._driver = secrets.token_hex(8)
        """A label of all Pods of this driver."""
        self._driver_pod: Manifest = {}
        """Empty if it does not run in one."""

    def describe(self, placement: WorkerPlacement, port: object, token: Path) -> str:
        chosen = [self._templates.get(role, {}) for role in ("all", placement.role)]
        worker = self._worker(placement, port, token)
        pod = reduce(merged, [_read(BASE), self._sizes(placement), *chosen, worker])
        return str(yaml.dump(pod, Dumper=_Dumper, sort_keys=False, width=1000))

    def _sizes(self, placement: WorkerPlacement) -> Manifest:
        gpus = {"limits": {"nvidia.com/gpu": placement.num_gpus}} if placement.num_gpus else {}
        resources = {"resources": {"requests": {"cpu": placement.num_cores}, **gpus}}
        driver_image = (
            self._driver_pod["spec"]["containers"][0]["image"] if self._driver_pod else ""
        )
        # The user of the driver, because nobody else may read the files of its certificate.
        user = {"runAsUser": os.getuid(), "runAsGroup": os.getgid()} if os.getuid() else {}
        container = {"name": "worker", "image": self.settings.kubernetes.image or driver_image}
        return {"spec": {"securityContext": user, "containers": [container | resources]}}

    def _worker(self, placement: WorkerPlacement, port: object, token: Path) -> Manifest:
        name = self._name(token)
        log = shlex.quote(str(self.log(placement.name, name)))
        script = SCRIPT.format(commands=self.commands(placement, port, token, "python"), log=log)
        labels = {"run": self.logs.parent.name, "role": placement.role, "worker": placement.name}
        container = {
            "name": "worker",
            "workingDir": str(Path.cwd()),
            "command": ["bash", "-c", script],
            "env": [{"name": k, "value": v} for k, v in self.variables(placement).items()],
        }
        labels |= {"driver": self._driver}
        driver = self._driver_pod.get("metadata", {})  # when that Pod is deleted, so is this one
        owner = {"apiVersion": "v1", "kind": "Pod"}
        owner |= {"name": driver.get("name"), "uid": driver.get("uid")}
        metadata = {
            "name": name,
            "labels": {f"areal-flow/{k}": v[:63].strip("._-") for k, v in labels.items()},
            "ownerReferences": [owner] if driver else [],
        }
        # bash, as process 1, ignores SIGTERM. So a Pod that is deleted or evicted is still listed,
        # with the reason, when Pods are listed again.
        grace_s = 2 * int(self.poll_s)
        spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": grace_s}
        return {"metadata": metadata, "spec": spec | {"containers": [container]}}

    def _name(self, token: Path) -> str:
        run = re.sub("[^a-z0-9]+", "-", self.logs.parent.name.lower())[:40].strip("-")
        return f"{run or 'run'}-{token.stem}"

    async def submit(self, placement: WorkerPlacement, port: int, token: Path) -> str:
        get_driver = ("get", "pod", socket.gethostname(), "--ignore-not-found", "--output=json")
        self._driver_pod = json.loads(await run_command(self.program, *get_driver) or "{}")
        pod = self.describe(placement, port, token)
        await run_command(self.program, "create", "--filename=-", stdin=pod)
        return self._name(token)

    async def list_jobs(self) -> dict[str, JobState]:
        chosen = f"--selector=areal-flow/driver={self._driver}"
        pods = json.loads(await run_command(self.program, "get", "pods", chosen, "--output=json"))
        return {pod["metadata"]["name"]: pod_state(pod) for pod in pods["items"]}

    async def cancel(self, job_id: str) -> None:
        await run_command(
            self.program, "delete", "pod", job_id, "--wait=false", "--ignore-not-found"
        )


def merged(base: Manifest, overrides: Manifest) -> Manifest:
    """Return both manifests; overrides win. Entries of lists are matched by name."""
    both = {**base, **overrides}
    for key in base.keys() & overrides.keys():
        left, right = base[key], overrides[key]
        if isinstance(left, dict) and isinstance(right, dict):
            both[key] = merged(left, right)
        elif isinstance(left, list) and all(
            isinstance(e, dict) and "name" in e for e in left + right
        ):
            keyed = [{(e["name"], e.get("mountPath")): e for e in each} for each in (left, right)]
            both[key] = [*merged(*keyed).values()]
    return both


def pod_state(pod: Manifest) -> JobState:
    status: Manifest = pod.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    states = {each["name"]: each["state"] for each in status.get("containerStatuses", ())}
    state: Manifest = states.get("worker", {})
    ended: Manifest = state.get("terminated", {})
    is_deleted = "deletionTimestamp" in pod["metadata"]
    if is_deleted or ended or status.get("phase") in ("Failed", "Succeeded"):
        why = _words(conditions.get("DisruptionTarget", {})) or _words(status)
        why = why or ("deleted" if is_deleted else "")
        if why or ended.get("reason") not in ("Error", "Completed"):
            return JobState(has_ended=True, reason=why or _words(ended) or "no status")
        reason = last_line(ended.get("message", "").encode())
        return JobState(has_ended=True, reason=reason, exit_code=ended["exitCode"])
    if status.get("phase") == "Running":
        return JobState()
    waits = _words(state.get("waiting", {})) or _words(conditions.get("PodScheduled", {}))
    return JobState(is_waiting=True, reason=waits or "not scheduled yet")


def _words(status: Manifest) -> str:
    return ": ".join(status[key] for key in ("reason", "message") if status.get(key))


def _read(path: Path) -> Manifest:
    try:
        manifest = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cluster.kubernetes.templates: {path}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != "Pod":
        raise ConfigError(f"cluster.kubernetes.templates: expected {path} to have `kind: Pod`")
    return manifest
