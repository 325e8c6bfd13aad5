"""Settings of every test: few threads, quick properties, no network."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Commands are printed by their names where PATH leads to them.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "quick",
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=True,
)
settings.load_profile("quick")


@pytest.fixture(autouse=True)
def one_torch_thread(request: pytest.FixtureRequest) -> None:
    """Use one thread, like a worker, since some tests compare bits."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
