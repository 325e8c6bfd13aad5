"""Training as stages in order: prepared, begun or restored, evaluated, trained, evaluated again."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from areal_flow.cluster import generator_tasks
from areal_flow.cluster.autoscale import Autoscaler
from areal_flow.cluster.generators import DaskWeights, GpuTurns
from areal_flow.cluster.launch import RunningCluster, launch_cluster
from areal_flow.cluster.launchers.child import import_paths
from areal_flow.cluster.launchers.fork_server import ForkServer
from areal_flow.cluster.placement import place_workers
from areal_flow.cluster.rollouts import DaskRollouts
from areal_flow.cluster.trainer_replicas import DaskTrainer, TrainerReplicas
from areal_flow.cluster.usage import usage
from areal_flow.cluster.worker_context import WorkerContext
from areal_flow.config import Recipe
from areal_flow.core.code_version import CODE_VERSION
from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.flow.engine_gap import GapWatch
from areal_flow.flow.flow import Flow
from areal_flow.flow.flow_setup import FlowBackends, InitialState, max_running_trajectories
from areal_flow.flow.recovery.bootstrap import restore_policy, take_over
from areal_flow.flow.recovery.checkpointing import Checkpoints
from areal_flow.flow.recovery.plan import PLAN_COLUMNS, plan_initial_state
from areal_flow.flow.schedules import SCHEDULES, run_until_first_ends
from areal_flow.log.directory import read_state
from areal_flow.log.inputs import read_inputs
from areal_flow.log.ledger_row import Provenance, genesis_row
from areal_flow.log.run_log import RunLog
from areal_flow.policy.checkpoints import list_checkpoints
from areal_flow.policy.weights.shared_memory import ChosenChannel, free_segments
from areal_flow.rollout.prompts.table import PromptTable
from areal_flow.tracking.registry import RunTracking, start_tracking
from pipelines.cluster_address import dashboard_text, reachable
from pipelines.console.progress import Progress, make_progress
from pipelines.console.summary import print_summary, summarise
from pipelines.jobs.periodic_evaluation import HeldOutEvaluations
from pipelines.jobs.sft import first_policy
from pipelines.jobs.stop_signals import Outcome, StopSignals


async def run_training(
    layout: RunLayout,
    recipe: Recipe,
    *,
    writer: Writer,
    fork_server: ForkServer | None = None,
    resume: bool,
    began: float,
) -> Outcome:
    """Start the cluster, go through the stages, and summarise a run that is finished."""
    progress = make_progress(
        num_steps=recipe.num_steps, num_generators=recipe.cluster.num_generators
    )
    if resume:
        take_over(layout, writer)
    tracking = start_tracking(layout, recipe)
    context = WorkerContext(layout.root, writer.writer_epoch)
    status = "FAILED"
    try:
        workers = place_workers(recipe)
        progress.phase(f"Starting {len(workers)} workers")
        with StopSignals() as signals:
            async with launch_cluster(
                workers, recipe.cluster, context, fork_server=fork_server
            ) as cluster:
                progress.phase(dashboard_text(cluster.dashboard))
                run = Training(layout, recipe, writer, cluster, progress, tracking, signals, began)
                with reachable(layout, cluster):
                    outcome = await cluster.pool.guard(run.go_through_stages(resume=resume))
                status = "FINISHED" if outcome.finished else "KILLED"
    except asyncio.CancelledError:
        status = "KILLED"
        raise
    finally:
        progress.close()
        free_segments(layout.weights_of(writer.writer_epoch))
        await asyncio.to_thread(tracking.close, None if writer.is_superseded else status)
    if outcome.finished:
        run.summarise()
    return outcome


@dataclass
class Training:
    """One driver's work on a run, with the cluster up: a method a stage, in their order."""

    layout: RunLayout
    recipe: Recipe
    writer: Writer
    cluster: RunningCluster
    progress: Progress
    tracking: RunTracking
    signals: StopSignals
    began: float

    def __post_init__(self) -> None:
        layout, recipe, writer, cluster = self.layout, self.recipe, self.writer, self.cluster
        verifier, pool = read_inputs(layout).verifier, cluster.pool
        self.provenance = Provenance(writer.writer_epoch, recipe.digest(), CODE_VERSION, verifier)
        self.channel = ChosenChannel(layout.weights_of(writer.writer_epoch), recipe.weights_medium)
        self.rollouts = DaskRollouts(
            cluster.client, self.channel, pool, max_attempts=recipe.controller.max_attempts
        )
        self.weights = DaskWeights(cluster.client, self.channel, pool)
        self.held_out = HeldOutEvaluations(
            layout, recipe, writer, verifier, self.rollouts.answer, self.progress, self.tracking
        )
        self.log = RunLog(layout, writer)
        self.gap = GapWatch(partial(self.log.rows, ["metrics"]))
        paths = f"PYTHONPATH={os.pathsep.join(import_paths())}"
        program = (sys.executable, "-P", "-m", "pipelines.planning")
        command = ("env", paths, *program, str(layout.root))
        planner = command if recipe.cluster.autoscale_gpu else ()
        self.autoscaler = Autoscaler(pool, recipe.cluster.generator_range, planner=planner)
        self.replicas = TrainerReplicas(
            cluster.client, num_ranks=recipe.cluster.num_trainers, replace=pool.replace
        )
        turns = GpuTurns(cluster.client, pool, layout.processes_of(writer.writer_epoch))
        turn, lost = turns.of_trainer if recipe.takes_turns else nullcontext, pool.trainer_lost
        self.trainer = DaskTrainer(self.replicas, self._restore_trainer, lost=lost, turn=turn)
        self.checkpoints = Checkpoints(
            layout,
            recipe.trainer,
            log=self.log,
            trainer=self.trainer,
            registry=self.tracking,
            writer=writer,
        )

    async def go_through_stages(self, *, resume: bool) -> Outcome:
        """Do everything from version 0, or from the ledger's head, to the last evaluation.

        A driver that died before version 0 was in a checkpoint left it to be made again. A fork
        has that checkpoint before it has a ledger row.
        """
        head = self.log.head
        begun = head > 0 or (head == 0 and list_checkpoints(self.layout.checkpoints))
        start, _ = await asyncio.gather(
            self.restore() if resume and begun else self.begin(), self._import_beside()
        )
        if start is None:
            return Outcome(False, self.signals.received[0])
        return await run_until_first_ends(self.go_on_from(start), self.trainer.keep_restored())

    async def go_on_from(self, start: InitialState) -> Outcome:
        await self._on_generators(generator_tasks.prepare_generator)
        if start.policy_version == 0 or self.held_out.answered("before", 0):
            await self.held_out.evaluate("before", 0)
        version = await self.train(start)
        if self.signals.received:
            return Outcome(False, self.signals.received[0])
        await self.held_out.evaluate("after", version)
        return Outcome(True)

    async def begin(self) -> InitialState | None:
        """Make version 0, by supervised fine-tuning if the recipe asks for it; None if stopped."""
        self.progress.phase("Making the first policy")
        began = monotonic()
        source = await first_policy(
            self.replicas, self.layout, self.recipe, self.progress, self.signals
        )
        if source is None:
            return None
        hashes, environment = await self.replicas.begin(source)
        row = genesis_row(hashes, provenance=self.provenance, numeric_environment=environment)
        if self.log.head < 0:
            await self.log.append({**row, "seconds_train": monotonic() - began})
        else:
            recorded_hash = self.log.rows(["weights_hash"])[0]["weights_hash"]
            if recorded_hash != hashes.weights_hash:
                raise RunError(
                    f"expected version 0 with weights {recorded_hash}, as the ledger has it, made "
                    f"{hashes.weights_hash} of the same inputs: start a new run"
                )
        self.channel.publish(0)
        await self.checkpoints.complete()
        return self._plan()

    async def _import_beside(self) -> None:
        await self._on_generators(generator_tasks.import_engine)
        self.tracking.wake()

    async def restore(self) -> InitialState:
        self.progress.phase("Restoring the policy from checkpoint and ledger")
        await self.trainer.restore()
        start = self._plan()
        self.progress.phase(
            f"Resuming at step {start.policy_version}: {len(start.waiting)} groups waiting, "
            f"{len(start.resubmit)} submitted again"
        )
        return start

    async def train(self, start: InitialState) -> int:
        """Train until all steps are done, time is over or a signal came; return the version."""
        self.progress.phase(
            f"Training from version {start.policy_version} to {self.recipe.num_steps}"
        )
        totals = await self._on_generators(generator_tasks.engine_stats)
        flow = self._flow(replace(start, engine_totals=tuple(totals.values())))
        await self.cluster.show(flow, self.log)
        self.evaluations = self.held_out.beside_training(flow)
        self.cluster.pool.subscribe(lambda num: flow.set_max_running(self._max_running(num)))
        seconds_left = 60 * (self.recipe.max_minutes or inf) - (monotonic() - self.began)
        deadline = asyncio.get_running_loop().call_later(max(0, seconds_left), flow.request_stop)
        try:
            with self.signals.finishing_steps(flow.request_stop):
                self.held_out.stop_on_plateau(flow)
                self.evaluations.reached(start.policy_version)
                await SCHEDULES[self.recipe.schedule](flow)
            if not self.signals.received:
                await self.evaluations.settle()
            await self.checkpoints.settle()
        finally:
            deadline.cancel()
            await self.evaluations.cancel()
            await flow.close()
            await self.log.close()
            await self.checkpoints.cancel()
        if flow.policy_version > start.policy_version:
            await self.checkpoints.complete()
        return flow.policy_version

    def summarise(self) -> None:
        tracking, alias = self.recipe.tracking, self.tracking.alias
        num_generators = self.recipe.cluster.num_generators
        summary = {
            **summarise(self.held_out.tables, self.log.table(), num_generators=num_generators),
            "seconds_total": read_state(self.layout).seconds_driven + monotonic() - self.began,
            "model_version": self.tracking.model_version,
        }
        self.writer.check_current()
        self.layout.summary.write_text(json.dumps(summary, indent=2) + "\n")
        is_here = alias is not None and not tracking.uri
        model = f"models:/{tracking.registered_model}@{alias}" if is_here else self.layout.name
        print_summary(self.layout, summary, self.held_out.tables, model=model)

    async def on_step(self, row: dict[str, Any]) -> None:
        self.progress.step(row)
        self.gap.count(row)
        self.cluster.metrics.ledger.add(row)
        self.evaluations.reached(row["step"])
        self.tracking.wake()
        self.autoscaler.after_step(row)
        await self.checkpoints.after_step(row)

    def _plan(self) -> InitialState:
        unconsumed, committed = self.log.read_unconsumed(verifier=self.provenance.verifier)
        rows = self.log.rows(PLAN_COLUMNS)
        return plan_initial_state(rows, unconsumed, committed, self.log.watermark)

    async def _restore_trainer(self) -> str:
        hashes, num_replayed = await restore_policy(
            self.replicas,
            self.layout,
            self.recipe,
            self.log,
            self.channel,
            on_replayed=lambda done, total: self.progress.count("replayed", done, total),
        )
        self.progress.phase(f"The trainer is restored: {num_replayed} steps replayed")
        self.weights.note_restored(self.log.head, hashes.served_hash)
        return hashes.weights_hash

    async def _on_generators(self, function: Callable[..., Any]) -> dict[str, Any]:
        workers, run = self.cluster.pool.generators(), self.cluster.client.run
        return await run(function, workers=workers, on_error="ignore")  # type: ignore[no-any-return]

    def _max_running(self, num_generators: int) -> int:
        return max_running_trajectories(self.recipe, num_generators=num_generators)

    def _flow(self, initial: InitialState) -> Flow:
        backends = FlowBackends(
            rollouts=self.rollouts,
            logs=self.log,
            trainer=self.trainer,
            weights=self.weights,
            prompt_at=PromptTable(self.layout.train_prompts, seed=self.recipe.seed).prompt_at,
            on_step=self.on_step,
            usage=partial(usage, self.cluster.pool),
        )
        return Flow(
            self.recipe,
            backends,
            initial,
            self.provenance,
            max_running=self._max_running(self.recipe.cluster.num_generators),
        )
