"""Trains and registers the policy of a recipe: assembles every part and runs the flow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from areal_flow import __version__
from areal_flow.cluster import tasks
from areal_flow.cluster.adapters import (
    DaskRollouts,
    DaskTrainer,
    DaskWeights,
)
from areal_flow.cluster.launch import RunningCluster, check_cluster, launch_cluster
from areal_flow.cluster.placement import max_running_trajectories, place_workers
from areal_flow.cluster.trainer_replicas import TrainerReplicas
from areal_flow.cluster.worker_context import RunPlugin
from areal_flow.config import Recipe
from areal_flow.controller.flow import Flow
from areal_flow.controller.flow_setup import FlowBackends, FlowConfig, InitialState
from areal_flow.controller.records import Provenance
from areal_flow.controller.schedules import run_async_schedule, run_barrier_schedule
from areal_flow.evaluation.held_out import answer_held_out
from areal_flow.evaluation.intervals import tabulate
from areal_flow.generation.registry import require_engine
from areal_flow.layout import RunLayout
from areal_flow.models.directory import (
    tokenizer_of,
)
from areal_flow.prompts.prepare import Prepared, prepare_prompts
from areal_flow.prompts.table import PromptTable
from areal_flow.recovery.bootstrap import commit_genesis, restore_policy
from areal_flow.recovery.checkpointing import Checkpoints
from areal_flow.recovery.lease import Writer
from areal_flow.recovery.plan import PLAN_COLUMNS, plan_initial_state
from areal_flow.recovery.run_directory import read_state
from areal_flow.recovery.takeover import take_over
from areal_flow.rewards.weighted import WeightedRewards
from areal_flow.store.committed import CommittedLedger, CommittedLog
from areal_flow.store.consumption import read_unconsumed
from areal_flow.store.evaluations import append_evaluation, read_evaluation
from areal_flow.store.ledger import Ledger, create_ledger
from areal_flow.store.trajectories import TrajectoryCommitter, create_trajectories
from areal_flow.tracking.background import RunTracking
from areal_flow.tracking.registry import start_tracking
from areal_flow.types import EngineStats, EvaluationTable
from areal_flow.weights.directory import DirectoryReader, DirectoryWriter
from areal_flow.workflows.registry import load_workflow
from pipelines.built_in import prepare_model, with_files
from pipelines.cli.progress import Progress, make_progress
from pipelines.sft import first_policy, prepare_sft
from pipelines.stop_signals import Outcome, StopSignals
from pipelines.summary import EvaluationPair, print_summary, summarise, write_summary
from pipelines.workers import reachable

logger = logging.getLogger(__name__)

SCHEDULES = {"async": run_async_schedule, "sync": run_barrier_schedule}


def prepare_run(layout: RunLayout, recipe: Recipe) -> Prepared:
    """Write everything that a new run needs before its first process starts.

    Raises:
        ConfigError, PromptError, ModelError, RewardError: nothing was started.
    """
    WeightedRewards(recipe.rewards, layout.rewards)
    load_workflow(recipe.workflow)
    require_engine(recipe.generation.engine)
    check_cluster(recipe)
    prepare_model(recipe, layout)
    recipe = with_files(recipe, layout)
    prepared = prepare_prompts(recipe, layout)
    prepare_sft(recipe, layout)
    create_trajectories(layout.trajectories)
    create_ledger(layout.steps)
    return prepared


async def run_training(
    layout: RunLayout, recipe: Recipe, *, writer: Writer, resume: bool, began: float
) -> Outcome:
    """Start the cluster, begin or restore the policy, train, evaluate, summarise.

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
    status = "FAILED"
    signals = StopSignals()
    try:
        with signals:
            async with launch_cluster(
                place_workers(recipe),
                recipe.cluster,
                RunPlugin(layout.root, writer.writer_epoch),
            ) as cluster:
                progress.phase(f"Dask dashboard: {cluster.dashboard}")
                session = Session(layout, recipe, cluster, progress, tracking, signals, writer)
                with reachable(layout, cluster):
                    outcome = await cluster.pool.guard(session.run(resume=resume, began=began))
                status = "FINISHED" if outcome.finished else "KILLED"
    finally:
        progress.close()
        await asyncio.to_thread(tracking.close, None if writer.is_superseded else status)
    if outcome.finished:
        session.evaluations.model_version = tracking.model_version
        session.summarise(began)
    return outcome


