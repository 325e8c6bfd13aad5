"""The settings of how weights travel."""

from __future__ import annotations

from typing import Literal

from areal_flow.core.settings import Settings

Medium = Literal["auto", "directory", "shared_memory"]


class WeightsSettings(Settings):
    """How a policy's weights travel from the trainer to the generators."""

    medium: Medium = "auto"
    """`directory`: files in the run directory; `shared_memory` of this machine; `auto`: shared
    memory if all workers are on this machine and six copies fit, else files."""
