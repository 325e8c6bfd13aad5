"""Makes the trainer rank of a process hang or be slow within a step, while its heartbeats go on.

Processes that start with `PATCH` in their environment look for a file named by their number in the
folder that it names: what is in it, `hang`, `slow` or `gpu` (it fails), happens within the next
backward pass.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

FOLDER = "AREAL_FLOW_TEST_STRIKES"
SLOW_S = 8.0

PATCH = "from tests.struck_trainer import watch; watch()"
"""Of a `sitecustomize.py`."""


def prepare(folder: Path, monkeypatch: Any) -> None:
    """Make processes that start from now on look for strikes."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PATCH)
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.syspath_prepend(str(folder))  # workers import from where their driver does


def strike(folder: Path, pid: int, how: str) -> None:
    (folder / str(pid)).write_text(how)


def watch() -> None:
    if FOLDER in os.environ:
        threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    file = Path(os.environ[FOLDER]) / str(os.getpid())
    while True:
        while not file.is_file():
            time.sleep(0.2)
        how = file.read_text()
        file.unlink()
        _strike(how)


def _strike(how: str) -> None:
    import torch

    from areal_flow.training.ranked_model import TrainedModel

    backward = TrainedModel.backward

    def struck(*arguments: Any) -> Any:
        TrainedModel.backward = backward  # type: ignore[method-assign]
        until = time.monotonic() + SLOW_S
        while how == "slow" and time.monotonic() < until:
            pass
        while how == "hang":
            time.sleep(1)
        if how == "gpu":
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
        return backward(*arguments)

    TrainedModel.backward = struck  # type: ignore[method-assign]
