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
from itertools import accumulate, chain
from pathlib import Path
from time import monotonic
from typing import Any

import pyarrow as pa
from distributed import get_client

from areal_flow.cluster.results import run_task
from areal_flow.cluster.worker_context import WorkerContext, worker_context
from areal_flow.errors import (
    ArealFlowError,
    EngineError,
    InfrastructureError,
    RewardError,
    SchemaError,
)
from areal_flow.import_path import import_function
from areal_flow.models.directory import texts_of
from areal_flow.recovery.inputs import check_verifier
from areal_flow.rewards.protocol import RewardInput
from areal_flow.rewards.registry import WeightedRewards
from areal_flow.store.codec import (
    RolloutNotes,
    array_rows,
    member_errors,
    receipts,
    rollout_notes,
    scored_table,
)
from areal_flow.types import Episode, GroupReceipt, Prompt, Score, Tokens

MID_EPISODE_PRIORITY = 10
"""Of tasks that an episode waits for, over those that only follow one."""


async def score(table: pa.Table, episodes: Sequence[Episode], *, is_last_try: bool) -> pa.Table:
    """Score the rows of some groups, those that have no score yet.

    Raises:
        InfrastructureError: one has no verdict, and this is not the last try.
    """
    scores, verifier = await _scores(table, episodes), await _verifier()
    if not is_last_try:
        _check_infrastructure(scores)
    return scored_table(table, scores, verifier=verifier)


async def score_and_write(
    tables: Sequence[pa.Table], episodes: Sequence[Episode], *, is_last_try: bool
) -> tuple[list[GroupReceipt | SchemaError], float]:
    """Score groups one by one, and write them together beside the log; the driver commits them.

    Args:
        tables: the rows of each group.
        is_last_try: whether rows without a verdict are written, too.

    Returns:
        Of each group its receipt, or why it is not valid; and how long scoring took, in seconds.

    Raises:
        InfrastructureError: a row has no verdict, and this is not the last try.
    """
    began = monotonic()
    scores = [
        await _scores(table, [episode]) for table, episode in zip(tables, episodes, strict=True)
    ]
    if not is_last_try:
        _check_infrastructure(chain.from_iterable(scores))
    seconds = monotonic() - began
    path, verifier = worker_context().layout.trajectories, await _verifier()
    return await asyncio.to_thread(_write, path, tables, scores, verifier), seconds


async def score_completions(prompt: Prompt, completions: Sequence[Tokens]) -> Sequence[Score]:
    """Score completions of one prompt in the middle of an episode."""
    return await _judge(worker_context(), [(prompt, tokens) for tokens in completions])


def call_tool(path: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call the function at an import path, in a thread a call; return results, or what was raised.

    Raises:
        ArealFlowError: it cannot be imported.
    """
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


async def on_reward_worker(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a task for an episode; one that kills its worker again and again fails the member only.

    Raises:
        RewardError: no reward worker lives to answer.
        ArealFlowError: as raised by the task.
    """
    client, priority = get_client(), MID_EPISODE_PRIORITY
    try:
        return await run_task(client, function, *arguments, resource="reward", priority=priority)
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


async def _scores(table: pa.Table, episodes: Sequence[Episode]) -> list[Score]:
    """Return the scores of some groups' rows: what a workflow gave, else what the rewards say."""
    given = rollout_notes(table).scores
    prompts = {episode.submission_index: episode.prompt for episode in episodes}
    rows = array_rows(table.select(["submission_index", "output_tokens"]))
    unscored = [
        (prompts[row["submission_index"]], row["output_tokens"])
        for row, known in zip(rows, given, strict=True)
        if known is None
    ]
    judged = iter(await _judge(worker_context(), unscored))
    return [known or next(judged) for known in given]


def _check_infrastructure(scores: Iterable[Score]) -> None:
    """Refuse scores of which one is an error of the infrastructure.

    Raises:
        InfrastructureError: with the cause.
    """
    for found in scores:
        if found.verdict == "infrastructure_error":
            raise InfrastructureError(found.error)


async def _verifier() -> str:
    return (await _rewards(worker_context())).identity


async def _judge(
    context: WorkerContext, completions: Sequence[tuple[Prompt, Tokens]]
) -> Sequence[Score]:
    """Score completions, each of its prompt, decoded without special tokens."""
    texts = texts_of(context.tokenizer, [tokens for _, tokens in completions])
    rewards = await _rewards(context)
    return await rewards.score(
        [
            RewardInput(
                *(prompt.text, text, prompt.answer, prompt.metadata, tuple(tokens)),
                prompt_source=prompt.source,
            )
            for (prompt, tokens), text in zip(completions, texts, strict=True)
        ]
    )


async def _rewards(context: WorkerContext) -> WeightedRewards:
    """Return this worker's rewards, which may take their time to be opened."""

    def opened() -> WeightedRewards:
        recipe = context.recipe
        rewards = WeightedRewards(
            recipe.rewards, context.layout.rewards, pass_threshold=recipe.pass_threshold
        )
        check_verifier(context.layout, rewards.identity)
        rewards.open()
        return rewards

    if (rewards := context.get(WeightedRewards)) is not None:
        return rewards
    return await asyncio.to_thread(context.ensure, WeightedRewards, opened)
