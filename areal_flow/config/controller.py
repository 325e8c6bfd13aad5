"""The settings of the controller: how much work is in flight."""

from __future__ import annotations

from pydantic import Field, model_validator

from areal_flow.core.settings import Settings, require


class ControllerSettings(Settings):
    """How much work is in flight and how old it may get. Sizes in trajectories."""

    batch_size: int = Field(512, ge=1)
    """Trajectories a training step."""
    group_size: int = Field(16, ge=1)
    """Completions of one prompt."""
    max_staleness: int = Field(2, ge=0)
    """The oldest token that may train, in policy versions."""
    max_attempts: int = Field(3, ge=1)
    """How often a group is tried."""
    max_consecutive_failures: int = Field(4, ge=1)
    """The run ends after so many failed groups in a row, by submission."""

    @model_validator(mode="after")
    def _whole_groups(self) -> ControllerSettings:
        require(
            self.batch_size % self.group_size == 0,
            f"controller.group_size ({self.group_size}) must divide "
            f"controller.batch_size ({self.batch_size})",
        )
        return self
