"""An API server on 127.0.0.1 that knows Pods only, and a kubelet that runs them as processes here.

It answers what the real `kubectl` asks for to create, list and delete Pods. A Pod must be valid by
the schemas of `kubernetes_validate`. Like process 1 of a container, a Pod's process ignores
SIGTERM: a deleted Pod runs until its grace is over.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import kubernetes_validate
import pytest
import yaml
from aiohttp import web

ROLE = Path(__file__).parents[1] / "infra" / "kubernetes" / "base" / "access.yaml"
"""What a driver may do in a cluster is all that the server allows."""
HOST = "127.0.0.1"
NAMESPACE = "training"
IMAGE = "registry.test/areal-flow:1"
RELEASE = "1.34"

Manifest = dict[str, Any]

PODS = {
    "name": "pods",
    "singularName": "pod",
    "namespaced": True,
    "kind": "Pod",
    "verbs": ["create", "delete", "get", "list"],
}
VALIDATES = {
    "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
    "responses": {},
    "x-kubernetes-group-version-kind": {"group": "", "kind": "Pod", "version": "v1"},
}
"""With it `kubectl` leaves the check of a Pod to the server, as with a real one."""
DISCOVERY: Mapping[str, Manifest] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [PODS]},
    "/openapi/v3": {"paths": {"api/v1": {"serverRelativeURL": "/openapi/v3/api/v1"}}},
    "/openapi/v3/api/v1": {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": RELEASE},
        "paths": {"/api/v1/namespaces/{namespace}/pods/{name}": {"patch": VALIDATES}},
    },
}


class FakeKubernetes:
    """Its Pods by name, and how tests meddle with them from another thread."""

    def __init__(self) -> None:
        self.pods: dict[str, Manifest] = {}
        self.unschedulable = ""
        """The scheduler's message for new Pods; empty: they run."""
        role = next(each for each in yaml.safe_load_all(ROLE.read_text()) if "rules" in each)
        (rule,) = role["rules"]
        self._verbs = set(rule["verbs"])
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.loop = asyncio.new_event_loop()

    def names(self, worker: str = "") -> list[str]:
        """Return the Pods that have not ended; of one worker, if it is named."""
        return [
            name
            for name, pod in [*self.pods.items()]
            if pod["status"]["phase"] in ("Pending", "Running")
            and worker in ("", labels_of(pod).get("areal-flow/worker"))
        ]

    def add(self, pod: Manifest) -> Manifest:
        """Add a Pod; run it if it can be scheduled."""
        pod["metadata"] |= {"uid": str(uuid4())}
        pod["status"] = {"phase": "Pending"}
        self.pods[pod["metadata"]["name"]] = pod
        if self.unschedulable:
            why = {"reason": "Unschedulable", "message": self.unschedulable}
            pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", **why}]
        elif "command" in pod["spec"]["containers"][0]:
            self._spawn(self._run(pod))
        return pod

    def schedule(self) -> None:
        """Run the Pods that wait."""
        self.unschedulable = ""
        for pod in [*self.pods.values()]:
            if pod["status"]["phase"] == "Pending":
                self.loop.call_soon_threadsafe(lambda pod: self._spawn(self._run(pod)), pod)

    def delete(self, name: str) -> None:
        pod = self.pods[name]
        if "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self._spawn(self._end(pod, pod["spec"]["terminationGracePeriodSeconds"]))

    def disrupt(self, name: str, reason: str, message: str) -> None:
        """Delete a Pod as the scheduler or the eviction API does."""
        why = {"reason": reason, "message": message}
        condition = {"type": "DisruptionTarget", "status": "True", **why}
        self.pods[name]["status"]["conditions"] = [condition]
        self.loop.call_soon_threadsafe(self.delete, name)

    def end(self, name: str, **status: Any) -> None:
        """End a Pod's process as the kubelet does, which says why."""
        self.pods[name]["status"] |= {"phase": "Failed", **status}
        os.killpg(self._processes[name].pid, signal.SIGKILL)

    async def answer(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "")
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        if "namespace" not in request.match_info:
            return _failure(404, "NotFound", request.path)
        verbs = {"POST": "create", "DELETE": "delete", "GET": "get" if name else "list"}
        if (verb := verbs.get(request.method, "")) not in self._verbs:
            return _failure(403, "Forbidden", f"cannot {verb or request.method} pods")
        if request.method == "POST":
            return self._create(await request.json())
        if not name:
            return web.json_response(self._list(request.query.get("labelSelector", "")))
        if name not in self.pods:
            return _failure(404, "NotFound", f'pods "{name}" not found')
        if request.method == "DELETE":
            self.delete(name)
        return web.json_response(self.pods[name])

    def _create(self, pod: Manifest) -> web.Response:
        try:
            kubernetes_validate.validate(pod, RELEASE, strict=True)
        except kubernetes_validate.ValidationError as error:
            return _failure(400, "BadRequest", f"{'.'.join(map(str, error.path))}: {error.message}")
        if not all(container.get("image") for container in pod["spec"]["containers"]):
            return _failure(422, "Invalid", "spec.containers[0].image: Required value")
        return web.json_response(self.add(pod), status=201)

    def _list(self, selector: str) -> Manifest:
        key, _, value = selector.partition("=")
        items = [pod for pod in self.pods.values() if labels_of(pod).get(key) == value]
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}

    async def _run(self, pod: Manifest) -> None:
        (container,) = pod["spec"]["containers"]
        name = pod["metadata"]["name"]
        process = self._processes[name] = subprocess.Popen(
            container["command"],
            cwd=container["workingDir"],
            env={
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                **{each["name"]: each["value"] for each in container["env"]},
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        pod["status"] = {"phase": "Running"}
        output, _ = await asyncio.to_thread(process.communicate)
        code = 128 - process.returncode if process.returncode < 0 else process.returncode
        ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
        if code and container["terminationMessagePolicy"] == "FallbackToLogsOnError":
            ended["message"] = output.decode()[-2048:]
        state = {"name": container["name"], "state": {"terminated": ended}}
        phase = "Failed" if code else "Succeeded"
        pod["status"] = {"phase": phase, "containerStatuses": [state]} | {
            key: value for key, value in pod["status"].items() if key != "phase"
        }

    async def _end(self, pod: Manifest, grace_s: float) -> None:
        name = pod["metadata"]["name"]
        process = self._processes.get(name)
        if process is not None and process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, grace_s)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        del self.pods[name]

    def _spawn(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def labels_of(pod: Manifest) -> dict[str, str]:
    return dict(pod["metadata"].get("labels", {}))


def _failure(code: int, reason: str, message: str) -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
    return web.json_response(status | {"reason": reason, "message": message}, status=code)


@contextmanager
def running_kubernetes(directory: Path) -> Iterator[FakeKubernetes]:
    """Start the server; `kubectl` of this process and its children reaches it.

    Skips where there is no `kubectl`.
    """
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    fake = FakeKubernetes()
    application = web.Application()
    application.router.add_route("*", "/api/v1/namespaces/{namespace}/pods", fake.answer)
    application.router.add_route("*", "/api/v1/namespaces/{namespace}/pods/{name}", fake.answer)
    application.router.add_route("*", "/{path:.*}", fake.answer)
    runner = web.AppRunner(application)
    fake.loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, HOST, 0)
    fake.loop.run_until_complete(site.start())
    thread = Thread(target=fake.loop.run_forever, daemon=True)
    thread.start()
    (directory / "config").write_text(json.dumps(_configuration(runner.addresses[0][1])))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", str(directory / "config"))
            patch.setenv("KUBECACHEDIR", str(directory / "cache"))
            yield fake
    finally:
        fake.close()
        asyncio.run_coroutine_threadsafe(runner.cleanup(), fake.loop).result()
        fake.loop.call_soon_threadsafe(fake.loop.stop)
        thread.join()
        fake.loop.close()


def _configuration(port: int) -> Manifest:
    context = {"cluster": "test", "user": "test", "namespace": NAMESPACE}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": f"http://{HOST}:{port}"}}],
        "contexts": [{"name": "test", "context": context}],
        "users": [{"name": "test", "user": {}}],
        "current-context": "test",
    }
