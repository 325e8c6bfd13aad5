"""The settings of the controller: how much work is in flight."""

from __future__ import annotations

from pydantic import Field, model_validator

from areal_flow.core.settings import Settings, require


class ControllerSettings(Settings):
    """How much work is in flight and how old it may get. Sizes in trajectories."""

    batch_size: int = Field(512, ge=1)
    """Trajectories per training step."""
    group_size: int = Field(16, ge=1)
    """Completions per prompt."""
    max_staleness: int = Field(2, ge=0)
    """Maximum age of a trained token, in policy versions."""
    max_attempts: int = Field(3, ge=1)
    """Maximum attempts per group."""
    max_consecutive_failures: int = Field(4, ge=1)
    """End the run after this many failed groups in a row, in order of submission."""

    @model_validator(mode="after")
    def _whole_groups(self) -> ControllerSettings:
        require(
            self.batch_size % self.group_size == 0,
            f"controller.group_size ({self.group_size}) must divide "
            f"controller.batch_size ({self.batch_size})",
        )
        return self
