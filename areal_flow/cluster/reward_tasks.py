"""What reward workers do, as Dask tasks: they score completions, call tools and write groups.

| who                    | waits for                | unblocked by                           |
|------------------------|--------------------------|----------------------------------------|
| an episode             | completions              | its own worker's engine                |
| an episode             | a score, a tool's result | a task on a reward worker              |
| a reward worker's task | its resource             | the task before it, which never waits  |
|                        |                          | for an episode: nothing can deadlock   |

Such a task runs again elsewhere if its worker dies; it is forgotten if its episode's worker dies.
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
from distributed import get_client

from areal_flow.cluster.results import KillsWorkers, run_reward_task
from areal_flow.cluster.worker_context import WorkerContext, worker_context
from areal_flow.errors import (
    ArealFlowError,
    EngineError,
    InfrastructureError,
    RewardError,
    SchemaError,
)
from areal_flow.evaluation.pass_rates import verdict_of
from areal_flow.models.directory import texts_of
from areal_flow.prompts.rendering import messages_asked
from areal_flow.prompts.table import num_prompts
from areal_flow.rewards.code.sandbox.pool import PROGRAM_MEMORY
from areal_flow.rewards.protocol import RewardInput, TrainerState
from areal_flow.rewards.registry import WeightedRewards, recipe_rewards
from areal_flow.run.inputs import check_verifier
from areal_flow.settings import import_function
from areal_flow.store.codec import (
    RolloutNotes,
    array_rows,
    member_errors,
    receipts,
    rollout_notes,
    scored_table,
)
from areal_flow.types import Episode, GroupReceipt, Prompt, Score, Tokens, VersionSpan
from areal_flow.workflows.group import all_of

MID_EPISODE_PRIORITY = 10
"""Of tasks that an episode waits for, over those that only follow one."""

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
    "reward workers died over this call: the tool ends its process, as os._exit does, or crashes"
)


async def score(
    table: pa.Table,
    episodes: Sequence[Episode],
    *,
    is_last_try: bool,
    known: Sequence[Score] | None = None,
) -> pa.Table:
    """Score the rows of some groups, those that have no score yet.

    Args:
        known: their scores, where they are known.

    Raises:
        InfrastructureError: one has no verdict, and this is not the last try.
    """
    scores = await _scores(table, episodes, known or rollout_notes(table).scores)
    verifier = (await _rewards(worker_context())).identity
    if not is_last_try:
        _check_infrastructure(scores)
    return scored_table(table, scores, verifier=verifier)


async def score_row(
    table: pa.Table, row: int, episodes: Sequence[Episode], *, is_last_try: bool
) -> Score:
    """Score one row of some groups; see `score`."""
    given = rollout_notes(table).scores[row : row + 1]
    (found,) = await _scores(table.slice(row, 1), episodes, given)
    if not is_last_try:
        _check_infrastructure([found])
    return found


async def score_and_write(
    tables: Sequence[pa.Table],
    episodes: Sequence[Episode],
    *,
    is_last_try: bool,
    known: Sequence[Sequence[Score]] | None = None,
) -> tuple[list[GroupReceipt | SchemaError], float, int]:
    """Score groups, and write them together beside the log; the driver commits them.

    As many groups are scored at the same time as have `WeightedRewards.num_at_once` completions.

    Args:
        tables: the rows of each group.
        is_last_try: whether rows without a verdict are written, too.
        known: the scores of each group, where they are known.

    Returns:
        Of each group its receipt, or why it is not valid; how long scoring took, in seconds; and
        how many groups are scored at the same time.

    Raises:
        InfrastructureError: a row has no verdict, and this is not the last try.
    """
    began = monotonic()
    given: Sequence[Sequence[Score | None]] = known or [
        rollout_notes(table).scores for table in tables
    ]
    rewards = await _rewards(worker_context())
    num_at_once = -(-rewards.num_at_once * len(tables) // sum(map(len, tables)))
    turns = asyncio.Semaphore(num_at_once)

    async def scored(*group: Any) -> list[Score]:
        async with turns:
            return await _scores(*group)

    groups = zip(tables, ([episode] for episode in episodes), given, strict=True)
    scores = await all_of(scored(*group) for group in groups)
    if not is_last_try:
        _check_infrastructure(chain.from_iterable(scores))
    seconds = monotonic() - began
    path, verifier = worker_context().layout.trajectories, rewards.identity
    receipts = await asyncio.to_thread(_write, path, tables, scores, verifier)
    return receipts, seconds, num_at_once


async def score_completions(
    asked: tuple[Prompt, int], completions: Sequence[Tokens]
) -> Sequence[Score]:
    """Score completions of one prompt in the middle of an episode.

    Args:
        asked: the prompt, and the newest policy version that took part.
    """
    prompt, version = asked
    return await _judge(worker_context(), [(prompt, tokens, version) for tokens in completions])


def call_tool(path: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call the function at an import path, in a thread a call; return results, or what was raised.

    Raises:
        ArealFlowError: it cannot be imported.
    """
    _share_memory(worker_context())
    function = import_function(path, setting="a tool", error=ArealFlowError)

    def outcome(arguments: tuple[Any, ...]) -> Any:
        try:
            return function(*arguments)
        except ArealFlowError as error:
            return error
        except Exception as error:  # noqa: BLE001 - costs the member that called
            return ArealFlowError(f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(len(calls)) as threads:
        return [*threads.map(outcome, calls)]


IF_IT_KILLS: dict[Callable[..., Any], Any] = {
    score_completions: SCORING_KILLS,
    call_tool: TOOL_KILLS,
}
"""What becomes of an item over which workers die."""


async def on_reward_worker(
    function: Callable[..., Any], what: Any, items: Sequence[Any]
) -> Sequence[Any]:
    """Run a task of several items for an episode; one over which workers die fails alone.

    Raises:
        RewardError: no reward worker lives to answer.
        ArealFlowError: as raised by the task.
    """
    client, executions = get_client(), worker_context().executions
    try:
        found: Sequence[Any] = await run_reward_task(
            client, executions, function, what, items, priority=MID_EPISODE_PRIORITY
        )
        return found
    except KillsWorkers:
        if len(items) == 1:
            return [IF_IT_KILLS[function]]
        alone = [await on_reward_worker(function, what, [item]) for item in items]
        return [*chain.from_iterable(alone)]
    except EngineError as error:
        raise RewardError(str(error)) from error


def _write(
    path: Path, tables: Sequence[pa.Table], scores: Sequence[Sequence[Score]], verifier: str
) -> list[GroupReceipt | SchemaError]:
    """Write groups in one fragment, to be committed together: one costs as much as fifty.

    If they are not valid as a whole, each that is valid is written in a fragment of its own.
    """
    from areal_flow.store.trajectories import validate_groups, write_groups

    rows = pa.concat_tables(table.replace_schema_metadata(None) for table in tables)
    rows = rows.combine_chunks()  # what follows looks at every chunk of every column
    scored = scored_table(rows, [*chain.from_iterable(scores)], verifier=verifier)
    try:
        validate_groups(scored)
    except SchemaError as error:
        if len(tables) == 1:
            return [error]
        each = zip(tables, scores, strict=True)
        return [_write(path, [table], [known], verifier)[0] for table, known in each]
    fragments = write_groups(path, scored)
    begins = accumulate(map(len, tables), initial=0)
    groups = (scored.slice(begin, len(table)) for begin, table in zip(begins, tables, strict=False))
    return [
        _receipt(group, rollout_notes(table), fragments)
        for group, table in zip(groups, tables, strict=True)
    ]


def _receipt(group: pa.Table, notes: RolloutNotes, fragments: tuple[str, ...]) -> GroupReceipt:
    return GroupReceipt(
        submission_index=group["submission_index"][0].as_py(),
        fragments=fragments,
        trajectories=receipts(group),
        engine_stats=notes.engine_stats,
        member_errors=(*notes.errors, *member_errors(group)),
    )


async def _scores(
    table: pa.Table, episodes: Sequence[Episode], given: Sequence[Score | None]
) -> list[Score]:
    """Return the scores of some groups' rows: what is given, else what the rewards say.

    A reward that a workflow gave without a verdict has that of the recipe's `pass_threshold`.
    """
    context = worker_context()
    prompts = {episode.submission_index: episode.prompt for episode in episodes}
    rows = array_rows(table.select(["submission_index", "output_tokens", "version_spans"]))
    unscored = [
        (prompts[row["submission_index"]], row["output_tokens"], _newest(row["version_spans"]))
        for row, known in zip(rows, given, strict=True)
        if known is None
    ]
    judged = iter(await _judge(context, unscored))
    scores = [known or next(judged) for known in given]
    return [
        replace(score, verdict=verdict_of(score.reward, threshold=context.recipe.pass_threshold))
        if score.verdict is None and score.reward is not None
        else score
        for score in scores
    ]


def _newest(spans: Iterable[VersionSpan]) -> int:
    return max((span.version for span in spans), default=0)


def _check_infrastructure(scores: Iterable[Score]) -> None:
    """Refuse scores of which one is an error of the infrastructure.

    Raises:
        InfrastructureError: with the cause.
    """
    for found in scores:
        if found.verdict == "infrastructure_error":
            raise InfrastructureError(found.error)


async def _judge(
    context: WorkerContext, completions: Sequence[tuple[Prompt, Tokens, int]]
) -> Sequence[Score]:
    """Score completions, each of its prompt and version, decoded without special tokens."""
    texts = texts_of(context.tokenizer, [tokens for _, tokens, _ in completions])
    rewards, recipe = await _rewards(context), context.recipe
    return await rewards.score(
        [
            RewardInput(
                *(prompt.text, text, prompt.answer, dict(prompt.metadata), tuple(tokens)),
                prompt_source=prompt.source,
                messages=messages_asked(prompt, recipe),
                trainer_state=_trainer_state(context, version),
            )
            for (prompt, tokens, version), text in zip(completions, texts, strict=True)
        ]
    )


def _trainer_state(context: WorkerContext, version: int) -> TrainerState:
    recipe, num = context.recipe, num_prompts(context.layout.train_prompts)
    groups = version * recipe.controller.batch_size / recipe.controller.group_size
    return TrainerState(version, recipe.num_steps, epoch=groups / num if num else 0.0)


def checked_rewards(context: WorkerContext) -> WeightedRewards:
    """Return the run's rewards, not opened; refuse those whose code is not the run's."""
    rewards = recipe_rewards(context.recipe, context.layout.rewards)
    check_verifier(context.layout, rewards.identity)
    return rewards


def _share_memory(context: WorkerContext) -> None:
    """Leave each reward worker its part of the machine, on which all of them may be."""
    PROGRAM_MEMORY.num_processes = context.recipe.cluster.num_reward_workers


async def _rewards(context: WorkerContext) -> WeightedRewards:
    """Return this worker's rewards, which may take their time to be opened."""

    def opened() -> WeightedRewards:
        _share_memory(context)
        rewards = checked_rewards(context)
        rewards.open()
        return rewards

    if (rewards := context.get(WeightedRewards)) is not None:
        return rewards
    return await asyncio.to_thread(context.ensure, WeightedRewards, opened)
