"""How fast steps were: tokens a second, and how busy generators and trainer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal_flow.types import ServedWeights

AREA = "speed/"
"""What the names of these metrics begin with: a replay takes other times and compares none."""
OBSERVED = f"{AREA}generators_observed_s"
COLUMNS = (
    *("seconds_step", "seconds_generate", "seconds_read", "seconds_train", "seconds_stage"),
    *("num_generated_tokens", "num_trained_tokens"),
)
"""All of a ledger row that `speed_metrics` needs."""


def speed_metrics(
    totals: Mapping[str, float], *, num_generators: int, seconds_observed: float = 0.0
) -> dict[str, float]:
    """Return the metrics of steps by name; none of steps that took no time.

    Args:
        totals: `COLUMNS` of a ledger row, or the sums of several.
        num_generators: of the recipe.
        seconds_observed: the time of all generators in which they spent `seconds_generate`. It is
            not that of the steps, since a generator reports with each group. 0: nothing is known
            of it, as in rows of earlier versions.
    """
    seconds = totals["seconds_step"]
    if not seconds:
        return {}
    generators = seconds_observed or num_generators * seconds
    training = sum(totals[f"seconds_{part}"] for part in ("read", "train", "stage"))
    return {
        f"{AREA}generated_tokens_per_s": totals["num_generated_tokens"] / seconds,
        f"{AREA}trained_tokens_per_s": totals["num_trained_tokens"] / seconds,
        f"{AREA}generators_busy_fraction": totals["seconds_generate"] / generators,
        f"{AREA}trainer_busy_fraction": training / seconds,
        **({OBSERVED: seconds_observed} if seconds_observed else {}),
    }


def update_metrics(served: Sequence[ServedWeights]) -> dict[str, float]:
    """Return what generators' updates cost: how many served what the ledger has, and how long each
    took to read it and then to switch; none of no update."""
    if not served:
        return {}
    found: dict[str, float] = {f"{AREA}weights_num_served": len(served)}
    for name in ("transfer_s", "stall_s"):
        seconds = [getattr(update, name) for update in served]
        found[f"{AREA}weights_{name}_mean"] = sum(seconds) / len(seconds)
        found[f"{AREA}weights_{name}_max"] = max(seconds)
    return found


def reward_metrics(
    queue_s: Sequence[float], *, num_scored: int, seconds_step: float
) -> dict[str, float]:
    """Return how many completions were scored a second, and how long groups waited for it.

    Args:
        queue_s: of each group that was scored since the row before; none without any.
        num_scored: completions that got a reward since then.
        seconds_step: the time since then.
    """
    if not queue_s or not seconds_step:
        return {}
    return {
        f"{AREA}rewards_per_s": num_scored / seconds_step,
        f"{AREA}reward_queue_s_mean": sum(queue_s) / len(queue_s),
        f"{AREA}reward_queue_s_max": max(queue_s),
    }
