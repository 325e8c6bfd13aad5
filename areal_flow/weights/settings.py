"""The settings of how weights travel."""

from __future__ import annotations

from typing import Literal

from areal_flow.settings import Settings

Medium = Literal["auto", "directory", "shared_memory", "broadcast"]
Carrier = Literal["gloo", "nccl", "ipc"]


def carrier_of(device: str, *, shares_card: bool) -> Carrier:
    """Return what carries a broadcast between trainer and generators of a device."""
    if device != "cuda":
        return "gloo"
    return "ipc" if shares_card else "nccl"


class WeightsSettings(Settings):
    """How a policy's weights travel from the trainer to the generators."""

    medium: Medium = "auto"
    """Files in the run directory, shared memory of this machine, or a broadcast over the network;
    auto: shared memory if every worker is on it and six copies fit, else files."""
