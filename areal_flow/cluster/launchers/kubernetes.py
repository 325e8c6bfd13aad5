"""Starts each worker as a Pod, by `kubectl`, which finds the cluster as it does for its user.

A Pod is `pod.yaml`, then the user's templates, then what makes it this worker; later parts win.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from areal_flow.cluster.launchers.queued import JobState, QueuedLauncher, run_command
from areal_flow.cluster.launchers.standby import StandbyWorkers
from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.cluster.settings import ClusterSettings
from areal_flow.errors import ConfigError

Manifest = Mapping[str, Any]
"""A Kubernetes object or a part of one, as in JSON."""

BASE = Path(__file__).with_name("pod.yaml")
SCRIPT = "{{\n{commands}\n}} 2>&1 | tee {log}\nexit ${{PIPESTATUS[0]}}"
"""What a worker prints is in the Pod's log and stays in the run directory when the Pod is gone."""


class _Dumper(yaml.SafeDumper):
    """Writes scripts as they are read."""

    def represent_str(self, text: str) -> Any:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_str)


class KubernetesLauncher(QueuedLauncher):
    """Workers whose nodes and GPUs Kubernetes chooses; a Pod is never restarted, but replaced."""

    noun = "Pod"
    poll_s = 5.0
    keeps_ended = True

    def __init__(
        self, scheduler: str, settings: ClusterSettings, standby: StandbyWorkers, logs: Path
    ) -> None:
        super().__init__(scheduler, settings, standby, logs)
        self._kubernetes = settings.kubernetes
        self._templates = {role: _read(path) for role, path in self._kubernetes.templates.items()}
        self._driver = secrets.token_hex(8)
        """A label of all Pods of this driver."""
        self._driver_pod: Manifest | None = None
        self._finding_driver = asyncio.Lock()

    def describe(self, placement: WorkerPlacement, port: object, unique: str) -> str:
        roles = ("all", placement.role)
        parts = [_read(BASE), self._sizes(placement)]
        parts += [self._templates[role] for role in roles if role in self._templates]
        pod = reduce(merged, [*parts, self._identity(placement, port, unique)])
        return str(yaml.dump(pod, Dumper=_Dumper, sort_keys=False, width=1000))

    def _sizes(self, placement: WorkerPlacement) -> Manifest:
        gpus = {"limits": {"nvidia.com/gpu": placement.num_gpus}} if placement.num_gpus else {}
        resources = {"requests": {"cpu": placement.num_cores}, **gpus}
        own = self._driver_pod["spec"]["containers"][0]["image"] if self._driver_pod else ""
        container = {"image": self._kubernetes.image or own, "resources": resources}
        # The user of the driver, because nobody else may read the files of its certificate.
        user = {"runAsUser": os.getuid(), "runAsGroup": os.getgid()} if os.getuid() else {}
        return {"spec": {"securityContext": user, "containers": [{"name": "worker"} | container]}}

    def _identity(self, placement: WorkerPlacement, port: object, unique: str) -> Manifest:
        name = self._name(placement, unique)
        python = self._kubernetes.python or sys.executable
        script = SCRIPT.format(
            commands=self.commands(placement, port, unique, python),
            log=shlex.quote(str(self.log(placement.name, name))),
        )
        labels = {"run": self.logs.parent.name, "role": placement.role, "worker": placement.name}
        labels["driver"] = self._driver
        container = {
            "name": "worker",
            "workingDir": str(Path.cwd()),
            "command": ["bash", "-c", script],
            "env": [
                {"name": key, "value": text} for key, text in self.variables(placement).items()
            ],
        }
        return {
            "metadata": {
                "name": name,
                "labels": {f"areal-flow/{k}": v[:63].strip("._-") for k, v in labels.items()},
                "ownerReferences": owners(self._driver_pod),
            },
            "spec": {
                "restartPolicy": "Never",  # the pool starts another Pod
                # bash, as process 1, ignores SIGTERM: so a Pod that is deleted or evicted is still
                # listed, with the reason, when it is looked at again.
                "terminationGracePeriodSeconds": 2 * int(self.poll_s),
                "containers": [container],
            },
        }

    def log(self, name: str, job_id: str) -> Path:
        return self.logs / f"{job_id}.log"  # which has the worker's name

    def _name(self, placement: WorkerPlacement, unique: str) -> str:
        run = re.sub("[^a-z0-9]+", "-", self.logs.parent.name.lower())[:40].strip("-")
        return f"{run or 'run'}-{placement.name}-{unique}"

    async def submit(self, placement: WorkerPlacement, port: int, unique: str) -> str:
        async with self._finding_driver:
            if self._driver_pod is None:  # its own, if it runs in one: they have one name
                known = ("get", "pod", socket.gethostname(), "--ignore-not-found", "--output=json")
                self._driver_pod = json.loads(await self._kubectl(*known) or "{}")
        await self._kubectl("create", "-f", "-", given=self.describe(placement, port, unique))
        return self._name(placement, unique)

    async def list_jobs(self) -> dict[str, JobState]:
        chosen = f"--selector=areal-flow/driver={self._driver}"
        found = json.loads(await self._kubectl("get", "pods", chosen, "--output=json"))
        return {pod["metadata"]["name"]: pod_state(pod) for pod in found["items"]}

    async def cancel(self, job_id: str) -> None:
        await self._kubectl("delete", "pod", job_id, "--wait=false", "--ignore-not-found")

    async def _kubectl(self, *arguments: str, given: str = "") -> str:
        chosen = self._kubernetes.namespace
        namespace = [f"--namespace={chosen}"] if chosen else []
        return await run_command("kubectl", *namespace, *arguments, given=given)


