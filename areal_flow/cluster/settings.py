"""The settings of worker processes: how many, on which machines, and how they connect."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, Strict, model_validator

from areal_flow.settings import Settings, require

SbatchOptions = Annotated[tuple[str, ...], Strict(False)]
Workers = Literal["all", "trainer", "generator", "reward"]


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class NetworkSettings(Settings):
    """Where the scheduler and the workers listen. Beyond this machine they need certificates, but
    with `kubernetes`, where each run makes its own."""

    host: str = "127.0.0.1"
    """The address at which the scheduler listens."""
    tls_directory: Path | None = Field(None, strict=False)
    """A folder with `ca.pem` (the authority's certificate), `certificate.pem` (this run's) and
    `key.pem` (its key, without a passphrase)."""


class RemoteSettings(Settings):
    """Other machines for the workers; each has this project and sees the same run directory."""

    hosts: tuple[str, ...] = Field((), strict=False)
    """Hosts for `ssh`, such as `me@10.0.0.7`."""
    python: str = ""
    """The environment's Python on each host; empty: the driver's path."""
    directory: str = ""
    """Where workers start on each host; empty: the driver's working directory."""
    ssh_options: tuple[str, ...] = Field((), strict=False)
    """More arguments for `ssh`."""


class KubernetesSettings(Settings):
    """What workers' Pods are made of, beside their names, commands, cores and GPUs."""

    image: str = ""
    """Its `bash` and `python` (with this project) run workers; empty: the driver's own image."""
    templates: dict[Workers, Annotated[Path, Strict(False)]] = Field({})
    """YAML files, each a Pod that the workers' Pods contain: of `all`, then of a role, `trainer`,
    `generator` or `reward`; of two equal keys the last counts. Their container is `worker`."""


class ClusterSettings(Settings):
    """Worker processes; with one thread each, results do not depend on their number."""

    num_generators: int = Field(1, ge=1)
    """Worker processes that generate."""
    num_trainers: int = Field(1, ge=1)
    """Trainer ranks, a process each."""
    num_trainer_threads: int = Field(1, ge=1)
    """Threads of a trainer rank."""
    num_gpus: int | None = Field(None, ge=0)
    """GPUs of each machine; none: those that are found here."""
    launcher: str = "local"
    """`local`: on this machine; `ssh`: on `remote.hosts`; `slurm`: each worker is a job;
    `kubernetes`: each is a Pod."""
    remote: RemoteSettings = RemoteSettings()
    """Other machines for the workers."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    """The workers' Pods."""
    slurm: dict[Workers, SbatchOptions] = Field({})
    """Options of the workers' jobs for `sbatch`, such as `--partition=gpu`: of `all`, then of a
    role, `trainer`, `generator` or `reward`; of two equal ones the last counts."""
    network: NetworkSettings = NetworkSettings()
    """Where the scheduler and the workers listen."""
    num_reward_workers: int = Field(1, ge=1)
    """Worker processes that score completions and call tools."""
    dashboard_port: int = Field(0, ge=0, le=65535)
    """Of Dask's dashboard on 127.0.0.1; 0: any free port."""
    silent_after_s: float = Field(10.0, ge=1)
    """A worker without heartbeat and processor time for so long is replaced."""

    @property
    def is_one_machine(self) -> bool:
        return self.launcher == "local" and is_loopback(self.network.host)

    @model_validator(mode="after")
    def _reachable(self) -> ClusterSettings:
        require(
            self.launcher != "local" or not self.remote.hosts,
            f"cluster.launcher = 'local' starts workers on this machine only, but "
            f"cluster.remote.hosts = {list(self.remote.hosts)}; set launcher to 'ssh'",
        )
        host, has_tls = self.network.host, self.network.tls_directory is not None
        require(
            has_tls or self.launcher == "kubernetes" or is_loopback(host),
            f"cluster.network.host = {host!r} needs TLS: whoever reaches the scheduler's port can "
            "run any code; set tls_directory, or host to 127.0.0.1",
        )
        far = [each for each in self.remote.hosts if not is_loopback(each.rpartition("@")[2])]
        require(
            not far or not is_loopback(host),
            f"cluster.network.host = {host!r} cannot be reached from {far}; set it to "
            "this machine's address in their network, with TLS",
        )
        return self
