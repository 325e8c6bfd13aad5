"""What decides whether a replay can be equal bit for bit: the numeric environment of a rank."""

from __future__ import annotations

import json
import os

import torch

from areal_flow.config import TrainerSettings


def numeric_environment(settings: TrainerSettings, *, num_ranks: int) -> str:
    """Return the numeric environment as JSON."""
    return json.dumps(
        {
            "torch": torch.__version__,
            "ranks": num_ranks,
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "mkldnn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
            "device": settings.device,
            "device_name": _device_name(settings.device),
            "dtype": settings.dtype,
            "machine": os.uname().machine,
        },
        sort_keys=True,
    )


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
