"""A worker's deaths in, whether to start it once more out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Death:
    """One end of a worker's process that nobody asked for."""

    lived_s: float
    """From when it joined; 0 if it never did."""
    cause: str


@dataclass(frozen=True, slots=True)
class QuarantineRule:
    """When a worker is beyond help: so many deaths in a row, each so early."""

    num_deaths: int = 3
    early_s: float = 15.0

    def condemns(self, deaths: Sequence[Death]) -> bool:
        """Return whether the latest deaths, oldest first, are too many and all too early."""
        latest = deaths[-self.num_deaths :]
        return len(latest) == self.num_deaths and all(
            death.lived_s < self.early_s for death in latest
        )

    def describe(self, name: str, role: str, deaths: Sequence[Death]) -> str:
        """Say whom these deaths condemned, how often and how fast it died, and where to look."""
        latest = deaths[-self.num_deaths :]
        lives = ", ".join(f"{death.lived_s:.1f}" for death in latest)
        return (
            f"{name} is quarantined: this {role} died {len(latest)} times in a row, {lives} s "
            f"after it joined ({latest[-1].cause}). Look at what its process said last, and at "
            "this machine's memory"
        )


def describe_exit(exit_code: int | None) -> str:
    """Say how a process ended."""
    if exit_code is None:
        return "its process is gone"
    if exit_code < 0:
        return f"killed by signal {-exit_code}"
    return f"exit status {exit_code}"