def merged(under: Manifest, over: Manifest) -> Manifest:
    """Return both; of two equal keys the second counts. Entries of lists are equal by `name`."""
    result = dict(under)
    for key, value in over.items():
        known = result.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            result[key] = merged(known, value)
        elif isinstance(known, list) and all("name" in entry for entry in (*known, *value)):
            entries: dict[str, Manifest] = {}
            for entry in (*known, *value):
                entries[entry["name"]] = merged(entries.get(entry["name"], {}), entry)
            result[key] = [*entries.values()]
        else:
            result[key] = value
    return result


def owners(pod: Manifest | None) -> list[Manifest]:
    """Return what lets Kubernetes delete the Pods of a driver when the driver's own is gone."""
    if not pod:
        return []
    metadata = pod["metadata"]
    known = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
    return [known]


def pod_state(pod: Manifest) -> JobState:
    status: Manifest = pod.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    states = {each["name"]: each["state"] for each in status.get("containerStatuses", ())}
    state: Manifest = states.get("worker", {})
    ended: Manifest = state.get("terminated", {})
    is_deleted = "deletionTimestamp" in pod["metadata"]
    if is_deleted or ended or status.get("phase") in ("Failed", "Succeeded"):
        why = _words(conditions.get("DisruptionTarget", {})) or _words(status)
        if not why and not is_deleted and ended.get("reason") in ("Error", "Completed"):
            return JobState(has_ended=True, exit_code=ended["exitCode"])
        return JobState(has_ended=True, reason=why or _words(ended) or "deleted")
    if status.get("phase") == "Running":
        return JobState()
    waits = _words(state.get("waiting", {})) or _words(conditions.get("PodScheduled", {}))
    return JobState(is_waiting=True, reason=waits or "not scheduled yet")


def _words(said: Manifest) -> str:
    return ": ".join(said[key] for key in ("reason", "message") if said.get(key))


def _read(path: Path) -> Manifest:
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"cluster.kubernetes.templates: {path} cannot be read: {error}"
        ) from error
    if not isinstance(found, dict) or found.get("kind") != "Pod":
        raise ConfigError(f"cluster.kubernetes.templates: expected {path} to have `kind: Pod`")
    return found
