"""What a run may use, and the errors of running it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from areal_flow.core.errors import InfrastructureError, RewardError


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run of a program may use; each is above 0."""

    cpu_s: float = 4.0
    wall_per_cpu: float = 3.0
    """A run may last this many times its processor time: the machine is shared."""
    memory_bytes: int = 2**30
    """Of address space, what Python and its modules take included."""
    output_bytes: int = 4 * 2**20
    """Of standard output, and of each other answer that is kept."""
    num_threads: int = 128
    """Of one program, which can start no process. Not counted where the tier `landlock` runs for
    an ordinary user: that user's other processes would count as well."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            takes = int | float if isinstance(field.default, float) else int
            if isinstance(value, bool) or not isinstance(value, takes) or not 0 < value < 2**50:
                kind = "number" if isinstance(field.default, float) else "whole number"
                raise RewardError(
                    f"limit {field.name} of programs: expected a {kind} above 0, found {value!r}"
                )

    @property
    def wall_s(self) -> float:
        return self.wall_per_cpu * self.cpu_s


class SandboxError(InfrastructureError):
    """A sandbox cannot be had, or died: an error of the infrastructure, never a verdict."""
