"""Diagnoses a run from its ledger rows. Pure.

Which side waits for the other, how many generators would balance them, whether engine and trainer
disagree about the same tokens, and whether the policy moves too far for the age of its data.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from statistics import fmean
from typing import Any, NamedTuple

from areal_flow.core.types import ENGINE_GAP, SPEED_AREA
from areal_flow.log.ledger_row import OBSERVED, SPEED_COLUMNS, speed_metrics

logger = logging.getLogger(__name__)

LONG_WAIT = 0.2
"""A trainer that waits for data for a larger fraction of its time could train more."""
BUSY = 0.8
"""Where generators decode for a smaller fraction of their time, another one would idle, too."""
QUEUE = f"{SPEED_AREA}reward_queue_s_mean"
COLUMNS = (*SPEED_COLUMNS, "wait_s", OBSERVED, QUEUE)

WINDOW_STEPS = 5
"""How many steps with one number of generators make a decision."""
SETTLING_STEPS = 2
"""Steps after a change that are not counted: their batches were generated before it."""
TOLERANCE = 0.25
"""Of a generator: a smaller difference is not worth a change."""

MAX_MEAN_DIFFERENCE = 0.05
"""Nats a token: bfloat16 on both sides makes about 0.02, float32 below 1e-4."""
MAX_KL = 0.01
"""Nats a token; a few tokens that differ much make it large while the mean stays small."""
MIN_TOKENS = 100
"""Of a step, below which its gap is not judged."""
REMEMBERED_STEPS = 1000
"""A resumed run repeats no warning that one of so many steps before would have given."""
REMEDIES = (
    "in this order: give generation.dtype and trainer.dtype the same value, which is the head's "
    "too; leave generation.vllm.quantization (fp8) out; set generation.batch_invariant for "
    "batch-invariant kernels; correct the objective: algorithm.proximal = 'recomputed' with "
    "algorithm.importance_weight_rule = 'truncate' (TIS), or 'mask' with a floor (IcePop)"
)

EFFECTIVE_SAMPLES = "importance_weight_ess_fraction"
MIN_EFFECTIVE_SAMPLES, EFFECTIVE_STEPS = 0.85, 10
"""Below this mean over so many steps rewards tend to fall again (docs/science/stability.md)."""


class Bottleneck(NamedTuple):
    text: str
    remedy: str = ""


def speed_of(steps: Sequence[Mapping[str, Any]], *, num_generators: int) -> dict[str, float]:
    """Return the sums of `COLUMNS` over ledger rows, and the speed metrics of these sums.

    Args:
        steps: rows with a key for each metric.
    """
    totals = {name: sum(row.get(name) or 0.0 for row in steps) for name in COLUMNS}
    observed_s = totals[OBSERVED]
    speeds = speed_metrics(totals, num_generators=num_generators, observed_s=observed_s)
    return totals | speeds


def speed_shares(
    steps: Sequence[Mapping[str, Any]], *, num_generators: int
) -> tuple[float, float, float]:
    """Return the fraction of time that the trainer waited, the fraction that generators decoded,
    and how many steps a group waited to be scored; of steps that took time."""
    speeds = speed_of(steps, num_generators=num_generators)
    seconds, busy = speeds["step_s"], speeds[f"{SPEED_AREA}generators_busy_fraction"]
    return speeds["wait_s"] / seconds, busy, speeds[QUEUE] / seconds


def find_bottleneck(steps: Sequence[Mapping[str, Any]], *, num_generators: int) -> Bottleneck:
    return judge_speed(*speed_shares(steps, num_generators=num_generators))


def judge_speed(waiting: float, generators_busy: float, queue_steps: float) -> Bottleneck:
    """Return the verdict on `speed_shares`, in words."""
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


class Balance:
    """Follows the steps of a run, and returns the number of generators that would balance it.

    The demand is how many generators would be busy all the time if the trainer never waited:

        demand = n * busy * step_s / (step_s - wait_s)

    With too few generators they are all busy and the trainer waits; with too many they idle.
    """

    def __init__(
        self, min_number: int, max_number: int, *, window_steps: int = WINDOW_STEPS
    ) -> None:
        self.min_number, self.max_number = min_number, max_number
        self._window_steps = window_steps
        self._rows: list[Mapping[str, Any]] = []
        self._number = 0

    def window(self, row: Mapping[str, Any], *, number: int) -> list[Mapping[str, Any]]:
        """Add a step's ledger row; return the rows of a window once it is complete."""
        if number != self._number:
            self._number, self._rows = number, []
        self._rows.append(row)
        settled = self._rows[SETTLING_STEPS:]
        if len(settled) < self._window_steps:
            return []
        self._rows = []
        return settled

    def target_number(self, rows: Sequence[Mapping[str, Any]], *, number: int) -> int:
        """Return the number of generators that the rows of a window call for."""
        steps, demand = [{**row["metrics"], **row} for row in rows], float(number)
        if any(step.get(OBSERVED) for step in steps):  # else nothing was generated meanwhile
            waiting, busy, _ = speed_shares(steps, num_generators=number)
            demand = number * busy / max(1 - waiting, 0.01)
        if demand > number + TOLERANCE:  # at most twice as many: far from balance it is a guess
            target = min(ceil(demand - TOLERANCE), 2 * number)
        else:
            target = min(ceil(demand + TOLERANCE), number)
        return max(self.min_number, min(target, self.max_number))


