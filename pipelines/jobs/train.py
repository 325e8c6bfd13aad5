"""A training run, from the start of its workers to its summary; the stages are in `run_stages`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import inf
from time import monotonic
from typing import Any

import numpy as np

from areal_flow.cluster import generator_tasks
from areal_flow.cluster.control import PoolSnapshot
from areal_flow.cluster.generators import DaskWeights, GpuTurns
from areal_flow.cluster.launch import RunningCluster, launch_cluster
from areal_flow.cluster.launchers.child import import_paths
from areal_flow.cluster.launchers.fork_server import ForkServer
from areal_flow.cluster.placement import place_workers
from areal_flow.cluster.pool import Autoscaler, WorkerPool
from areal_flow.cluster.rollouts import DaskRollouts
from areal_flow.cluster.trainer_replicas import DaskTrainer, TrainerReplicas
from areal_flow.cluster.worker import WorkerContext
from areal_flow.config import Recipe
from areal_flow.core.errors import EngineError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.program import CODE_VERSION
from areal_flow.flow.diagnosis import REMEMBERED_STEPS, GapWatch, StalenessWatch
from areal_flow.flow.flow import Flow
from areal_flow.flow.flow_setup import FlowBackends, InitialState, max_running_trajectories
from areal_flow.flow.recovery.checkpointing import Checkpoints
from areal_flow.flow.recovery.plan import PLAN_COLUMNS, plan_initial_state
from areal_flow.flow.recovery.restore import restore_policy
from areal_flow.flow.schedules import run_until_first_ends, schedule_of
from areal_flow.log.directory import read_state
from areal_flow.log.inputs import read_inputs
from areal_flow.log.ledger import LedgerTail
from areal_flow.log.ledger_row import Provenance, genesis_row
from areal_flow.log.run_log import RunLog, take_over
from areal_flow.policy.checkpoints import list_checkpoints
from areal_flow.policy.weights.shared_memory import ChosenChannel, free_segments
from areal_flow.rollout.prompts.table import PromptTable
from areal_flow.tracking.registry import RunTracking, start_tracking
from pipelines.cluster_address import dashboard_text, reachable
from pipelines.console.progress import Progress, make_progress
from pipelines.console.summary import SUMMARY_COLUMNS, print_summary, summarise
from pipelines.jobs.periodic_evaluation import HeldOutEvaluations
from pipelines.jobs.sft import first_policy
from pipelines.jobs.stop_signals import Outcome, StopSignals

logger = logging.getLogger(__name__)

OnStep = Callable[[dict[str, Any]], object]
"""Takes the row of a committed step, with its metrics as columns, as in `Run.steps`."""


async def run_training(
    layout: RunLayout,
    recipe: Recipe,
    *,
    writer: Writer,
    fork_server: ForkServer | None = None,
    resume: bool,
    began: float,
    on_step: OnStep | None = None,
) -> Outcome:
    """Start a prepared run's workers, run all stages on them, and summarise a finished run."""
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
                run = Training(
                    *(layout, recipe, writer, cluster, progress, tracking, signals, began),
                    callback=StepCallback(on_step),
                )
                with reachable(layout, cluster):
                    try:
                        outcome = await cluster.pool.guard(run_stages(run, resume=resume))
                    except EngineError as error:
                        if not signals.received:
                            raise
                        # Who ends a job of Slurm ends its workers, too: no step can be finished.
                        logger.warning("stopped without finishing the step: %s", error)
                        outcome = Outcome(False, signals.received[0])
                status = "FINISHED" if outcome.finished else "KILLED"
    except asyncio.CancelledError:
        status = "KILLED"
        raise
    finally:
        progress.close()
        free_segments(layout.weights_of(writer.writer_epoch))
        await asyncio.to_thread(tracking.close, None if writer.is_superseded else status)
    if outcome.finished:
        write_summary(run)
    return outcome


async def run_stages(run: Training, *, resume: bool) -> Outcome:
    """Make or restore the policy, evaluate it, train it, and evaluate it again."""
    # A driver that died before version 0 was in a checkpoint left it to be made again. A fork has
    # that checkpoint before it has a ledger row.
    head = run.log.head
    has_policy = head > 0 or (head == 0 and list_checkpoints(run.layout.checkpoints))
    start, _ = await asyncio.gather(
        restore(run) if resume and has_policy else make_version_0(run), import_engine(run)
    )
    if start is None:
        return Outcome(False, run.signals.received[0])

    async def evaluate_and_train() -> Outcome:
        await run.on_generators(generator_tasks.prepare_generator)
        if start.policy_version == 0 or run.held_out.answered("before", 0):
            await run.held_out.evaluate("before", 0)
        version = await train(run, start)
        if run.signals.received:
            return Outcome(False, run.signals.received[0])
        await run.held_out.evaluate("after", version)
        return Outcome(True)

    return await run_until_first_ends(evaluate_and_train(), run.trainer.keep_restored())


