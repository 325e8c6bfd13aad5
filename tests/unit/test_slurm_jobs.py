"""The jobs that the Slurm launcher requests and the states it parses, without Slurm."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from areal_flow.cluster.certificates import connection_security, with_certificates
from areal_flow.cluster.launch import check_cluster
from areal_flow.cluster.launchers import make_launcher, queued
from areal_flow.cluster.launchers.queued import JobState, cause_of_end
from areal_flow.cluster.launchers.slurm import SlurmLauncher, job_states
from areal_flow.cluster.placement import VISIBLE_GPUS, WorkerPlacement, place_workers
from areal_flow.config import Recipe, build_recipe
from areal_flow.config.cluster import ClusterSettings, NetworkSettings
from areal_flow.core.errors import ConfigError

LISTED = """\
7                   RUNNING             0           None
8                   PENDING             0           ReqNodeNotAvail, UnavailableNodes:node-3
"""


def recipe() -> Recipe:
    table = {
        "trainer": {"device": "cuda"},
        "cluster": {
            "launcher": "slurm",
            "num_trainer_threads": 6,
            "slurm": {"all": ["--partition=cpu"], "trainer": ["--partition=gpu"]},
        },
    }
    return build_recipe(table, source="test")


def directives(role: str) -> list[str]:
    """Return what the batch script of a role's first worker asks Slurm for."""
    launcher = make_launcher("tls://10.0.0.5:1", recipe().cluster, logs=Path("/runs/a b/jobs"))
    placement = next(each for each in place_workers(recipe()) if each.role == role)
    script = launcher.preview(placement)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]


def test_job_asks_for_cores_and_gpus_and_a_roles_options_come_last() -> None:
    options = directives("trainer")
    assert {"--cpus-per-task=6", "--gpus=1", "--no-requeue"} < set(options)
    assert options.index("--partition=gpu") > options.index("--partition=cpu")
    assert "'--output=/runs/a b/jobs/trainer-0-%j.log'" in options
    assert not {each for each in directives("generator") if "gpu" in each}


def certified(folder: Path) -> ClusterSettings:
    network = with_certificates(NetworkSettings(), folder)
    return recipe().cluster.model_copy(update={"network": network})


def test_job_that_cannot_reach_its_driver_ends(tmp_path: Path) -> None:
    launcher = make_launcher("tls://127.0.0.1:1", certified(tmp_path), logs=Path("jobs"))
    script = launcher.preview(place_workers(recipe())[0]).replace("PORT", "1")
    done = subprocess.run(["bash", "-c", script], text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "the driver at 127.0.0.1:1 cannot be reached: Connection refused\n"


SBATCH = "#!/bin/sh\ncat > job\nbash job > log 2>&1 &\necho 7\n"


async def test_jobs_channel_is_open_to_the_job_alone_and_nothing_is_sent_in_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a plain connection nor another run's certificate is enough, even with the token."""
    for name, text in (("sbatch", "#!/bin/sh\ncat > job\necho 7\n"), ("squeue", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(queued, "WORKER_PROGRAM", ("-c", "import time; time.sleep(60)"))
    for folder in ("own", "other"):
        (tmp_path / folder).mkdir()
    settings = certified(tmp_path / "own")
    launcher = make_launcher("tls://127.0.0.1:1", settings, logs=tmp_path)
    starting = asyncio.create_task(
        launcher.start(WorkerPlacement("reward-0", "reward", 1), pytest.fail)
    )
    while not (tmp_path / "job").is_file() or "exec" not in (tmp_path / "job").read_text():
        await asyncio.sleep(0.02)
    script = (tmp_path / "job").read_text()
    port = int(script.partition("--driver 127.0.0.1 ")[2].split()[0])
    (token,) = tmp_path.glob("*.token")
    contexts = [
        connection_security(each.network).get_connection_args("client")["ssl_context"]
        for each in (certified(tmp_path / "other"), settings)
    ]
    for tls, sent in ((None, token), (contexts[0], token), (contexts[1], tmp_path / "sbatch")):
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
            writer.write(sent.read_bytes())
            assert await reader.read() == b""
            writer.close()
        assert not starting.done()
    with subprocess.Popen(["bash", "job"], env=os.environ | {"PATH": os.defpath}) as job:
        try:
            await asyncio.wait_for(starting, 20)
            assert not token.exists()
            await asyncio.wait_for(launcher.stop("reward-0"), 20)
            assert job.wait(20) == 128 + signal.SIGTERM
        finally:
            job.kill()


def test_slurm_chooses_gpus_which_are_neither_counted_nor_named_here() -> None:
    trainer = place_workers(recipe())[0]
    assert (trainer.num_gpus, trainer.gpus) == (1, ())
    assert VISIBLE_GPUS not in trainer.environment


def test_driver_without_sbatch_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"cluster.launcher = 'slurm': there is no sbatch"):
        check_cluster(recipe())


def test_states_are_read_with_reasons_of_several_words() -> None:
    assert job_states(LISTED) == {
        "7": JobState(reason="None"),
        "8": JobState(is_waiting=True, reason="ReqNodeNotAvail, UnavailableNodes:node-3"),
    }


@pytest.mark.parametrize(
    ("state", "wait_status", "cause"),
    [
        ("FAILED", 3 << 8, "exit status 3: no module"),
        ("FAILED", 255 << 8, "exit status 255: no module"),
        ("FAILED", 137 << 8, "killed by signal 9"),
        ("FAILED", 11, "killed by signal 11"),
        ("COMPLETED", 0, "exit status 0: no module"),
        ("TIMEOUT", 15, "Slurm job 7: TIMEOUT"),
        ("NODE_FAIL", 0, "Slurm job 7: NODE_FAIL"),
        ("OUT_OF_MEMORY", 125 << 8, "Slurm job 7: OUT_OF_MEMORY"),
        ("PREEMPTED", 0, "Slurm job 7: PREEMPTED"),
    ],
)
def test_end_of_a_job_is_explained(state: str, wait_status: int, cause: str) -> None:
    state_of_job = job_states(f"7 {state} {wait_status} None")["7"]
    assert cause_of_end("Slurm job 7", state_of_job, "no module") == cause


async def test_unreadable_list_of_jobs_is_requested_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = "if [ -e asked ]; then echo 7 FAILED 256 None; else touch asked; echo broken; fi"
    for name, does in (("sbatch", "echo 7"), ("squeue", f"cd {tmp_path}; {failed}")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(SlurmLauncher, "poll_s", 1.0)
    launcher = make_launcher("tls://127.0.0.1:1", recipe().cluster, logs=tmp_path / "jobs")
    causes = asyncio.Queue[str]()
    placement = WorkerPlacement("reward-0", "reward", 1)
    await asyncio.wait_for(launcher.start(placement, causes.put_nowait), 20)
    assert causes.get_nowait() == "exit status 1"
