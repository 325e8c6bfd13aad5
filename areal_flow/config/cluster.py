"""The settings of worker processes: how many, on which machines, and how they connect."""

from __future__ import annotations

from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, Strict, model_validator

from areal_flow.core.settings import Settings, require

SbatchOptions = Annotated[tuple[str, ...], Strict(False)]
Workers = Literal["all", "trainer", "generator", "reward"]
Priced = Literal["gpu", "cpu", "trainer", "generator", "reward"]
Price = Annotated[float, Field(ge=0)]

SLOW_STORAGE_BYTES_PER_S = 20e6
"""Reading or writing weights more slowly than this counts as hanging."""


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class NetworkSettings(Settings):
    """Where the scheduler and the workers listen, and the certificates that both sides show."""

    host: str = "127.0.0.1"
    """Address on which the scheduler listens."""
    tls_directory: Path | None = Field(None, strict=False)
    """A folder with `ca.pem` (the authority's certificate), `certificate.pem` (this run's) and
    `key.pem` (its key, without a passphrase); none: a driver makes its own, which only this user
    reads, in the run directory."""


class RemoteSettings(Settings):
    """Other machines for the workers; each has this project and sees the same run directory."""

    hosts: tuple[str, ...] = Field((), strict=False)
    """Hosts for `ssh`, such as `me@10.0.0.7`."""
    python: str = ""
    """Path of Python on each host; empty: same as the driver's."""
    directory: str = ""
    """Working directory on each host; empty: same as the driver's."""
    ssh_options: tuple[str, ...] = Field((), strict=False)
    """Additional arguments for `ssh`."""


class KubernetesSettings(Settings):
    """What workers' Pods are made of, beside their names, commands, cores and GPUs."""

    image: str = ""
    """Image with `bash`, `python` and this project; empty: the driver's own image."""
    templates: dict[Workers, Annotated[Path, Strict(False)]] = Field({})
    """YAML templates of Pods, for `all` or for one role (`trainer`, `generator`, `reward`); the
    last of two equal keys wins. The container is named `worker`."""


class ClusterSettings(Settings):
    """Worker processes; with one thread each, results do not depend on their number."""

    num_generators: int = Field(1, ge=1)
    """Number of generator processes."""
    min_generators: int | None = Field(None, ge=1)
    """Train once this many generators are ready; the others join later. None: wait for all."""
    generator_range: tuple[int, int] | None = Field(None, strict=False)
    """Autoscaling bounds, such as [1, 8]: add generators while the trainer waits for data, remove
    them while they wait for it. None: keep `num_generators`."""
    autoscale_gpu: str = ""
    """A GPU name of `areal-flow plan --gpu`: autoscale to what a plan for this GPU recommends,
    calibrated on the last steps of the run. Empty: autoscale by waiting times."""
    num_trainers: int = Field(1, ge=1)
    """Number of trainer ranks, one process each."""
    num_trainer_threads: int = Field(1, ge=1)
    """Threads per trainer rank."""
    num_gpus: int | None = Field(None, ge=0)
    """GPUs of each machine; none: those that are found here. At 1, of one machine, a trainer and a
    generator share it: `generation.vllm.gpu_memory_utilization` is the generator's part."""
    launcher: str = "local"
    """`local`: on this machine; `ssh`: on `remote.hosts`; `srun`: on the nodes of the driver's own
    Slurm job; `slurm`: each worker is a job; `kubernetes`: each is a Pod."""
    remote: RemoteSettings = RemoteSettings()
    """Remote machines for workers."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    """Pods of workers."""
    slurm: dict[Workers, SbatchOptions] = Field({})
    """Options of workers' `sbatch`, such as `--partition=gpu`, or of their `srun`, for `all` or for
    one role (`trainer`, `generator`, `reward`); the last of two equal options wins."""
    network: NetworkSettings = NetworkSettings()
    """Addresses and certificates."""
    prices: dict[Priced, Price] = Field({})
    """Price per hour of a `gpu`, a core (`cpu`) or a role's device, for `areal-flow cost`."""
    num_reward_workers: int = Field(1, ge=1)
    """Number of processes that score completions and call tools."""
    dashboard_port: int = Field(0, ge=0, le=65535)
    """Port of Dask's dashboard on 127.0.0.1; 0: any free port."""
    heartbeat_timeout_s: float = Field(10.0, ge=1)
    """Replace a worker after this many seconds without a heartbeat or processor time."""

    def slurm_options(self, role: str) -> list[str]:
        """Return the options for all workers, then those of a role."""
        chosen = (options for of, options in sorted(self.slurm.items()) if of in ("all", role))
        return [*chain.from_iterable(chosen)]

    @property
    def num_addable_generators(self) -> int:
        """Return how many generators autoscaling may add."""
        return self.generator_range[1] - self.num_generators if self.generator_range else 0

    @property
    def is_one_machine(self) -> bool:
        return self.launcher == "local" and is_loopback(self.network.host)

    @property
    def has_one_gpu(self) -> bool:
        return self.num_gpus == 1 and self.is_one_machine

    @model_validator(mode="after")
    def _bounded(self) -> ClusterSettings:
        min_number, max_number = self.generator_range or (1, self.num_generators)
        require(
            1 <= min_number <= self.num_generators <= max_number,
            f"cluster.generator_range = {self.generator_range}: expected bounds of at least "
            f"1 around cluster.num_generators ({self.num_generators})",
        )
        require(
            (self.min_generators or 1) <= self.num_generators,
            f"cluster.min_generators = {self.min_generators}: expected at most "
            f"cluster.num_generators ({self.num_generators})",
        )
        require(
            bool(self.generator_range) or not self.autoscale_gpu,
            f"cluster.autoscale_gpu = {self.autoscale_gpu!r}: expected cluster.generator_range "
            "too, the bounds within which a plan chooses the number of generators",
        )
        return self

    @model_validator(mode="after")
    def _reachable(self) -> ClusterSettings:
        require(
            self.launcher == "ssh" or not self.remote.hosts,
            f"cluster.launcher = {self.launcher!r} starts no workers on cluster.remote.hosts = "
            f"{list(self.remote.hosts)}; set launcher to 'ssh', or remote.hosts to []",
        )
        invalid = [each for options in self.slurm.values() for each in options if each[:1] != "-"]
        require(
            not invalid,
            f"cluster.slurm: expected options of sbatch such as '--partition=gpu', found {invalid}",
        )
        far = [host for host in self.remote.hosts if not is_loopback(host.rpartition("@")[2])]
        require(
            not far or not is_loopback(self.network.host),
            f"cluster.network.host = {self.network.host!r} cannot be reached from {far}; set it to "
            "this machine's address in their network",
        )
        return self