async def make_version_0(run: Training) -> InitialState | None:
    """Make version 0, with supervised fine-tuning if the recipe has it; return None if stopped."""
    run.progress.phase("Making the first policy")
    began = monotonic()
    source = await first_policy(run.replicas, run.layout, run.recipe, run.progress, run.signals)
    if source is None:
        return None
    hashes, environment = await run.replicas.begin(source)
    row = genesis_row(hashes, provenance=run.provenance, numeric_environment=environment)
    if run.log.head < 0:
        await run.log.append({**row, "train_s": monotonic() - began})
    else:
        recorded_hash = run.log.rows(["weights_hash"])[0]["weights_hash"]
        if recorded_hash != hashes.weights_hash:
            raise RunError(
                f"expected version 0 with weights {recorded_hash}, as the ledger has it, made "
                f"{hashes.weights_hash} of the same inputs: start a new run"
            )
    run.channel.publish(0)
    await run.checkpoints.complete()
    return initial_state(run)


async def restore(run: Training) -> InitialState:
    run.progress.phase("Restoring the policy from checkpoint and ledger")
    await run.trainer.restore()
    start = initial_state(run)
    run.progress.phase(
        f"Resuming at step {start.policy_version}: {len(start.waiting)} groups waiting, "
        f"{len(start.resubmit)} submitted again"
    )
    return start


def initial_state(run: Training) -> InitialState:
    """Plan the rest of the run from the ledger and from trajectories that no step consumed."""
    unconsumed, committed = run.log.read_unconsumed(verifier=run.provenance.verifier)
    past, log = run.log.past, run.log
    rows = log.rows(PLAN_COLUMNS, since=max(0, past.step))
    return plan_initial_state(past, rows, unconsumed, committed, log.watermark)


async def import_engine(run: Training) -> None:
    """Have generators import their engine while the policy is made, and start tracking."""
    await run.on_generators(generator_tasks.import_engine)
    run.tracking.wake()


async def train(run: Training, start: InitialState) -> int:
    """Train until all steps are done, time is up or a signal came; return the version."""
    layout, recipe, log, pool = run.layout, run.recipe, run.log, run.cluster.pool
    run.progress.phase(
        f"Training from version {start.policy_version} to {recipe.num_steps}{late_generators(pool)}"
    )
    recent = LedgerTail(layout, ["metrics"], since=1, newest=REMEMBERED_STEPS)
    gap, staleness = GapWatch(lambda: chain.from_iterable(recent.batches())), StalenessWatch()
    planner = planner_command(layout) if recipe.cluster.autoscale_gpu else ()
    autoscaler = Autoscaler(pool, recipe.cluster.generator_range, planner=planner)

    async def on_step(row: dict[str, Any]) -> None:
        run.progress.step(row)
        gap.count(row)
        staleness.count(row)
        run.cluster.metrics.ledger.add(row)
        evaluations.reached(row["step"])
        run.tracking.wake()
        autoscaler.after_step(row)
        await run.checkpoints.after_step(row)
        if await run.callback.wants_stop(row):
            flow.request_stop()

    totals = await run.on_generators(generator_tasks.engine_stats)
    flow = Flow(
        recipe,
        FlowBackends(
            rollouts=run.rollouts,
            logs=log,
            trainer=run.trainer,
            weights=run.weights,
            prompt_at=PromptTable(layout.train_prompts, seed=recipe.seed).prompt_at,
            on_step=on_step,
            usage=lambda: PoolSnapshot.of(pool).usage(),
        ),
        replace(start, engine_totals=tuple(totals.values())),
        run.provenance,
        max_running=max_running_trajectories(recipe, num_generators=recipe.cluster.num_generators),
    )
    await run.cluster.show(flow)
    evaluations = run.held_out.beside_training(flow)
    pool.subscribe(
        lambda num: flow.set_max_running(max_running_trajectories(recipe, num_generators=num))
    )
    remaining_s = 60 * (recipe.max_minutes or inf) - (monotonic() - run.began)
    deadline = asyncio.get_running_loop().call_later(max(0, remaining_s), flow.request_stop)
    try:
        with run.signals.finishing_steps(flow.request_stop):
            run.held_out.stop_on_plateau(flow)
            evaluations.reached(start.policy_version)
            await schedule_of(recipe)(flow)
        if not run.signals.received:
            await evaluations.settle()
        await run.checkpoints.settle()
    finally:
        run.callback.report_failures()
        deadline.cancel()
        await evaluations.cancel()
        await flow.close()
        await log.close()
        await run.checkpoints.cancel()
    if flow.policy_version > start.policy_version:
        await run.checkpoints.complete()
    return flow.policy_version


def late_generators(pool: WorkerPool) -> str:
    """Return in words which generators will join later; empty if none will."""
    num_joined, num_expected = len(pool.generators()), len(pool.registry.expected("generator"))
    if num_joined == num_expected:
        return ""
    return f" with {num_joined} of {num_expected} generators; the others join when they start"


