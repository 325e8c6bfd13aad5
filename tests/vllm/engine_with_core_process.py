"""A program that starts an engine with a core process, and waits to be killed.

python -m tests.vllm.engine_with_core_process MODEL_DIRECTORY
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from areal_flow.rollout.engines.vllm.core import CoreProcess
from areal_flow.rollout.engines.vllm.engine import start_vllm_engine
from tests.fakes import MemoryReader
from tests.vllm.models import SETTINGS, published

if __name__ == "__main__":
    model = Path(sys.argv[1])
    reader = MemoryReader(published(model))
    engine = asyncio.run(start_vllm_engine(model, SETTINGS, reader, make_core=CoreProcess))
    print("started", flush=True)
    time.sleep(600)
