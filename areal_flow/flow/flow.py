"""The state of a run and its stages, one method each; `schedules` decides when each is called.

    prompts -> submit -> [rollout, score, write] -> commit -> buffer -> train -> publish -> release

| who                | waits for                          | unblocked by                   |
|--------------------|------------------------------------|--------------------------------|
| admission          | room at the gate                   | rollout, release, discard      |
| an episode         | its generator, verifier and writer | the worker that runs it        |
| commit             | a written group                    | an episode                     |
| training           | `groups_per_step` complete groups  | commit                         |
|                    | a trainer that is being restored   | the end of that                |
| reading ahead      | as many, while a step runs         | commit                         |
| release of slots   | generators serving the new weights | publish; a dead one is dropped |

The flow moves ids, counts and versions. It imports no Dask, Lance or torch, and handles no tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from areal_flow.config import Recipe
from areal_flow.core.errors import (
    ArealFlowError,
    EngineError,
    EpisodeError,
    RewardError,
    SchemaError,
    WeightsError,
)
from areal_flow.core.failures import SkippedSteps
from areal_flow.core.types import Episode, GroupReceipt, StepRequest, StepResult
from areal_flow.flow.buffer import Batch, Buffer
from areal_flow.flow.flow_setup import FlowBackends, InitialState, RetryBudget
from areal_flow.flow.gate import Gate
from areal_flow.log.ledger_row import Provenance, batch_digest, group_seeds, step_row

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 0.5
"""Before the second attempt at a group; each further attempt waits that much longer."""


class Flow:
    """The state of a run and its stages. One event loop, no threads."""

    def __init__(
        self,
        recipe: Recipe,
        backends: FlowBackends,
        initial: InitialState,
        provenance: Provenance,
        *,
        max_running: int,
    ) -> None:
        self.recipe = recipe
        self.backends = backends
        self.provenance = provenance
        self.gate = Gate(recipe.controller, max_running=max_running)
        self.buffer = Buffer(recipe)
        self.accounting = initial.accounting
        self.watermark = initial.watermark
        self.policy_version = initial.policy_version
        self.parent_hash = initial.weights_hash
        self.num_changes = 0
        self._next_change = asyncio.Event()
        self._fatal: ArealFlowError | None = None
        self.stop_requested = False
        self.next_submission_index = initial.next_submission_index
        self._resubmit = deque(initial.resubmit)
        self.num_pending_groups = 0
        """Groups that are submitted and neither in the buffer nor given up."""
        self._written: list[GroupReceipt] = []
        self._episodes: set[asyncio.Task[None]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._hints: set[asyncio.Task[None]] = set()
        self._hint_is_due = False
        self.accounting.engine_totals = {s.incarnation: s for s in initial.engine_totals}
        self._failed_since: list[int] = []
        """Submissions that failed, all of them after `_newest_success`."""
        self._newest_success = -1
        self._logged_failures: set[int] = set()
        self._skipped = SkippedSteps()
        self._committing: asyncio.Task[None] | None = None
        self._last_row_at = monotonic()
        self.accounting.discard(list(initial.discards))
        for receipt in initial.waiting:
            self.gate.restored()
            self._buffer_group(receipt)

    @property
    def num_ready(self) -> int:
        """Trajectories that a step could take, in whole groups."""
        return len(self.buffer) * self.recipe.controller.group_size

    def imbalance(self) -> int:
        """Return how many committed tokens the accounting does not explain; always 0."""
        return self.accounting.imbalance(num_waiting=self.buffer.num_waiting_tokens)

    def done(self) -> bool:
        """Return whether all steps are done or a stop was requested."""
        return self.stop_requested or self.policy_version >= self.recipe.num_steps

    def request_stop(self) -> None:
        """Finish the step that is running, then end."""
        self.stop_requested = True
        self.notify()

    def set_max_running(self, num_trajectories: int) -> None:
        """Set how many trajectories may be on the cluster, after generators joined or ended."""
        self.gate.max_running = num_trajectories
        self.notify()

    # Changes, which stages wait for

    def notify(self) -> None:
        self.num_changes += 1
        self._next_change.set()
        self._next_change = asyncio.Event()

    async def wait_for_change(self, seen: int) -> None:
        """Return once `num_changes` exceeds `seen`; raise the error that ended the run.

        A caller reads `num_changes` before the state, so that it misses no change in between.
        """
        while self.num_changes <= seen:
            await self._next_change.wait()
        if self._fatal:
            raise self._fatal

    def _start(
        self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]], failure: str
    ) -> None:
        """Start a task beside the stages; an unexpected error in it ends the run."""

        def on_end(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            self.notify()
            if not task.cancelled() and (error := task.exception()):
                logger.error("%s", failure, exc_info=error)
                self._fatal = ArealFlowError(f"{failure}: {error!r}")

        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(on_end)

    # Admission

    def submit(self) -> None:
        """Start one group's episode: the oldest unaccounted submission first, else the next."""
        submission_index = self._next_submission()
        self.gate.submitted()
        self.num_pending_groups += 1
        episode = self._run_episode(submission_index)
        self._start(episode, self._episodes, "an episode ended unexpectedly")

    def _next_submission(self) -> int:
        if self._resubmit:
            return self._resubmit.popleft()
        self.next_submission_index += 1
        return self.next_submission_index - 1

    async def _run_episode(self, submission_index: int) -> None:
        prompt = self.backends.prompt_at(submission_index)
        seeds = group_seeds(self.recipe.seed, submission_index, self.recipe.controller.group_size)
        epoch = self.provenance.writer_epoch
        first = Episode(submission_index, prompt, seeds, 0, epoch, datetime.now(UTC))
        budget = RetryBudget(self.recipe.controller.max_attempts)
        rows = None
        while True:
            attempt = budget.num_failures
            try:
                if rows is None:
                    is_last = budget.is_last_attempt
                    episode = replace(first, attempt=attempt, is_last_attempt=is_last)
                    rows = await self._roll_out(episode, budget)
                receipt = await self.backends.rollouts.write(rows, budget)
            except ArealFlowError as error:
                self._log_first(error, first.group_id, attempt)
                failure = error
                if isinstance(error, SchemaError):  # another attempt would make the same rows
                    break
                if not budget.spend(error):
                    failure = type(error)(f"{error} ({budget.exhausted})")
                    self._log_first(failure, first.group_id, attempt)
                    break
                if isinstance(error, EngineError | WeightsError | EpisodeError):
                    rows = None  # they are lost
                await asyncio.sleep(RETRY_DELAY_S * max(1, budget.num_failures))
                continue
            self._written.append(receipt)
            return
        self.num_pending_groups -= 1
        self.gate.released()
        self.accounting.entries.failed_submissions.append(submission_index)
        self._count_failure(submission_index, failure)

    async def _roll_out(self, episode: Episode, budget: RetryBudget) -> Any:
        if budget.num_failures or budget.num_collateral:  # it was rolled out before
            self.gate.started()
        try:
            return await self.backends.rollouts.roll_out(episode, budget)
        finally:
            self.gate.finished()
            self.notify()

    def _log_first(self, error: ArealFlowError, group_id: str, attempt: int) -> None:
        """Log a failure unless another group, or an earlier attempt, failed in the same way."""
        failure = hash((type(error), str(error)))
        if failure not in self._logged_failures:
            self._logged_failures.add(failure)
            logger.warning("group %s, attempt %d: %s", group_id, attempt, error)

    def _count_failure(self, submission_index: int, failure: ArealFlowError) -> None:
        """End the run after too many failures in a row, by submission: a group that is tried again
        fails long after groups that were submitted later have succeeded."""
        if submission_index < self._newest_success:
            return
        self._failed_since.append(submission_index)
        # Groups that were in flight then may fail, too: the first failure too many is told of.
        if len(self._failed_since) == self.recipe.controller.max_consecutive_failures:
            self._fatal = type(failure)(
                f"{len(self._failed_since)} groups in a row failed; the last one: {failure}"
            )

    # Commit

    async def commit_written(self) -> None:
        """Commit every written group in one version and add the groups to the buffer.

        If the caller is cancelled, the commit runs to its end.
        """
        if self._committing is None or self._committing.done():
            self._committing = asyncio.create_task(self._commit())
        await asyncio.shield(self._committing)

    async def _commit(self) -> None:
        written, self._written = self._written, []
        if not written:
            return
        # The watermark moves with the buffer, not when Lance commits: a ledger row made in between
        # must not name groups that the accounting does not count yet.
        self.watermark = await self.backends.logs.commit(written)
        for receipt in written:
            self.num_pending_groups -= 1
            self.accounting.commit_group(receipt)
            self._buffer_group(receipt)
            self._judge_members(receipt)
        self._read_ahead()
        self.notify()

    def _buffer_group(self, receipt: GroupReceipt) -> None:
        groups_before = len(self.buffer)
        self.accounting.discard(self.buffer.add(receipt, policy_version=self.policy_version))
        self.gate.released(groups_before + 1 - len(self.buffer))

    def _judge_members(self, receipt: GroupReceipt) -> None:
        if any(t.reward is not None for t in receipt.trajectories):
            self._newest_success = max(self._newest_success, receipt.submission_index)
            self._failed_since = [i for i in self._failed_since if i > self._newest_success]
            return
        cause = receipt.member_errors[-1] if receipt.member_errors else "no member was scored"
        self._count_failure(receipt.submission_index, RewardError(cause))

    # Training

    async def wait_for_batch(self) -> Batch | None:
        while not self.done():
            seen = self.num_changes
            batch = self.buffer.take()
            if batch:
                self.accounting.begin_step(sum(t.num_tokens for t in batch))
                self.notify()
                return batch
            await self.wait_for_change(seen)
        return None

    async def train(self, batch: Batch, *, wait_s: float) -> None:
        """Compute a step, commit its row and publish its weights; served weights release slots."""
        trajectory_ids = _ids(batch)
        request = StepRequest(
            step=self.policy_version + 1,
            parent_hash=self.parent_hash,
            policy_version=self.policy_version,
            trajectory_ids=trajectory_ids,
            batch_digest=batch_digest(self.policy_version, trajectory_ids),
            max_staleness=self.recipe.controller.max_staleness,
        )
        self._hint_is_due = True
        self._read_ahead()
        async with self.backends.trainer.lock:
            result = await self.backends.trainer.step(request)
            row = self._end_step(request, result, wait_s=wait_s)
            await self.backends.logs.append(row)
            await self.backends.weights.publish(request.step)
        self.policy_version = request.step
        self.parent_hash = result.hashes.weights_hash
        groups_before = len(self.buffer)
        self.accounting.discard(self.buffer.evict(policy_version=self.policy_version))
        self.gate.released(groups_before - len(self.buffer))
        self._skipped.count(request.step, skipped=result.metrics.skipped_an_update)
        release = self._release_when_served(request.step, result.hashes.served_hash)
        self._start(release, self._releases, "weights could not be announced")
        await self.backends.on_step(row)
        self._hint_is_due = False

    def _end_step(
        self, request: StepRequest, result: StepResult, *, wait_s: float
    ) -> dict[str, Any]:
        metrics = result.metrics
        self.accounting.end_step(
            num_trained=metrics.num_trained_tokens, num_masked=metrics.num_masked_tokens
        )
        began, self._last_row_at = self._last_row_at, monotonic()
        return step_row(
            request,
            result,
            entries=self.accounting.close_entries(),
            watermark=self.watermark,
            next_submission_index=self.next_submission_index,
            num_waiting_tokens=self.buffer.num_waiting_tokens,
            provenance=self.provenance,
            wait_s=wait_s,
            step_s=self._last_row_at - began,
            num_generators=self.recipe.cluster.num_generators,
            usage=self.backends.usage(),
        )

    def _read_ahead(self) -> None:
        """Tell the trainer once during a step what the next batch will likely be."""
        batch = self.buffer.next_batch() if self._hint_is_due else None
        if batch:
            self._hint_is_due = False
            reading = self.backends.trainer.read_ahead(_ids(batch))
            self._start(reading, self._hints, "the trainer could not read ahead")

    async def _release_when_served(self, version: int, served_hash: str) -> None:
        served = await self.backends.weights.load_everywhere(version, served_hash)
        self.accounting.entries.served += served
        self.gate.released(self.recipe.groups_per_step)

    async def wait_until_released(self) -> None:
        """Return when generators serve the newest weights."""
        await asyncio.gather(*self._releases)

    async def close(self) -> None:
        """Cancel all tasks, and commit the groups that are written."""
        tasks = [*self._episodes, *self._releases, *self._hints]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._written or (self._committing and not self._committing.done()):
            await self.commit_written()


def _ids(batch: Batch) -> tuple[str, ...]:
    return tuple(trajectory.trajectory_id for trajectory in batch)
