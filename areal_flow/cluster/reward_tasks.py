"""The Dask tasks of reward workers: they score groups after their rollout and write them.

For an episode that runs, they score completions and call tools. Such a task runs again elsewhere if
its worker dies; it is dropped if its episode's worker dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from time import monotonic
from typing import Any

import pyarrow as pa
from distributed import get_worker

from areal_flow.cluster.worker import WorkerContext, worker_context
from areal_flow.core.concurrency import all_of
from areal_flow.core.errors import ArealFlowError, InfrastructureError, RewardError, SchemaError
from areal_flow.core.pass_rates import verdict_of
from areal_flow.core.settings import import_function
from areal_flow.core.types import GroupReceipt, Prompt, Score, Tokens, VersionSpan
from areal_flow.log.codec import (
    RolloutNotes,
    RolloutRows,
    array_rows,
    member_errors,
    receipts,
    scored_table,
)
from areal_flow.log.inputs import check_verifier
from areal_flow.policy.tokenizer.directory import texts_of
from areal_flow.rewards.protocol import RewardInput, TrainerState
from areal_flow.rewards.registry import WeightedRewards
from areal_flow.rollout.prompts.rendering import messages_asked
from areal_flow.rollout.prompts.table import num_prompts
from areal_flow.sandboxes.pool import PROGRAM_MEMORY

MAX_KILLING_ROWS = 3
"""If workers die over so many rows of a group, its first, its other rows are not scored either."""
SCORING_KILLS = Score(
    None,
    "error",
    error="reward workers died over this completion, or over each of the first "
    f"{MAX_KILLING_ROWS} of its group: the verifier ends its process, as os._exit does, or it "
    "crashes, or needs more memory than there is",
)
TOOL_KILLS = RewardError(
    "this tool call crashed its worker: the tool ends its process, as os._exit does, or crashes"
)


async def score(
    rollout: RolloutRows, *, is_last_try: bool, known_scores: Sequence[Score] | None = None
) -> pa.Table:
    """Score the rows of some groups.

    Args:
        known_scores: their scores, if a task has scored them already.
    """
    scores = await _scores(*rollout, known_scores)
    verifier = (await _rewards(worker_context())).identity
    if not is_last_try:
        _check_infrastructure(scores)
    table, _ = rollout
    return scored_table(table, scores, verifier=verifier)


def num_rows(rollout: RolloutRows) -> int:
    return len(rollout[0])


async def score_row(rollout: RolloutRows, row: int, *, is_last_try: bool) -> Score:
    table, notes = rollout
    row_notes = replace(notes, scores=notes.scores[row : row + 1])
    (score,) = await _scores(table.slice(row, 1), row_notes)
    if not is_last_try:
        _check_infrastructure([score])
    return score


async def score_and_write(
    rollouts: Sequence[RolloutRows],
    *,
    is_last_try: bool,
    known_scores: Sequence[Score] | None = None,
) -> tuple[list[GroupReceipt | SchemaError], float, int]:
    """Score groups, and write them together beside the log; the driver commits them.

    Groups are scored concurrently, up to `WeightedRewards.max_concurrency` completions.

    Args:
        is_last_try: whether rows without a verdict are written, too.
        known_scores: the scores of the only group, if a task has scored them already.

    Returns:
        Of each group its receipt, or why it is not valid; how long scoring took, in seconds; and
        how many groups are scored at the same time.
    """
    began = monotonic()
    rewards = await _rewards(worker_context())
    max_concurrency = -(-rewards.max_concurrency * len(rollouts) // sum(map(num_rows, rollouts)))
    turns = asyncio.Semaphore(max_concurrency)

    async def scored(table: pa.Table, notes: RolloutNotes) -> list[Score]:
        async with turns:
            return await _scores(table, notes, known_scores)

    scores = await all_of(scored(*rollout) for rollout in rollouts)
    if not is_last_try:
        _check_infrastructure(chain.from_iterable(scores))
    seconds = monotonic() - began
    path, verifier = worker_context().layout.trajectories, rewards.identity
    receipts = await asyncio.to_thread(_write, path, rollouts, scores, verifier)
    return receipts, seconds, max_concurrency


def _write(
    path: Path, rollouts: Sequence[RolloutRows], scores: Sequence[Sequence[Score]], verifier: str
) -> list[GroupReceipt | SchemaError]:
    """Write groups in one fragment, to be committed together: one costs as much as fifty.

    If they are not valid as a whole, each that is valid is written in a fragment of its own.
    """
    from areal_flow.log.trajectories import validate_groups, write_groups

    rows = pa.concat_tables(table for table, _ in rollouts)
    rows = rows.combine_chunks()  # every chunk of every column costs time below
    scored = scored_table(rows, [*chain.from_iterable(scores)], verifier=verifier)
    try:
        validate_groups(scored)
    except SchemaError as error:
        if len(rollouts) == 1:
            return [error]
        each = zip(rollouts, scores, strict=True)
        return [
            _write(path, [rollout], [group_scores], verifier)[0] for rollout, group_scores in each
        ]
    fragments = write_groups(path, scored)
    begins = accumulate(map(num_rows, rollouts), initial=0)
    return [
        _receipt(scored.slice(begin, len(table)), notes, fragments)
        for begin, (table, notes) in zip(begins, rollouts, strict=False)
    ]


def _receipt(group: pa.Table, notes: RolloutNotes, fragments: tuple[str, ...]) -> GroupReceipt:
    return GroupReceipt(
        submission_index=group["submission_index"][0].as_py(),
        fragments=fragments,
        trajectories=receipts(group),
        engine_stats=notes.engine_stats,
        member_errors=member_errors(group),
    )


async def _scores(
    table: pa.Table, notes: RolloutNotes, known_scores: Sequence[Score] | None = None
) -> list[Score]:
    """Return each row's score: the known one, else its workflow's, else that of the rewards.

    A workflow's reward without a verdict is judged by the recipe's `pass_threshold`.
    """
    context, prompts, scores = worker_context(), notes.prompts, known_scores or notes.scores
    rows = array_rows(table.select(["submission_index", "output_tokens", "version_spans"]))
    unscored = [
        (prompts[row["submission_index"]], row["output_tokens"], _newest(row["version_spans"]))
        for row, score in zip(rows, scores, strict=True)
        if score is None
    ]
    judged = iter(await judge(context, unscored))
    scores = [score or next(judged) for score in scores]
    return [
        replace(score, verdict=verdict_of(score.reward, threshold=context.recipe.pass_threshold))
        if score.verdict is None and score.reward is not None
        else score
        for score in scores
    ]


def _newest(spans: Iterable[VersionSpan]) -> int:
    return max((span.version for span in spans), default=0)


def _check_infrastructure(scores: Iterable[Score]) -> None:
    for score in scores:
        if score.verdict == "infrastructure_error":
            raise InfrastructureError(score.error)


async def judge(
    context: WorkerContext, completions: Sequence[tuple[Prompt, Tokens, int]]
) -> Sequence[Score]:
    """Score completions, each of its prompt and version, decoded without special tokens."""
    texts = texts_of(context.tokenizer, [tokens for _, tokens, _ in completions])
    rewards, plan = await _rewards(context), context.recipe.prompt_plan()
    versions = {version for *_, version in completions}
    states = {version: _trainer_state(context, version) for version in versions}
    return await rewards.score(
        [
            RewardInput(
                *(prompt.text, text, prompt.answer, dict(prompt.metadata), tuple(tokens)),
                prompt_source=prompt.source,
                messages=messages_asked(prompt, plan),
                trainer_state=states[version],
            )
            for (prompt, tokens, version), text in zip(completions, texts, strict=True)
        ]
    )


async def score_completions(
    prompt_and_version: tuple[Prompt, int], completions: Sequence[Tokens]
) -> Sequence[Score]:
    """Score completions of a prompt, of which this policy version sampled the newest tokens."""
    prompt, version = prompt_and_version
    return await judge(worker_context(), [(prompt, tokens, version) for tokens in completions])


def own_addresses(_: None, items: Sequence[None]) -> list[str]:
    """Return the address of the worker that runs this, for each item."""
    return [get_worker().address] * len(items)


def call_tool(path: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call a function at an import path, each call in a thread; return results or errors."""
    set_memory_limit(worker_context())
    function = import_function(path, setting="a tool", error=ArealFlowError)

    def outcome(arguments: tuple[Any, ...]) -> Any:
        try:
            return function(*arguments)
        except ArealFlowError as error:
            return error
        except Exception as error:  # noqa: BLE001 - fails only the member that called
            return ArealFlowError(f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(len(calls)) as threads:
        return [*threads.map(outcome, calls)]


RESULT_ON_CRASH: dict[Callable[..., Any], Any] = {
    score_completions: SCORING_KILLS,
    call_tool: TOOL_KILLS,
    own_addresses: TOOL_KILLS,
}
"""The result of an item of an episode's task that kills workers."""


def _trainer_state(context: WorkerContext, version: int) -> TrainerState:
    recipe, num = context.recipe, num_prompts(context.layout.train_prompts)
    groups = version * recipe.controller.batch_size / recipe.controller.group_size
    return TrainerState(version, recipe.num_steps, epoch=groups / num if num else 0.0)


def checked_rewards(context: WorkerContext) -> WeightedRewards:
    """Return the run's rewards, not opened; refuse rewards whose code has changed."""
    recipe = context.recipe
    rewards = WeightedRewards(
        recipe.rewards,
        context.layout.rewards,
        pass_threshold=recipe.pass_threshold,
        agent=recipe.rewarding_agent,
        environment=recipe.environment,
    )
    check_verifier(context.layout, rewards.identity)
    return rewards


def set_memory_limit(context: WorkerContext) -> None:
    """Limit programs to this worker's share of memory: all may run on this machine."""
    PROGRAM_MEMORY.num_processes = context.recipe.cluster.num_reward_workers


async def _rewards(context: WorkerContext) -> WeightedRewards:
    def opened() -> WeightedRewards:
        set_memory_limit(context)
        rewards = checked_rewards(context)
        rewards.open()
        return rewards

    if (rewards := context.get(WeightedRewards)) is not None:
        return rewards
    return await asyncio.to_thread(context.ensure, WeightedRewards, opened)
