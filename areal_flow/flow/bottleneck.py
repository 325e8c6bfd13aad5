"""Says in words which side of a run the other one waits for, and what helps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from areal_flow.core.step_metrics import SPEED_AREA
from areal_flow.log.ledger_row import OBSERVED, SPEED_COLUMNS, speed_metrics

LONG_WAIT = 0.2
"""Of its time; a trainer that waits longer for data could train more."""
BUSY = 0.8
"""Of their time; with generators that do less, another one would be idle, too."""
QUEUE = f"{SPEED_AREA}reward_queue_s_mean"
COLUMNS = (*SPEED_COLUMNS, "seconds_wait", OBSERVED, QUEUE)


class Bottleneck(NamedTuple):
    text: str
    remedy: str = ""


def speed_shares(
    steps: Sequence[Mapping[str, Any]], *, num_generators: int
) -> tuple[float, float, float]:
    """Return what rows of the ledger that took time, with a key for each metric, say together:
    the share of it that the trainer waited, the share of theirs that generators decoded, and how
    many steps a group waited to be scored."""
    speeds = speed_of(steps, num_generators=num_generators)
    seconds, busy = speeds["seconds_step"], speeds[f"{SPEED_AREA}generators_busy_fraction"]
    return speeds["seconds_wait"] / seconds, busy, speeds[QUEUE] / seconds


def speed_of(steps: Sequence[Mapping[str, Any]], *, num_generators: int) -> dict[str, float]:
    """Return the sums of `COLUMNS` over such rows, and the speed metrics of these."""
    totals = {name: sum(row.get(name) or 0.0 for row in steps) for name in COLUMNS}
    observed = totals[OBSERVED]
    return totals | speed_metrics(totals, num_generators=num_generators, seconds_observed=observed)


def find_bottleneck(steps: Sequence[Mapping[str, Any]], *, num_generators: int) -> Bottleneck:
    return judge_speed(*speed_shares(steps, num_generators=num_generators))


def judge_speed(waiting: float, generators_busy: float, queue_steps: float) -> Bottleneck:
    """Return the verdict on `speed_shares`."""
    waits = f"the trainer waits {waiting:.0%} of its time for data"
    observation = f"{waits}, generators are busy {generators_busy:.0%} of theirs"
    adding = "or `areal-flow workers add` while it runs"
    if waiting < LONG_WAIT and generators_busy >= BUSY:
        return Bottleneck(f"Neither side waits for long: {observation}")
    if waiting < LONG_WAIT:
        remedy = "add a trainer rank (cluster.num_trainers), or use fewer generators"
        return Bottleneck(f"Training is the bottleneck: {observation}", remedy)
    if queue_steps > 1:
        queue = f"a group waits {queue_steps:.1f} steps to be scored"
        remedy = f"add a reward worker: cluster.num_reward_workers, {adding}"
        return Bottleneck(f"Scoring is the bottleneck: {waits}, {queue}", remedy)
    if generators_busy >= BUSY:
        remedy = f"add a generator: cluster.num_generators, {adding}"
        return Bottleneck(f"Generation is the bottleneck: {observation}", remedy)
    remedy = "let generation run further ahead: raise controller.max_staleness"
    return Bottleneck(f"Both sides wait for each other: {observation}", remedy)
