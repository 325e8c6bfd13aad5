"""Training as stages in order: prepared, begun or restored, evaluated, trained, evaluated again.

What a stage computes is known to the parts that it assembles; this module knows their order.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from time import monotonic
from typing import Any

from areal_flow import __version__
from areal_flow.cluster import generator_tasks, trainer_tasks
from areal_flow.cluster.adapters import DaskRollouts, DaskTrainer, DaskWeights
from areal_flow.cluster.launch import RunningCluster, launch_cluster
from areal_flow.cluster.placement import max_running_trajectories, place_workers
from areal_flow.cluster.trainer_replicas import TrainerReplicas
from areal_flow.cluster.worker_context import WorkerContext
from areal_flow.config import Recipe
from areal_flow.controller.flow import Flow
from areal_flow.controller.flow_setup import FlowBackends, InitialState
from areal_flow.controller.records import Provenance, genesis_row
from areal_flow.controller.schedules import run_async_schedule, run_barrier_schedule
from areal_flow.evaluation import answer_held_out, tabulate
from areal_flow.generation.registry import require_engine
from areal_flow.layout import RunLayout
from areal_flow.models.directory import tokenizer_of
from areal_flow.prompts.prepare import prepare_prompts
from areal_flow.prompts.table import PromptTable
from areal_flow.recovery.bootstrap import restore_policy, take_over
from areal_flow.recovery.checkpointing import Checkpoints
from areal_flow.recovery.lease import Writer
from areal_flow.recovery.plan import PLAN_COLUMNS, plan_initial_state
from areal_flow.recovery.run_directory import read_state
from areal_flow.rewards.registry import WeightedRewards
from areal_flow.store.committed import (
    CommittedLogs,
    append_evaluation,
    read_evaluation,
    read_unconsumed,
)
from areal_flow.store.ledger import Ledger, create_ledger
from areal_flow.store.trajectories import TrajectoryCommitter, create_trajectories
from areal_flow.tracking.background import RunTracking
from areal_flow.tracking.registry import start_tracking
from areal_flow.types import EvaluationTable
from areal_flow.weights.directory import DirectoryReader, DirectoryWriter
from areal_flow.workflows.registry import load_workflow
from pipelines.built_in import prepare_model, with_files
from pipelines.cli.progress import Progress, make_progress
from pipelines.sft import first_policy, prepare_sft
from pipelines.stop_signals import Outcome, StopSignals
from pipelines.summary import print_summary, summarise
from pipelines.workers import reachable

SCHEDULES = {"async": run_async_schedule, "sync": run_barrier_schedule}


def prepare_run(layout: RunLayout, recipe: Recipe) -> str:
    """Write what a new run needs before its first process starts; return what to say of it.

    Raises:
        ConfigError, PromptError, ModelError, RewardError: nothing was started.
    """
    WeightedRewards(recipe.rewards, layout.rewards)
    load_workflow(recipe.workflow)
    require_engine(recipe.generation.engine)
    prepare_model(recipe, layout)
    recipe = with_files(recipe, layout)
    prepared = prepare_prompts(recipe, layout)
    prepare_sft(layout, recipe)
    create_trajectories(layout.trajectories)
    create_ledger(layout.steps)
    found = f"{prepared.num_train} prompts to train on, {prepared.num_held_out} held out"
    if not prepared.bad_rows:
        return found
    listed = f"{len(prepared.bad_rows)} bad rows skipped, listed in {layout.bad_rows}:"
    return "\n  ".join([found, listed, *prepared.bad_rows[:5]])


async def run_training(
    layout: RunLayout, recipe: Recipe, *, writer: Writer, resume: bool, began: float
) -> Outcome:
    """Start the cluster, go through the stages, and summarise a run that is finished.

    Args:
        writer: this driver's right to write the run.
        resume: whether the run has a past.
        began: `monotonic()` when the program began, for the summary and `max_minutes`.
    """
    progress = make_progress(
        num_steps=recipe.num_steps, num_generators=recipe.cluster.num_generators
    )
    if resume:
        take_over(layout, writer)
    tracking = start_tracking(layout, recipe)
    context = WorkerContext(layout.root, writer.writer_epoch)
    status = "FAILED"
    try:
        with StopSignals() as signals:
            async with launch_cluster(place_workers(recipe), recipe.cluster, context) as cluster:
                progress.phase(f"Dask dashboard: {cluster.dashboard}")
                run = Training(layout, recipe, writer, cluster, progress, tracking, signals, began)
                with reachable(layout, cluster):
                    outcome = await cluster.pool.guard(run.go_through_stages(resume=resume))
                status = "FINISHED" if outcome.finished else "KILLED"
    finally:
        progress.close()
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
        weights = layout.weights_of(writer.writer_epoch)
        self.held_out: dict[str, EvaluationTable] = {}
        self.provenance = Provenance(
            writer.writer_epoch, recipe.digest(), f"areal-flow {__version__}"
        )
        self.channel = DirectoryWriter(weights)
        self.rollouts = DaskRollouts(cluster.client, DirectoryReader(weights))
        self.ledger = Ledger(layout.steps, writer)
        self.committer = TrajectoryCommitter(layout.trajectories, writer)
        self.logs = CommittedLogs(self.committer, self.ledger)
        self.replicas = TrainerReplicas(
            cluster.client, num_ranks=recipe.cluster.num_trainers, replace=cluster.pool.replace
        )
        self.trainer = DaskTrainer(self.replicas, self._restore_trainer)
        self.checkpoints = Checkpoints(
            layout,
            recipe.trainer,
            ledger=self.ledger,
            trajectories=self.committer.maintenance,
            trainer=self.trainer,
            registry=self.tracking,
            writer=writer,
        )

    async def go_through_stages(self, *, resume: bool) -> Outcome:
        """Do everything from version 0, or from the ledger's head, to the last evaluation."""
        begun = resume and self.ledger.head >= 0
        start, _ = await asyncio.gather(
            self.restore() if begun else self.begin(),
            self._on_generators(generator_tasks.import_engine),
        )
        if start is None:
            return Outcome(False, self.signals.received[0])
        await self._on_generators(generator_tasks.prepare_generator)
        if rows := read_evaluation(self.layout.evaluations, self.layout.writers, "before"):
            self.held_out["before"] = tabulate(rows)
        elif start.policy_version == 0:
            await self.evaluate("before", 0)
        version = await self.train(start)
        if self.signals.received:
            return Outcome(False, self.signals.received[0])
        await self.evaluate("after", version)
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
        hashes, environment = await self.replicas.lead(trainer_tasks.begin_from_directory, source)
        row = genesis_row(hashes, provenance=self.provenance, numeric_environment=environment)
        self.ledger.append({**row, "seconds_train": monotonic() - began})
        self.channel.publish(0)
        await self.checkpoints.complete()
        if self.recipe.cluster.num_trainers > 1:
            await self.trainer.restore()  # only the leader has version 0 so far
        return self._plan()

    async def restore(self) -> InitialState:
        """Bring the trainer to the ledger's head, and find what is to be done again."""
        self.progress.phase("Restoring the policy from checkpoint and ledger")
        weights_hash = await self.trainer.restore()
        start = replace(self._plan(), weights_hash=weights_hash)
        self.progress.phase(
            f"Resuming at step {start.policy_version}: {len(start.waiting)} groups waiting, "
            f"{len(start.resubmit)} submitted again"
        )
        return start

    async def train(self, start: InitialState) -> int:
        """Train until all steps are done, time is over or a signal came; return the version."""
        totals = await self._on_generators(generator_tasks.engine_stats)
        flow = self._flow(replace(start, engine_totals=tuple(totals.values())))
        self.cluster.pool.subscribe(
            lambda num_generators: flow.set_max_running(self._max_running(num_generators))
        )
        seconds_left = 60 * (self.recipe.max_minutes or inf) - (monotonic() - self.began)
        deadline = asyncio.get_running_loop().call_later(max(0, seconds_left), flow.request_stop)
        try:
            with self.signals.finishing_steps(flow.request_stop):
                await SCHEDULES[self.recipe.schedule](flow)
        finally:
            deadline.cancel()
            await flow.close()
            await self.logs.close()
            await self.checkpoints.settle()
        if flow.policy_version > start.policy_version:
            await self.checkpoints.complete()
        return flow.policy_version

    async def evaluate(self, name: str, version: int) -> None:
        """Answer the held-out prompts, if there are any, with the version that is served."""
        if not self.recipe.prompts.num_held_out:
            return
        table = PromptTable(self.layout.held_out_prompts, seed=self.recipe.seed)
        self.progress.phase(f"Evaluating version {version} on {len(table)} held-out prompts")
        rows = await answer_held_out(
            self.rollouts.answer,
            table.rows(),
            name=name,
            seed=self.recipe.seed,
            writer_epoch=self.writer.writer_epoch,
            decode=tokenizer_of(self.layout.model).decode_batch,
        )
        await asyncio.to_thread(append_evaluation, self.layout.evaluations, rows, self.writer)
        self.tracking.wake()
        self.held_out[name] = tabulate(rows)

    def summarise(self) -> None:
        """Write and print the summary of the whole run, earlier drivers' lives included."""
        tracking, version = self.recipe.tracking, self.tracking.model_version
        summary = {
            **summarise(
                self.held_out,
                self.ledger.table(),
                num_generators=self.recipe.cluster.num_generators,
            ),
            "seconds_total": read_state(self.layout).seconds_driven + monotonic() - self.began,
            "model_version": version,
        }
        self.writer.check_current()
        self.layout.summary.write_text(json.dumps(summary, indent=2) + "\n")
        is_here = version is not None and not tracking.uri
        model = f"models:/{tracking.registered_model}@current" if is_here else self.layout.name
        print_summary(self.layout, summary, self.held_out, model=model)

    async def on_step(self, row: dict[str, Any]) -> None:
        """Show a committed step, and have it tracked and checkpointed."""
        self.progress.step(row)
        self.tracking.wake()
        await self.checkpoints.after_step(row)

    def _plan(self) -> InitialState:
        unconsumed, committed = read_unconsumed(
            self.layout.trajectories, self.layout.writers, self.ledger
        )
        return plan_initial_state(
            self.ledger.rows(PLAN_COLUMNS), unconsumed, committed, self.committer.head
        )

    async def _restore_trainer(self) -> str:
        weights_hash, num_replayed = await restore_policy(
            self.replicas, self.layout, self.recipe, self.ledger, self.channel
        )
        self.progress.update(f"the trainer is restored: {num_replayed} steps replayed")
        return weights_hash

    async def _on_generators(self, function: Callable[..., Any]) -> dict[str, Any]:
        results: dict[str, Any] = await self.cluster.client.run(
            function, workers=self.cluster.pool.generators(), on_error="ignore"
        )
        return results

    def _max_running(self, num_generators: int) -> int:
        return max_running_trajectories(self.recipe, num_generators=num_generators)

    def _flow(self, initial: InitialState) -> Flow:
        backends = FlowBackends(
            rollouts=self.rollouts,
            logs=self.logs,
            trainer=self.trainer,
            weights=DaskWeights(self.cluster.client, self.channel, self.cluster.pool),
            prompt_at=PromptTable(self.layout.train_prompts, seed=self.recipe.seed).prompt_at,
            on_step=self.on_step,
        )
        return Flow(
            self.recipe,
            backends,
            initial,
            self.provenance,
            max_running=self._max_running(self.recipe.cluster.num_generators),
        )
