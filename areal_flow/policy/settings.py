"""Settings of the policy: its low-rank adapter, and how its weights travel."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_flow.core.settings import Settings

Medium = Literal["auto", "directory", "shared_memory"]


class LoraSettings(Settings):
    """A low-rank adapter, trained instead of the policy's weights and merged into what is served.

    Supervised fine-tuning before reinforcement learning trains the weights themselves.
    """

    rank: int = Field(0, ge=0)
    """Rank of the adapter; 0: train all weights."""
    alpha: float = Field(32.0, gt=0)
    """LoRA's alpha: the adapter is scaled by alpha / rank."""
    target_modules: str = "all-linear"
    """Suffixes of matrix names (`q_proj,v_proj`), or `all-linear`: all but embedding and head."""

    @property
    def modules(self) -> str | list[str]:
        names = [name.strip() for name in self.target_modules.split(",")]
        return names[0] if names == ["all-linear"] else names


class WeightsSettings(Settings):
    """How a policy's weights travel from the trainer to the generators."""

    medium: Medium = "auto"
    """`directory`: files in the run directory; `shared_memory` of this machine; `auto`: shared
    memory if all workers are on this machine and six copies fit, else files."""
