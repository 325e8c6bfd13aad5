"""Training as stages in order: prepared, begun or restored, evaluated, trained, evaluated again.

What a stage computes is known to the parts that it assembles; this module knows their order.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from areal_flow.cluster import generator_tasks, trainer_tasks
from areal_flow.cluster.adapters import DaskRollouts, DaskTrainer, DaskWeights
from areal_flow.cluster.launch import RunningCluster, launch_cluster
from areal_flow.cluster.launchers.standby import StandbyWorkers
from areal_flow.cluster.placement import max_running_trajectories, place_workers
from areal_flow.cluster.trainer_replicas import TrainerReplicas
from areal_flow.cluster.worker_context import WorkerContext
from areal_flow.config import Recipe, dump_recipe
from areal_flow.controller.flow import Flow
from areal_flow.controller.flow_setup import FlowBackends, InitialState
from areal_flow.controller.records import Provenance, genesis_row
from areal_flow.controller.schedules import (
    run_async_schedule,
    run_barrier_schedule,
    run_until_first_ends,
)
from areal_flow.errors import ConfigError, RunError
from areal_flow.evaluation.answers import Answer, answer_held_out
from areal_flow.evaluation.pass_rates import tabulate
from areal_flow.evaluation.scores import EvaluationTable
from areal_flow.generation.context_length import with_context_length
from areal_flow.generation.registry import require_served
from areal_flow.models.auto_tokenizer import NUM_COMPARED, warn_of_other_tokens
from areal_flow.models.directory import texts_of, tokenizer_of
from areal_flow.prompts.prepare import check_first_rows, prepare_prompts
from areal_flow.prompts.rendering import why_chat_template
from areal_flow.prompts.table import PromptTable
from areal_flow.recovery.bootstrap import restore_policy, take_over
from areal_flow.recovery.checkpointing import Checkpoints
from areal_flow.recovery.checkpoints import list_checkpoints
from areal_flow.recovery.plan import PLAN_COLUMNS, plan_initial_state
from areal_flow.run.code_version import CODE_VERSION
from areal_flow.run.directory import read_state
from areal_flow.run.inputs import read_inputs, record_inputs
from areal_flow.run.layout import RunLayout
from areal_flow.run.lease import Writer
from areal_flow.store.committed import (
    CommittedLogs,
    append_evaluation,
    evaluation_names,
    read_evaluation,
    read_unconsumed,
)
from areal_flow.store.ledger import Ledger, create_ledger
from areal_flow.store.trajectories import TrajectoryCommitter, create_trajectories
from areal_flow.tracking.background import RunTracking
from areal_flow.tracking.registry import start_tracking
from areal_flow.trainer.supervised import OBJECTIVES
from areal_flow.weights.media import ChosenChannel
from areal_flow.weights.shared_memory import free_segments
from areal_flow.workflows.registry import load_workflow
from pipelines.console.progress import Progress, counted, make_progress
from pipelines.console.prompt_report import describe_prompts
from pipelines.console.tables import with_interval
from pipelines.jobs.built_in import (
    MODELS,
    changed,
    initial_model,
    prepare_model,
    reference_model,
    with_files,
)
from pipelines.jobs.periodic_evaluation import PeriodicEvaluations, is_flat, read_periodic
from pipelines.jobs.preflight import found_verifier
from pipelines.jobs.sft import check_first_sft_rows, first_policy, prepare_sft
from pipelines.jobs.stop_signals import Outcome, StopSignals
from pipelines.jobs.summary import print_summary, summarise
from pipelines.workers import reachable

SCHEDULES = {"async": run_async_schedule, "sync": run_barrier_schedule}


def prepare_run(layout: RunLayout, recipe: Recipe) -> str:
    """Write what a new run needs before its first process starts; return what to say of it.

    Raises:
        ConfigError, PromptError, ModelError, RewardError: nothing was started.
    """
    if recipe.sft.num_steps and OBJECTIVES[recipe.sft.objective].makes_reward_model:
        raise ConfigError(
            "sft.objective = 'reward_model' makes no policy to train: run `areal-flow "
            "reward-model` by itself, and set it to 'cross_entropy' or 'dpo'"
        )
    verifier = found_verifier(layout, recipe)
    load_workflow(recipe.workflow)
    check_first_rows(recipe)
    check_first_sft_rows(recipe)
    prepare_model(recipe, layout)
    recipe, length = with_context_length(recipe, layout.model)
    reference = reference_model(recipe, layout)
    require_served(recipe.generation, layout.model)
    given, recipe = recipe, with_files(recipe, layout)
    notes = [f"  {length}"] if length and recipe.model not in MODELS else []
    if why := why_chat_template(recipe):
        recipe, given = (changed(each, "prompts", chat_template=True) for each in (recipe, given))
        notes.append(f"  prompts.chat_template = true, since {why}")
    prepared = prepare_prompts(recipe, layout)
    if recipe.has_held_out and not prepared.num_held_out:
        given = changed(given, "prompts", num_held_out=0)
        notes.append("  No prompt is held out: there will be no evaluation")
    layout.config.write_text(dump_recipe(given))
    first = PromptTable(layout.train_prompts, seed=recipe.seed).rows(NUM_COMPARED)
    texts = [prompt.text for prompt in first]
    warn_of_other_tokens(initial_model(given, layout), layout.model, texts)
    prepare_sft(layout, recipe)
    record_inputs(
        layout,
        given,
        verifier=verifier,
        model=initial_model(given, layout),
        reference=reference,
    )
    create_trajectories(layout.trajectories)
    create_ledger(layout.steps)
    return describe_prompts(prepared, layout, notes)


async def run_training(
    layout: RunLayout,
    recipe: Recipe,
    *,
    writer: Writer,
    standby: StandbyWorkers | None = None,
    resume: bool,
    began: float,
) -> Outcome:
    """Start the cluster, go through the stages, and summarise a run that is finished.

    Args:
        writer: this driver's right to write the run.
        standby: processes that were started for its workers before.
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
        workers = place_workers(recipe)
        progress.phase(f"Starting {len(workers)} workers")
        with StopSignals() as signals:
            async with launch_cluster(workers, recipe.cluster, context, standby=standby) as cluster:
                progress.phase(f"Dask dashboard: {cluster.dashboard}")
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
        self.held_out: dict[str, EvaluationTable] = {}
        self.provenance = Provenance(
            writer.writer_epoch,
            recipe.digest(),
            CODE_VERSION,
            read_inputs(layout).verifier,
        )
        self.channel = ChosenChannel(layout.weights_of(writer.writer_epoch), recipe.weights_medium)
        self.rollouts = DaskRollouts(cluster.client, self.channel, cluster.pool)
        self.ledger = Ledger(layout.steps, writer)
        self.committer = TrajectoryCommitter(layout.trajectories, writer)
        self.logs = CommittedLogs(self.committer, self.ledger)
        self.replicas = TrainerReplicas(
            cluster.client, num_ranks=recipe.cluster.num_trainers, replace=cluster.pool.replace
        )
        self.trainer = DaskTrainer(
            self.replicas, self._restore_trainer, lost=cluster.pool.trainer_lost
        )
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
        """Do everything from version 0, or from the ledger's head, to the last evaluation.

        A driver that died before version 0 was in a checkpoint left it to be made again. A fork
        has that checkpoint before it has a ledger row.
        """
        head = self.ledger.head
        begun = head > 0 or (head == 0 and list_checkpoints(self.layout.checkpoints))
        start, _ = await asyncio.gather(
            self.restore() if resume and begun else self.begin(),
            self._import_beside(),
        )
        if start is None:
            return Outcome(False, self.signals.received[0])
        return await run_until_first_ends(self.go_on_from(start), self.trainer.keep_restored())

    async def go_on_from(self, start: InitialState) -> Outcome:
        """Train, and evaluate before and after; the trainer stands where the run begins."""
        await self._on_generators(generator_tasks.prepare_generator)
        if start.policy_version == 0 or self._answered("before", 0):
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
        if self.ledger.head < 0:
            self.ledger.append({**row, "seconds_train": monotonic() - began})
        elif (
            known := self.ledger.rows(["weights_hash"])[0]["weights_hash"]
        ) != hashes.weights_hash:
            raise RunError(
                f"expected version 0 with weights {known}, as the ledger has it, made "
                f"{hashes.weights_hash} of the same inputs: start a new run"
            )
        self.channel.publish(0)
        await self.checkpoints.complete()
        if self.recipe.cluster.num_trainers > 1:
            await self.trainer.restore()  # only the leader has version 0 so far
        return self._plan()

    async def _import_beside(self) -> None:
        """Have generators import their engine, then the sink its client; the trainer is first."""
        await self._on_generators(generator_tasks.import_engine)
        self.tracking.wake()

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
        self.progress.phase(
            f"Training from version {start.policy_version} to {self.recipe.num_steps}"
        )
        totals = await self._on_generators(generator_tasks.engine_stats)
        flow = self._flow(replace(start, engine_totals=tuple(totals.values())))
        self.evaluations = self._evaluations_beside(flow)
        self.cluster.pool.subscribe(
            lambda num_generators: flow.set_max_running(self._max_running(num_generators))
        )
        seconds_left = 60 * (self.recipe.max_minutes or inf) - (monotonic() - self.began)
        deadline = asyncio.get_running_loop().call_later(max(0, seconds_left), flow.request_stop)
        try:
            with self.signals.finishing_steps(flow.request_stop):
                self._stop_on_plateau(flow)
                self.evaluations.reached(start.policy_version)
                await SCHEDULES[self.recipe.schedule](flow)
            if not self.signals.received:
                await self.evaluations.settle()
        finally:
            deadline.cancel()
            await self.evaluations.cancel()
            await flow.close()
            await self.logs.close()
            await self.checkpoints.settle()
        if flow.policy_version > start.policy_version:
            await self.checkpoints.complete()
        return flow.policy_version

    async def evaluate(self, name: str, version: int) -> None:
        """Answer the held-out prompts, if there are any, with the version that is served."""
        if not self.recipe.has_held_out:
            return
        if rows := self._answered(name, version):
            if {row["verifier"] for row in rows} == {self.provenance.verifier}:
                self.held_out[name] = tabulate(rows, threshold=self.recipe.pass_threshold)
            return
        total = len(PromptTable(self.layout.held_out_prompts, seed=self.recipe.seed))
        self.progress.phase(f"Evaluating version {version} on {total} held-out prompts")
        await self._answer(name, counted(self.rollouts.answer, self.progress, total=total))

    async def _answer(self, name: str, answer: Answer) -> None:
        """Answer the held-out prompts and append the answers as an evaluation."""
        table = PromptTable(self.layout.held_out_prompts, seed=self.recipe.seed)
        tokenizer = await asyncio.to_thread(tokenizer_of, self.layout.model)
        rows = await answer_held_out(
            answer,
            await asyncio.to_thread(table.rows),
            settings=self.recipe.evaluation,
            name=name,
            seed=self.recipe.seed,
            writer_epoch=self.writer.writer_epoch,
            decode=partial(texts_of, tokenizer),
        )
        await asyncio.to_thread(append_evaluation, self.layout.evaluations, rows, self.writer)
        self.tracking.wake()
        threshold = self.recipe.pass_threshold
        self.held_out[name] = await asyncio.to_thread(tabulate, rows, threshold=threshold)

    def _answered(self, name: str, version: int) -> list[dict[str, Any]]:
        """Return the rows of an evaluation that an earlier driver made of this version."""
        rows = read_evaluation(self.layout.evaluations, self.layout.writers, name)
        return [row for row in rows if row["policy_version"] == version]

    def _evaluations_beside(self, flow: Flow) -> PeriodicEvaluations:
        """Return what evaluates while training goes on, after what earlier drivers evaluated."""
        layout, threshold = self.layout, self.recipe.pass_threshold
        verifier = self.provenance.verifier
        self.held_out |= read_periodic(layout, threshold=threshold, verifier=verifier)

        async def evaluate(name: str) -> None:
            await self._answer(name, self.rollouts.answer)
            found = self.held_out[name].overall
            rate, reward = (with_interval(found, what) for what in ("pass_rate", "reward_mean"))
            self.progress.phase(f"evaluation {name}: pass rate {rate}, mean reward {reward}")
            self._stop_on_plateau(flow)

        made = evaluation_names(layout.evaluations, layout.writers)
        return PeriodicEvaluations(evaluate, self.recipe, made=made)

    def _stop_on_plateau(self, flow: Flow) -> None:
        patience = self.recipe.evaluation.stop_after_plateau
        if is_flat(self.held_out, patience=patience) and not flow.stop_requested:
            self.progress.phase(f"No better pass rate in {patience} evaluations: training ends")
            flow.request_stop()

    def summarise(self) -> None:
        """Write and print the summary of the whole run, earlier drivers' lives included."""
        tracking, alias = self.recipe.tracking, self.tracking.alias
        summary = {
            **summarise(
                self.held_out,
                self.ledger.table(),
                num_generators=self.recipe.cluster.num_generators,
            ),
            "seconds_total": read_state(self.layout).seconds_driven + monotonic() - self.began,
            "model_version": self.tracking.model_version,
        }
        self.writer.check_current()
        self.layout.summary.write_text(json.dumps(summary, indent=2) + "\n")
        is_here = alias is not None and not tracking.uri
        model = f"models:/{tracking.registered_model}@{alias}" if is_here else self.layout.name
        print_summary(self.layout, summary, self.held_out, model=model)

    async def on_step(self, row: dict[str, Any]) -> None:
        """Show a committed step, and have it tracked and checkpointed."""
        self.progress.step(row)
        self.evaluations.reached(row["step"])
        self.tracking.wake()
        await self.checkpoints.after_step(row)

    def _plan(self) -> InitialState:
        unconsumed, committed = read_unconsumed(
            self.layout.trajectories,
            self.layout.writers,
            self.ledger,
            verifier=self.provenance.verifier,
        )
        return plan_initial_state(
            self.ledger.rows(PLAN_COLUMNS), unconsumed, committed, self.committer.watermark
        )

    async def _restore_trainer(self) -> str:
        weights_hash, num_replayed = await restore_policy(
            self.replicas,
            self.layout,
            self.recipe,
            self.ledger,
            self.channel,
            on_replayed=lambda done, total: self.progress.count("replayed", done, total),
        )
        self.progress.phase(f"The trainer is restored: {num_replayed} steps replayed")
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
            trainer_lock=self.trainer.lock,
        )
        return Flow(
            self.recipe,
            backends,
            initial,
            self.provenance,
            max_running=self._max_running(self.recipe.cluster.num_generators),
        )
