"""What a run may use, and the errors of running it."""

from __future__ import annotations

from dataclasses import dataclass

from areal_flow.errors import RewardError

WALL_PER_CPU = 3.0
"""A run may last this many times its processor time: the machine is shared, and not its fault."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run of a program may use."""

    cpu_s: float = 4.0
    memory_bytes: int = 2**30
    """Of address space, what Python and its modules take included."""
    output_bytes: int = 4 * 2**20
    """Of standard output, and of each other answer that is kept."""

    @property
    def wall_s(self) -> float:
        return WALL_PER_CPU * self.cpu_s


class SandboxError(RewardError):
    """A sandbox cannot be had, or died: an error of the infrastructure, never a verdict."""