def write_summary(run: Training) -> None:
    layout, tracking, alias = run.layout, run.recipe.tracking, run.tracking.alias
    num_generators = run.recipe.cluster.num_generators
    summary = {
        **summarise(
            run.held_out.tables, run.log.table(SUMMARY_COLUMNS), num_generators=num_generators
        ),
        "total_s": read_state(layout).driven_s + monotonic() - run.began,
        "model_version": run.tracking.model_version,
    }
    run.writer.check_current()
    layout.summary.write_text(json.dumps(summary, indent=2) + "\n")
    is_here = alias is not None and not tracking.uri
    model = f"models:/{tracking.registered_model}@{alias}" if is_here else layout.name
    print_summary(layout, summary, run.held_out.tables, model=model)


class StepCallback:
    """Calls a user's function after each step, in a thread, so that generation goes on meanwhile.

    An error in it, as in a plot, must not end a run of hours: the first is logged, all are counted.
    """

    def __init__(self, function: OnStep | None) -> None:
        self._function = function
        self._num_calls = self._num_failures = 0

    async def wants_stop(self, row: Mapping[str, Any]) -> bool:
        """Call the function with a step's row; return whether it returned True."""
        return self._function is not None and await asyncio.to_thread(self._call, row)

    def _call(self, row: Mapping[str, Any]) -> bool:
        assert self._function is not None
        self._num_calls += 1
        columns = {name: value for name, value in row.items() if name != "metrics"}
        try:
            returned = self._function({**columns, **row["metrics"]})
        except Exception:
            self._num_failures += 1
            if self._num_failures == 1:
                logger.exception("on_step failed after step %d; the run goes on", row["step"])
            return False
        return isinstance(returned, bool | np.bool_) and bool(returned)

    def report_failures(self) -> None:
        if self._num_failures > 1:
            logger.warning(
                "on_step failed after %d of %d steps", self._num_failures, self._num_calls
            )


@dataclass
class Training:
    """The parts of a run while its workers are up."""

    layout: RunLayout
    recipe: Recipe
    writer: Writer
    cluster: RunningCluster
    progress: Progress
    tracking: RunTracking
    signals: StopSignals
    began: float
    callback: StepCallback

    def __post_init__(self) -> None:
        layout, recipe, writer = self.layout, self.recipe, self.writer
        client, pool = self.cluster.client, self.cluster.pool
        verifier = read_inputs(layout).verifier
        self.provenance = Provenance(writer.writer_epoch, recipe.digest(), CODE_VERSION, verifier)
        self.log = RunLog(layout, writer, keep_tokens_of=recipe.log.keep_tokens_of)
        self.channel = ChosenChannel(layout.weights_of(writer.writer_epoch), recipe.weights_medium)
        self.rollouts = DaskRollouts(
            client, self.channel, pool, max_attempts=recipe.controller.max_attempts
        )
        self.weights = DaskWeights(self.channel, pool)
        self.held_out = HeldOutEvaluations(
            layout, recipe, writer, verifier, self.rollouts.answer, self.progress, self.tracking
        )
        self.replicas = TrainerReplicas(
            client, num_ranks=recipe.cluster.num_trainers, replace=pool.replace
        )
        turns = GpuTurns(pool, layout.processes_of(writer.writer_epoch))
        self.trainer = DaskTrainer(
            self.replicas,
            partial(restore_trainer, self),
            lost=pool.trainer_lost,
            turn=turns.of_trainer if recipe.takes_turns else nullcontext,
        )
        self.checkpoints = Checkpoints(
            layout,
            recipe.trainer,
            log=self.log,
            trainer=self.trainer,
            registry=self.tracking,
            writer=writer,
        )

    async def on_generators(self, function: Callable[..., Any]) -> dict[str, Any]:
        workers, run = self.cluster.pool.generators(), self.cluster.client.run
        return await run(function, workers=workers, on_error="ignore")  # type: ignore[no-any-return]


async def restore_trainer(run: Training) -> str:
    """Restore the ledger's head on the trainer ranks; return the hash of their weights."""
    hashes, num_replayed = await restore_policy(
        run.replicas,
        run.layout,
        run.recipe,
        run.log,
        run.channel,
        on_replayed=lambda done, total: run.progress.count("replayed", done, total),
    )
    run.progress.phase(f"The trainer is restored: {num_replayed} steps replayed")
    run.weights.note_restored(run.log.head, hashes.served_hash)
    return hashes.weights_hash


def planner_command(layout: RunLayout) -> tuple[str, ...]:
    """Return the command of a planner, in a process of its own: it needs torch."""
    paths = f"PYTHONPATH={os.pathsep.join(import_paths())}"
    return ("env", paths, sys.executable, "-P", "-m", "pipelines.planning", str(layout.root))
