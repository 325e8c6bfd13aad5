"""Every GPU worker has its own device; what does not fit is refused with the counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_flow.cluster.launch import check_cluster
from areal_flow.cluster.placement import (
    VISIBLE_GPUS,
    Machines,
    place_workers,
    visible_gpus,
)
from areal_flow.config import Recipe, build_recipe
from areal_flow.core.errors import ConfigError


def recipe(
    num_generators: int = 1,
    num_trainers: int = 1,
    *,
    generation: str = "cuda",
    trainer: str = "cuda",
    **cluster: Any,
) -> Recipe:
    counts = {"num_generators": num_generators, "num_trainers": num_trainers}
    table = {
        "generation": {"device": generation},
        "trainer": {"device": trainer},
        "cluster": counts | cluster,
    }
    return build_recipe(table, source="test")


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(0, 5))
def test_gpu_workers_have_a_device_each_or_nothing_starts(
    num_generators: int, num_trainers: int, num_hosts: int, num_gpus: int
) -> None:
    hosts = tuple(f"host-{index}" for index in range(num_hosts))
    machines = Machines(hosts, tuple(map(str, range(num_gpus))))
    num_workers = num_generators + num_trainers
    if num_workers > num_hosts * num_gpus:
        expected = rf"\({num_workers} in all\), found {num_hosts * num_gpus} GPU\(s\)"
        with pytest.raises(ConfigError, match=expected):
            place_workers(recipe(num_generators, num_trainers), machines)
        return
    placed = place_workers(recipe(num_generators, num_trainers), machines)
    on_gpu = [worker for worker in placed if worker.role != "reward"]
    assert (
        len({(worker.host, worker.environment[VISIBLE_GPUS]) for worker in on_gpu}) == num_workers
    )
    assert all(worker.environment[VISIBLE_GPUS] in machines.gpus for worker in on_gpu)
    assert {w.environment[VISIBLE_GPUS] for w in placed if w.role == "reward"} == {""}
    trainers = [hosts.index(worker.host) for worker in placed if worker.role == "trainer"]
    assert trainers == [rank // num_gpus for rank in range(num_trainers)]


def test_trainers_and_generators_do_not_share_gpus() -> None:
    machines = Machines(gpus=("0", "1", "2"))
    placed = place_workers(recipe(2, 1), machines)
    devices = {worker.name: worker.gpus for worker in placed if worker.num_gpus}
    assert devices == {"trainer-0": ("0",), "generator-0": ("1",), "generator-1": ("2",)}


def test_a_trainer_and_a_generator_share_the_only_gpu_where_the_recipe_says_so() -> None:
    only = Machines(gpus=("0",))
    placed = place_workers(recipe(num_gpus=1), only)
    assert {w.name: w.gpus for w in placed if w.num_gpus} == {
        "trainer-0": ("0",),
        "generator-0": ("0",),
    }
    assert {w.environment[VISIBLE_GPUS] for w in placed if w.role != "reward"} == {"0"}
    for counts, machines in (((1, 1), Machines(gpus=())), ((2, 1), only), ((1, 2), only)):
        with pytest.raises(ConfigError, match="a generator share it"):
            place_workers(recipe(*counts, num_gpus=1), machines)


@given(st.integers(1, 8), st.integers(1, 3))
def test_workers_without_gpu_are_spread_and_see_no_difference(
    num_generators: int, num_hosts: int
) -> None:
    hosts = tuple(f"host-{index}" for index in range(num_hosts))
    placed = place_workers(recipe(num_generators, generation="cpu", trainer="cpu"), Machines(hosts))
    counts = [[worker.host for worker in placed].count(host) for host in hosts]
    assert max(counts) - min(counts) <= 1
    assert all(VISIBLE_GPUS not in worker.environment for worker in placed)


def split_over(tensor_parallel_size: int, num_generators: int = 1) -> Recipe:
    vllm = {"tensor_parallel_size": tensor_parallel_size}
    generation = {"device": "cuda", "engine": "vllm", "vllm": vllm}
    cluster = {"num_generators": num_generators}
    return build_recipe({"generation": generation, "cluster": cluster}, source="test")


def test_generator_that_is_split_has_its_gpus_on_one_host() -> None:
    machines = Machines(("a", "b"), ("0", "1", "2"))
    placed = place_workers(split_over(2, num_generators=2), machines)
    gpus_by_host = {
        worker.host: worker.environment[VISIBLE_GPUS] for worker in placed if worker.gpus
    }
    assert gpus_by_host == {"a": "0,1", "b": "0,1"}
    with pytest.raises(ConfigError, match=r"and 4 for each of 1 generator.* found 3 GPU"):
        place_workers(split_over(4), Machines(gpus=("0", "1", "2")))
    with pytest.raises(ConfigError, match=r"expected 4 free GPU\(s\).* found 3 of 3"):
        place_workers(split_over(4), machines)


def test_gpus_of_one_role_only_are_accepted() -> None:
    placed = place_workers(recipe(4, 1, generation="cpu"), Machines(gpus=("0",)))
    assert [worker.name for worker in placed if worker.gpus] == ["trainer-0"]


def test_device_index_is_refused_with_the_setting_to_use() -> None:
    with pytest.raises(ConfigError, match=r"generation.device = 'cuda:3'.*CUDA_VISIBLE_DEVICES"):
        place_workers(recipe(generation="cuda:3"), Machines(gpus=("0", "1", "2", "3")))


@pytest.mark.parametrize(
    ("visible", "num_gpus_here", "stated", "expected"),
    [
        (None, 4, None, ("0", "1", "2", "3")),
        (None, 4, 2, ("0", "1")),
        (None, 0, 8, tuple("01234567")),
        ("2, 3", 4, None, ("2", "3")),
        ("GPU-a,GPU-b", 4, 1, ("GPU-a",)),
        ("", 4, None, ()),
        (None, 0, None, ()),
    ],
)
def test_visible_gpus_are_those_of_the_driver_the_recipe_or_the_machine(
    visible: str | None, num_gpus_here: int, stated: int | None, expected: tuple[str, ...]
) -> None:
    environment = {} if visible is None else {VISIBLE_GPUS: visible}
    assert visible_gpus(environment, num_gpus_here, stated=stated) == expected


@pytest.mark.parametrize(
    ("cluster", "rule"),
    [
        (
            {"launcher": "shh"},
            "'shh': expected one of kubernetes, local, slurm, srun, ssh",
        ),
        ({"launcher": "ssh"}, "needs cluster.remote.hosts"),
        ({"launcher": "srun"}, "start the driver by sbatch or in salloc"),
        ({"num_gpus": 0}, "found 0 GPU"),
        (
            {"num_gpus": 2, "network": {"tls_directory": "/nowhere"}},
            "cluster.network.tls_directory: there is no file /nowhere/ca.pem",
        ),
    ],
)
def test_impossible_launches_are_refused_early(cluster: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        check_cluster(recipe(**{"num_gpus": 2} | cluster))


def test_gpus_of_other_machines_are_stated_not_detected() -> None:
    remote = {"hosts": ["127.0.0.1", "localhost"]}
    stated = place_workers(recipe(launcher="ssh", remote=remote, num_gpus=1))
    assert {worker.host for worker in stated if worker.gpus} == {"127.0.0.1", "localhost"}
    with pytest.raises(ConfigError, match=r"found 0 GPU\(s\) on 2 machine\(s\).*cluster.num_gpus"):
        place_workers(recipe(launcher="ssh", remote=remote))
    with pytest.raises(
        ConfigError, match=r"found 8 GPU\(s\) on 1 machine.*set cluster.launcher, s"
    ):
        place_workers(recipe(num_gpus=8, num_trainers=4, num_generators=12))


def test_ranks_of_a_trainer_fill_one_node_of_the_job_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'n1\\nn2\\n'\n")
    scontrol.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    placed = place_workers(recipe(launcher="srun", num_gpus=8, num_trainers=4, num_generators=12))
    hosts = {
        role: [worker.host for worker in placed if worker.role == role]
        for role in ("trainer", "generator")
    }
    assert hosts == {"trainer": ["n1"] * 4, "generator": ["n1"] * 4 + ["n2"] * 8}
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert place_workers(recipe(launcher="srun", num_gpus=8, num_trainers=4, num_generators=12))
    with pytest.raises(ConfigError, match=r"num_gpus = 16: .* each node, and this job has 8 on"):
        place_workers(recipe(launcher="srun", num_gpus=16, num_trainers=4, num_generators=12))
    scontrol.write_text("#!/bin/sh\necho 'scontrol: error: no slurm.conf' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match=r"hostnames 'n\[1-2\]': scontrol: error: no slurm.conf"):
        place_workers(recipe(launcher="srun", num_gpus=8))


def test_devices_are_gpus_or_else_cores_and_half_of_a_gpu_that_two_share() -> None:
    def devices(given: Recipe, num_gpus: int) -> dict[str, tuple[float, bool]]:
        machines = Machines(gpus=tuple(map(str, range(num_gpus))))
        placed_devices = [placed.devices for placed in place_workers(given, machines)]
        return {each["role"]: (each["num_devices"], each["is_gpu"]) for each in placed_devices}

    assert devices(recipe(num_gpus=1), 1) == {
        "trainer": (0.5, True),
        "generator": (0.5, True),
        "reward": (1, False),
    }
    assert devices(recipe(num_gpus=2), 2)["generator"] == (1, True)
    cores = devices(recipe(generation="cpu", trainer="cpu", num_trainer_threads=4), 0)
    assert (cores["trainer"], cores["generator"]) == ((4, False), (1, False))
