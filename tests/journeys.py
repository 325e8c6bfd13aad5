"""The files on the way of a group, and of a trajectory's tokens, recorded in a run of two steps.

    python -m tests.journeys docs/architecture.md    writes them into the page

A file is on a journey if one of its functions is handed the group, or the tokens, between the two
ends: as an argument, in whatever form they have there. The run has one group a step, and all its
workers are in this process. What is recorded is the second step, whose parts are all made.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import torch
from distributed import Future, Worker

from areal_flow.cluster import launch
from areal_flow.cluster.launchers.child import ProcessorUse
from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.cluster.worker import make_worker, worker_options
from areal_flow.config.cluster import ClusterSettings
from areal_flow.core.types import (
    Completion,
    Episode,
    GroupReceipt,
    GroupRequest,
    Score,
    StepRequest,
    StepResult,
    TrajectoryReceipt,
)
from areal_flow.flow.flow import Flow
from areal_flow.log.run_log import RunLog
from areal_flow.rewards.protocol import RewardInput
from areal_flow.rollout.engines.threaded_engine import ThreadedEngine
from areal_flow.rollout.workflows.episode import TrajectoryDraft
from areal_flow.training.optimizers import PolicyAdamW
from areal_flow.training.sequences import TrainingSequence
from benchmarks.harness import write_between
from tests.integration.runs import run_small, small_recipe

ROOT = Path(__file__).parents[1]
PRODUCT = tuple(f"{ROOT / folder}{os.sep}" for folder in ("areal_flow", "pipelines", "schemas"))


@dataclass(frozen=True)
class Journey:
    """From the call of a function to the call, or the return, of another."""

    name: str
    start: CodeType
    end: CodeType
    end_event: str
    carriers: tuple[type, ...]
    """What holds the group, or the tokens, on the way."""

    def files(self, events: list[Event]) -> list[str]:
        """Return the files in the order in which they are reached, of the last full journey."""
        begin, first, last, has_ended = 0, 0, 0, True
        for i, each in enumerate(events):
            # A coroutine that goes on is called again, and one that waits returns.
            if has_ended and each.is_at(self.start, "call"):
                begin, has_ended = i, False
            elif each.is_at(self.end, self.end_event):
                first, last, has_ended = begin, i, True
        handled = (each for each in events[first : last + 1] if each.carries(self.carriers))
        return list(
            dict.fromkeys(str(Path(each.code.co_filename).relative_to(ROOT)) for each in handled)
        )


@dataclass(frozen=True)
class Event:
    kind: str
    code: CodeType
    argument_types: frozenset[type]

    def is_at(self, code: CodeType, kind: str) -> bool:
        return self.code is code and self.kind == kind

    def carries(self, carriers: tuple[type, ...]) -> bool:
        return any(issubclass(kind, carriers) for kind in self.argument_types)


GROUP = Journey(
    "A group, from its admission to its ledger row,",
    Flow.submit.__code__,
    RunLog.append.__code__,
    "return",
    (
        *(Episode, GroupRequest, Completion, TrajectoryDraft, pa.Table, RewardInput),
        *(Score, Future, GroupReceipt, TrajectoryReceipt, StepRequest, StepResult),
    ),
)
TRAJECTORY = Journey(
    "A trajectory's tokens, from the request to the optimizer,",
    ThreadedEngine.generate.__code__,
    PolicyAdamW.update.__code__,
    "call",
    (
        *(GroupRequest, Completion, TrajectoryDraft, pa.Table, pa.Array, np.ndarray),
        *(torch.Tensor, TrainingSequence),
    ),
)


def record() -> list[Event]:
    """Train for two steps of one group each; return the calls of the product's functions."""
    events: list[Event] = []
    edges = {each.end for each in (GROUP, TRAJECTORY)}

    def note(frame: FrameType, kind: str, argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PRODUCT):
            return
        if kind == "call":
            events.append(Event(kind, code, frozenset(_types(_arguments(frame), depth=3))))
        elif kind == "return" and code in edges:
            events.append(Event(kind, code, frozenset()))

    recipe = small_recipe(
        schedule="sync",
        num_steps=2,
        controller={"batch_size": 4, "group_size": 4},
        algorithm={"num_minibatches": 1},
        cluster={"num_generators": 1, "num_reward_workers": 1},
        prompts={"num_prompts": 8, "num_held_out": 0},
        sft={"num_steps": 2},
    )
    with TemporaryDirectory() as folder, patch.object(launch, "make_launcher", InThisProcess):
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            run_small(Path(folder) / "run", recipe)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return events


def _arguments(frame: FrameType) -> list[Any]:
    code = frame.f_code
    takes_more = sum(bool(code.co_flags & flag) for flag in (0x04, 0x08))  # *args, **kwargs
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + takes_more]
    held = frame.f_locals
    return [held[name] for name in names if name in held]


def _types(value: Any, *, depth: int) -> Iterator[type]:
    yield type(value)
    if depth and isinstance(value, tuple | list | dict):
        for each in list(value.values() if isinstance(value, dict) else value)[:4]:
            yield from _types(each, depth=depth - 1)


class InThisProcess:
    """A launcher whose workers are in the driver's event loop."""

    keeps_devices = True
    files_per_worker = 0

    def __init__(self, scheduler: str, settings: ClusterSettings, *_: object, **__: object) -> None:
        self._scheduler = scheduler
        self._network = settings.network
        self._workers: dict[str, Worker] = {}

    async def start(self, placement: WorkerPlacement, on_exit: Callable[[str], None]) -> None:
        options = json.loads(worker_options(placement, self._scheduler, self._network))
        self._workers[placement.name] = await make_worker(**options)

    def kill(self, name: str) -> bool:
        return False

    async def stop(self, name: str) -> None:
        if name in self._workers:
            await self._workers.pop(name).close()

    def preview(self, placement: WorkerPlacement) -> str:
        return placement.name

    def pid(self, name: str) -> int | None:
        return None

    def processor_use(self, name: str) -> ProcessorUse:
        return ProcessorUse()


def as_markdown(events: list[Event]) -> str:
    """Return both journeys as the page on the architecture lists them."""
    paragraphs = []
    for journey in (GROUP, TRAJECTORY):
        files = journey.files(events)
        lines = "\n".join(f"{number}. `{file}`" for number, file in enumerate(files, 1))
        paragraphs.append(f"**{journey.name}** crosses {len(files)} files:\n\n{lines}")
    return "\n\n".join(paragraphs)


if __name__ == "__main__":
    write_between(Path(sys.argv[1]), "journeys", as_markdown(record()))
