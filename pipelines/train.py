"""A recipe in, a trained and registered policy out: assembles every part and runs the flow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from areal_flow.config import TINY_MODEL, Recipe
from areal_flow.controller.flow import Flow
from areal_flow.controller.flow_setup import FlowBackends, FlowConfig, InitialState
from areal_flow.controller.records import Provenance
from areal_flow.controller.schedules import run_async_schedule, run_barrier_schedule
from areal_flow.layout import RunLayout
from areal_flow.models.directory import (
    check_model_directory,
    copy_model_description,
    resolve_model,
)
from areal_flow.models.tiny import write_tiny_model
from areal_flow.prompts.prepare import Prepared, prepare_prompts
from areal_flow.prompts.table import PromptTable
from areal_flow.recovery.lease import Writer
from areal_flow.recovery.plan import PLAN_COLUMNS, plan_initial_state
from areal_flow.rewards.loading import load_verifier
from areal_flow.store.dataset import open_dataset
from areal_flow.store.evaluations import append_evaluation
from areal_flow.store.ledger import Ledger, create_ledger
from areal_flow.store.trajectories import TrajectoryCommitter, create_trajectories
from areal_flow.store.unconsumed import read_unconsumed
from areal_flow.tracking import MlflowTracker, NullTracker
from areal_flow.types import EngineStats, EvaluationTable
from areal_flow.weights.directory import DirectoryChannel
from pipelines.assembly import CommittedLedger, CommittedLog, RunObserver, make_tracker
from pipelines.beginning import begin_policy, commit_genesis, restore_policy
from pipelines.checkpointing import Checkpoints
from pipelines.cli.progress import Progress, make_progress
from pipelines.held_out import answer_held_out, tabulate
from pipelines.run_directory import read_state
from pipelines.stop_signals import StopSignals
from pipelines.succession import succeed
from pipelines.summary import Findings, print_summary, summarise, write_summary
from pipelines.workers import reachable

logger = logging.getLogger(__name__)

SCHEDULES = {"async": run_async_schedule, "sync": run_barrier_schedule}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How training ended."""

    finished: bool
    stopped_by: str = ""


def prepare_run(layout: RunLayout, recipe: Recipe) -> Prepared:
    """Write everything that a new run needs before its first process starts.

    Raises:
        ConfigError, PromptError, ModelError, RewardError: nothing was started.
    """
    load_verifier(recipe.rewards.verifier)
    check_cluster(recipe)
    if recipe.model == TINY_MODEL:
        write_tiny_model(layout.model, max_model_len=recipe.generation.max_model_len)
    else:
        source = resolve_model(recipe.model)
        check_model_directory(source)
        copy_model_description(source, layout.model)
    prepared = prepare_prompts(recipe, layout)
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
        succeed(layout, writer)
    tracker = make_tracker(recipe, layout)
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
                session = Session(layout, recipe, cluster, progress, tracker, signals, writer)
                with reachable(layout, cluster):
                    outcome = await cluster.pool.guard(session.run(resume=resume, began=began))
                status = "FINISHED" if outcome.finished else "KILLED"
    finally:
        progress.close()
        await asyncio.to_thread(tracker.close, None if writer.is_superseded else status)
    if outcome.finished:
        session.findings.model_version = tracker.model_version
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
        tracker: MlflowTracker | NullTracker,
        signals: StopSignals,
        writer: Writer,
    ) -> None:
        self.layout = layout
        self.recipe = recipe
        self.cluster = cluster
        self.client = client = cluster.client
        self.progress = progress
        self.tracker = tracker
        self.signals = signals
        self.writer = writer
        self.findings = Findings()
        epoch = writer.writer_epoch
        self.provenance = Provenance(epoch, recipe.digest(), f"areal-flow {__version__}")
        self.channel = DirectoryChannel(layout.weights_of(epoch))
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
            tracker=tracker,
            writer=writer,
        )

    async def run(self, *, resume: bool, began: float) -> Outcome:
        """Do everything from version 0, or from the ledger's head, to the last evaluation."""
        start, _ = await asyncio.gather(
            self._restore() if resume else self._begin(),
            self._on_generators(tasks.import_engine),
        )
        await self._on_generators(tasks.prepare_generator)
        self.findings.before = self._earlier_evaluation("before") or (
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
        self.findings.after = await self._evaluate("after", flow.policy_version)
        return Outcome(True)

    def _follow_generators(self, flow: Flow, num_generators: int) -> None:
        flow.set_max_running(max_running_trajectories(self.recipe, num_generators=num_generators))

    async def _begin(self) -> InitialState:
        self.progress.phase("Making the first policy")
        self.tracker.log_parameters(_flatten(self.recipe.model_dump(mode="json")))
        began = monotonic()
        begun = await begin_policy(self.replicas, self.recipe, self.progress)
        seconds = monotonic() - began
        await commit_genesis(self.ledger, self.channel, begun, self.provenance, seconds)
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
        )
        backends = FlowBackends(
            prompts=PromptTable(self.layout.train_prompts, seed=recipe.seed),
            rollouts=DaskRollouts(self.client, self.channel),
            log=self.log,
            ledger=self.committed_ledger,
            trainer=self.trainer,
            weights=DaskWeights(self.client, self.channel, self.cluster.pool),
            observer=RunObserver(
                progress=self.progress,
                tracker=self.tracker,
                checkpoints=self.checkpoints,
            ),
        )
        return Flow(config, backends, initial, self.provenance)

    async def _evaluate(self, name: str, version: int) -> EvaluationTable | None:
        if not self.recipe.prompts.num_held_out:
            return None
        table = PromptTable(self.layout.held_out_prompts, seed=self.recipe.seed)
        self.progress.phase(f"Evaluating version {version} on {len(table)} held-out prompts")
        rows = await answer_held_out(
            self.client, table.rows(), name=name, seed=self.recipe.seed, version=version
        )
        self.writer.check_current()
        await asyncio.to_thread(append_evaluation, self.layout.evaluations, rows)
        found = tabulate(rows)
        self.tracker.log_metrics(version, {"held_out/pass_rate": found.overall.pass_rate})
        return found

    def _model_reference(self) -> str:
        """Return what other commands call the model: its registered name, or the run's."""
        settings = self.recipe.tracking
        registered = self.tracker.model_version is not None and not settings.uri
        return f"models:/{settings.registered_model}@current" if registered else self.layout.name

    def _earlier_evaluation(self, name: str) -> EvaluationTable | None:
        if not self.layout.evaluations.is_dir():
            return None
        rows = open_dataset(self.layout.evaluations).to_table(filter=f"evaluation = '{name}'")
        return tabulate(rows.to_pylist()) if len(rows) else None

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
            self.findings,
            self.ledger.rows(),
            num_generators=self.recipe.cluster.num_generators,
            seconds_total=earlier + monotonic() - began,
        )
        self.writer.check_current()
        write_summary(self.layout, summary)
        print_summary(
            self.layout,
            summary,
            self.findings,
            model=self._model_reference(),
        )


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
