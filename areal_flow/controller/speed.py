"""How fast steps were: tokens a second, and how busy generators and trainer. Pure."""

from __future__ import annotations

from collections.abc import Mapping

AREA = "speed/"
"""What the names of these metrics begin with: a replay takes other times and compares none."""
COLUMNS = (
    *("seconds_step", "seconds_generate", "seconds_read", "seconds_train", "seconds_stage"),
    *("num_generated_tokens", "num_trained_tokens"),
)
"""All of a ledger row that `speed_metrics` needs."""


def speed_metrics(totals: Mapping[str, float], *, num_generators: int) -> dict[str, float]:
    """Return the metrics of steps by name; none of steps that took no time.

    The time of a generator counts when its groups are committed, so that a short step's fraction
    may be above 1.

    Args:
        totals: `COLUMNS` of a ledger row, or the sums of several.
        num_generators: of the recipe.
    """
    seconds = totals["seconds_step"]
    if not seconds:
        return {}
    training = sum(totals[f"seconds_{part}"] for part in ("read", "train", "stage"))
    return {
        f"{AREA}generated_tokens_per_s": totals["num_generated_tokens"] / seconds,
        f"{AREA}trained_tokens_per_s": totals["num_trained_tokens"] / seconds,
        f"{AREA}generators_busy_fraction": totals["seconds_generate"] / num_generators / seconds,
        f"{AREA}trainer_busy_fraction": training / seconds,
    }