def is_wide(metrics: Mapping[str, Any]) -> bool:
    """Return whether a step's metrics show an engine gap beyond the bounds."""
    if (metrics.get(f"{ENGINE_GAP}tokens") or 0) < MIN_TOKENS:
        return False
    difference = metrics[f"{ENGINE_GAP}logprob_difference_mean"]
    return bool(difference > MAX_MEAN_DIFFERENCE or metrics[f"{ENGINE_GAP}kl"] > MAX_KL)


class GapWatch:
    """Logs a warning at the first step of a run whose engine gap is wide.

    A run whose engine and trainer disagree trains on data of a different policy than it assumes,
    and may collapse after some hundred steps although nothing is stale.
    """

    def __init__(self, recorded: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Take what returns the newest rows of the ledger: a resumed run has warned already."""
        self._recorded = recorded
        self._is_reported = False

    def count(self, row: Mapping[str, Any]) -> None:
        metrics = row["metrics"]
        if self._is_reported or not is_wide(metrics):
            return
        self._is_reported = True
        earlier = (each for each in self._recorded() if each["step"] < row["step"])
        if any(is_wide(each["metrics"]) for each in earlier):
            return
        difference, kl = (metrics[ENGINE_GAP + name] for name in ("logprob_difference_mean", "kl"))
        logger.warning(
            f"step {row['step']}: engine and trainer give the same tokens other log-probabilities "
            f"with the same weights, by {difference:.3g} in the mean and a KL divergence of "
            f"{kl:.3g} (expected at most {MAX_MEAN_DIFFERENCE:g} and {MAX_KL:g}): {REMEDIES}"
        )


class StalenessWatch:
    """Logs a warning once importance weights leave too little of stale batches.

    Then the policy moves so far between sampling and training that it sees the effect of a step too
    late, and takes more such steps meanwhile.
    """

    def __init__(self) -> None:
        self._fractions: deque[float] = deque(maxlen=EFFECTIVE_STEPS)
        self._is_reported = False

    def count(self, row: Mapping[str, Any]) -> None:
        if EFFECTIVE_SAMPLES not in row["metrics"] or row["staleness_mean"] < 1:
            return
        self._fractions.append(row["metrics"][EFFECTIVE_SAMPLES])
        fraction = fmean(self._fractions)
        is_window = len(self._fractions) == EFFECTIVE_STEPS
        if self._is_reported or not is_window or fraction >= MIN_EFFECTIVE_SAMPLES:
            return
        self._is_reported = True
        logger.warning(
            f"step {row['step']}: of the last {EFFECTIVE_STEPS} batches importance weights leave "
            f"{fraction:.0%} as effective samples (expected at least {MIN_EFFECTIVE_SAMPLES:.0%}): "
            "the policy moves too far between sampling and training, and may get worse again; "
            "lower trainer.learning_rate or controller.max_staleness"
        )
