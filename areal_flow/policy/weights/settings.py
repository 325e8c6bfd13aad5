"""The settings of how weights travel."""

from __future__ import annotations

from typing import Literal

from areal_flow.core.settings import Settings

Medium = Literal["auto", "directory", "shared_memory"]


class WeightsSettings(Settings):
    """How a policy's weights travel from the trainer to the generators."""

    medium: Medium = "auto"
    """Files in the run directory, or shared memory of this machine; auto: shared memory if every
    worker is on it and six copies fit, else files."""
