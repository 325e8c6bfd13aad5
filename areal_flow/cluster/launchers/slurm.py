"""Starts each worker as a Slurm job of the driver's user, by `sbatch`, `squeue` and `scancel`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from areal_flow.cluster.launchers.child import run_command
from areal_flow.cluster.launchers.queued import JobState, QueuedLauncher
from areal_flow.cluster.placement import WorkerPlacement

SQUEUE = (
    *("squeue", "--me", "--states=all", "--noheader"),
    "--Format=JobID:20,State:20,exit_code:12,Reason:60",
)
ENDED_BY_ITSELF = ("COMPLETED", "FAILED")
ENDED = (
    *ENDED_BY_ITSELF,
    *("BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
)


class SlurmLauncher(QueuedLauncher):
    """Workers whose nodes and GPUs Slurm chooses."""

    program = "sbatch"
    noun = "Slurm job"

    def describe(self, placement: WorkerPlacement, port: object, token: Path) -> str:
        options = [
            *(f"--job-name={placement.name}", "--nodes=1", "--ntasks=1"),
            f"--cpus-per-task={placement.num_cores}",
            *([f"--gpus={placement.num_gpus}"] if placement.num_gpus else []),
            *self.settings.slurm_options(placement.role),
            *(f"--chdir={Path.cwd()}", f"--output={self.log(placement.name, '%j')}"),
            "--no-requeue",  # the pool submits it again
        ]
        directives = [f"#SBATCH {shlex.quote(option)}" for option in options]
        variables = [f"{k}={shlex.quote(v)}" for k, v in self.variables(placement).items()]
        commands = self.commands(placement, port, token)
        return "\n".join(["#!/bin/bash", *directives, f"export {' '.join(variables)}", commands])

    async def submit(self, placement: WorkerPlacement, port: int, token: Path) -> str:
        script = self.describe(placement, port, token)
        answer = await run_command(self.program, "--parsable", stdin=script)
        return answer.strip().partition(";")[0]

    async def list_jobs(self) -> dict[str, JobState]:
        return job_states(await run_command(*SQUEUE))

    async def cancel(self, job_id: str) -> None:
        await run_command("scancel", job_id)


def job_states(listed: str) -> dict[str, JobState]:
    """Return the states of jobs by number, from what `squeue` prints."""
    rows = [line.split(None, 3) for line in listed.splitlines()]
    return {number: _state(name, int(status), why.strip()) for number, name, status, why in rows}


def _state(name: str, wait_status: int, reason: str) -> JobState:
    if name not in ENDED:
        return JobState(is_waiting=name == "PENDING", reason=reason)
    if name not in ENDED_BY_ITSELF:
        return JobState(has_ended=True, reason=name)
    return JobState(has_ended=True, exit_code=os.waitstatus_to_exitcode(wait_status))