class Session:
    """One driver's work on a run, with the cluster up."""

    def __init__(
        self,
        layout: RunLayout,
        recipe: Recipe,
        cluster: RunningCluster,
        progress: Progress,
        tracking: RunTracking,
        signals: StopSignals,
        writer: Writer,
    ) -> None:
        self.layout = layout
        self.recipe = recipe
        self.cluster = cluster
        self.client = client = cluster.client
        self.progress = progress
        self.tracking = tracking
        self.signals = signals
        self.writer = writer
        self.evaluations = EvaluationPair()
        epoch = writer.writer_epoch
        self.provenance = Provenance(epoch, recipe.digest(), f"areal-flow {__version__}")
        self.weights = layout.weights_of(epoch)
        self.channel = DirectoryWriter(self.weights)
        self.rollouts = DaskRollouts(client, DirectoryReader(self.weights))
        self.ledger = Ledger(layout.steps, writer)
        self.committer = TrajectoryCommitter(layout.trajectories, writer)
        self.log = CommittedLog(self.committer)
        self.committed_ledger = CommittedLedger(self.ledger)
        self.replicas = TrainerReplicas(
            client,
            num_ranks=recipe.cluster.num_trainers,
            replace=cluster.pool.replace,
        )
        self.trainer = DaskTrainer(client, self.replicas, self._restore_trainer)
        self.checkpoints = Checkpoints(
            layout,
            recipe.trainer,
            ledger=self.ledger,
            trajectories=self.committer.maintenance,
            trainer=self.trainer,
            registry=tracking,
            writer=writer,
        )

    async def run(self, *, resume: bool, began: float) -> Outcome:
        """Do everything from version 0, or from the ledger's head, to the last evaluation."""
        begun = resume and self.ledger.head >= 0
        start, _ = await asyncio.gather(
            self._restore() if begun else self._begin(),
            self._on_generators(tasks.import_engine),
        )
        if start is None:
            return Outcome(False, self.signals.received[0])
        await self._on_generators(tasks.prepare_generator)
        self.evaluations.before = self._earlier_evaluation("before") or (
            await self._evaluate("before", 0) if start.policy_version == 0 else None
        )
        flow = self._flow(replace(start, engine_totals=await self._engine_totals()))
        self.signals.training(flow)
        self.cluster.pool.subscribe(partial(self._follow_generators, flow))
        with self._deadline(flow, began):
            try:
                await SCHEDULES[self.recipe.schedule](flow)
            finally:
                self.signals.training(None)
                await flow.close()
                await self.log.close()
                await self.committed_ledger.close()
                await self.checkpoints.settle()
        if flow.policy_version > start.policy_version:
            await self.checkpoints.complete()
        if self.signals.received:
            return Outcome(False, self.signals.received[0])
        self.evaluations.after = await self._evaluate("after", flow.policy_version)
        return Outcome(True)

    def _follow_generators(self, flow: Flow, num_generators: int) -> None:
        flow.set_max_running(max_running_trajectories(self.recipe, num_generators=num_generators))

    async def _begin(self) -> InitialState | None:
        self.progress.phase("Making the first policy")
        began = monotonic()
        source = await first_policy(
            self.replicas, self.layout, self.recipe, self.progress, self.signals
        )
        if source is None:
            return None
        begun = await self.replicas.lead(tasks.begin_from_directory, source)
        seconds = monotonic() - began
        commit_genesis(self.ledger, self.channel, begun, self.provenance, seconds)
        await self.checkpoints.complete()
        if self.recipe.cluster.num_trainers > 1:
            await self.trainer.restore()  # only the leader has version 0 so far
        return self._plan()

    async def _restore(self) -> InitialState:
        self.progress.phase("Restoring the policy from checkpoint and ledger")
        weights_hash = await self.trainer.restore()
        start = replace(self._plan(), weights_hash=weights_hash)
        self.progress.phase(
            f"Resuming at step {start.policy_version}: {len(start.waiting)} groups waiting, "
            f"{len(start.resubmit)} submitted again"
        )
        return start

    def _plan(self) -> InitialState:
        unconsumed, committed = read_unconsumed(
            self.layout.trajectories, self.layout.writers, self.ledger
        )
        return plan_initial_state(
            self.ledger.rows(PLAN_COLUMNS), unconsumed, committed, self.committer.head
        )

    async def _restore_trainer(self) -> str:
        restored = await restore_policy(
            self.replicas, self.layout, self.recipe, self.ledger, self.channel
        )
        self.progress.update(f"the trainer is restored: {restored.num_replayed} steps replayed")
        return restored.weights_hash

    async def _engine_totals(self) -> tuple[EngineStats, ...]:
        return tuple((await self._on_generators(tasks.engine_stats)).values())

    async def _on_generators(self, function: Callable[..., Any]) -> dict[str, Any]:
        results: dict[str, Any] = await self.client.run(
            function, workers=self.cluster.pool.generators(), on_error="ignore"
        )
        return results

    def _flow(self, initial: InitialState) -> Flow:
        recipe, controller = self.recipe, self.recipe.controller

        config = FlowConfig(
            batch_size=controller.batch_size,
            group_size=controller.group_size,
            max_staleness=controller.max_staleness,
            max_running=max_running_trajectories(
                recipe, num_generators=recipe.cluster.num_generators
            ),
            num_steps=recipe.num_steps,
            run_seed=recipe.seed,
            max_attempts=controller.max_attempts,
            max_consecutive_failures=controller.max_consecutive_failures,
            keeps_group=recipe.algorithm.keeps_group,
        )
        backends = FlowBackends(
            prompts=PromptTable(self.layout.train_prompts, seed=recipe.seed),
            rollouts=self.rollouts,
            log=self.log,
            ledger=self.committed_ledger,
            trainer=self.trainer,
            weights=DaskWeights(self.client, self.channel, self.cluster.pool),
            observer=self,
        )
        return Flow(config, backends, initial, self.provenance)

    async def _evaluate(self, name: str, version: int) -> EvaluationTable | None:
        if not self.recipe.prompts.num_held_out:
            return None
        table = PromptTable(self.layout.held_out_prompts, seed=self.recipe.seed)
        self.progress.phase(f"Evaluating version {version} on {len(table)} held-out prompts")
        rows = await answer_held_out(
            self.rollouts,
            table.rows(),
            name=name,
            seed=self.recipe.seed,
            writer_epoch=self.writer.writer_epoch,
            decode=tokenizer_of(self.layout.model).decode_batch,
        )
        await asyncio.to_thread(append_evaluation, self.layout.evaluations, rows, self.writer)
        self.tracking.wake()
        return tabulate(rows)

    async def on_step(self, row: dict[str, Any]) -> None:
        """Show a committed step, and have it tracked and checkpointed."""
        self.progress.step(row)
        self.tracking.wake()
        await self.checkpoints.after_step(row)

    def _model_reference(self) -> str:
        """Return what other commands call the model: its registered name, or the run's."""
        settings = self.recipe.tracking
        registered = self.tracking.model_version is not None and not settings.uri
        return f"models:/{settings.registered_model}@current" if registered else self.layout.name

    def _earlier_evaluation(self, name: str) -> EvaluationTable | None:
        rows = read_evaluation(self.layout.evaluations, self.layout.writers, name)
        return tabulate(rows) if rows else None

    @contextlib.contextmanager
    def _deadline(self, flow: Flow, began: float) -> Iterator[None]:
        if self.recipe.max_minutes is None:
            yield
            return
        left = self.recipe.max_minutes * 60 - (monotonic() - began)
        timer = asyncio.get_running_loop().call_later(max(0.0, left), flow.request_stop)
        try:
            yield
        finally:
            timer.cancel()

    def summarise(self, began: float) -> None:
        """Write and print the summary of the whole run, earlier drivers' lives included."""
        earlier = read_state(self.layout).seconds_driven
        summary = summarise(
            self.evaluations,
            self.ledger.rows(),
            num_generators=self.recipe.cluster.num_generators,
            seconds_total=earlier + monotonic() - began,
        )
        self.writer.check_current()
        write_summary(self.layout, summary)
        print_summary(
            self.layout,
            summary,
            self.evaluations,
            model=self._model_reference(),
        )
