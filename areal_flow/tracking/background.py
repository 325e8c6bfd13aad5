"""Keeps a sink up to date while a run goes on, on a thread of its own, and never in the run's way.

| who        | waits for                                 | unblocked by               |
|------------|-------------------------------------------|----------------------------|
| the driver | nothing; an answer before it prunes, 2 s  | the thread                 |
| the thread | its pause, then something new             | a timer, then `wake`       |
| the thread | its pause, while its sink is away         | a timer                    |
"""

from __future__ import annotations

import json
import logging
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic

from areal_flow.command import command
from areal_flow.run.durable import replace_file
from areal_flow.run.layout import RunLayout
from areal_flow.tracking.projection import Projection
from areal_flow.tracking.protocol import Tracker

logger = logging.getLogger(__name__)

DELIVER_EVERY_S = 5.0
"""The pause after each delivery, or attempt: several steps cost little more than one."""
COMPLAIN_EVERY_S = 60.0
ANSWER_TIMEOUT_S = 2.0


class RunTracking:
    """What a driver has of tracking: nothing here raises, or waits for a network unbounded."""

    def __init__(self, layout: RunLayout, sink: Tracker | None) -> None:
        """Be ready to deliver from the first `wake` on; without a sink nothing is done."""
        self._layout = layout
        self._sink = sink
        self._protected: frozenset[Path] = frozenset()
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # as last heard
            names = json.loads(layout.tracking.read_text())["protected"]
            self._protected = frozenset(layout.checkpoints / name for name in names)
        self._status: str | None = None
        self._away = sink is None
        self._complained_at = -COMPLAIN_EVERY_S
        self._wake, self._closing = threading.Event(), threading.Event()
        self._asked, self._answered = threading.Event(), threading.Event()
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        if sink is not None:
            self._thread = threading.Thread(
                target=self._run, args=(sink,), name="tracking", daemon=True
            )
            self._thread.start()

    @property
    def model_version(self) -> str | None:
        """The registered version of the newest checkpoint, as far as it is known."""
        return self._sink.model_version if self._sink else None

    @property
    def alias(self) -> str | None:
        """The run's own alias in the registry, as far as it is known."""
        return self._sink.alias if self._sink else None

    def wake(self) -> None:
        """Have delivered what was committed, within `DELIVER_EVERY_S`; returns at once."""
        self._wake.set()

    def protected(self) -> frozenset[Path]:
        """Return the checkpoints that must not be pruned, as last heard if nobody answers now."""
        if not self._away:
            self._answered.clear()
            self._asked.set()
            self._end_pause()
            self._answered.wait(ANSWER_TIMEOUT_S)
        return self._protected

    def close(self, status: str | None, *, timeout_s: float = 20.0) -> None:
        """Deliver what can be delivered within the time, mark the run ended, stop.

        Args:
            status: FINISHED, KILLED or FAILED; None if another driver goes on with the run.
        """
        self._status = status
        self._closing.set()
        self._end_pause()
        if self._thread:
            self._thread.join(timeout_s)

    def _end_pause(self) -> None:
        self._hurry.set()
        self._wake.set()

    def _run(self, sink: Tracker) -> None:
        projection = Projection(self._layout, sink)
        self._wake.wait()  # the first delivery may import a client for seconds
        while True:
            self._hurry.clear()
            self._wake.clear()
            closing = self._closing.is_set()
            if closing and self._status is None:
                return
            try:
                projection.deliver()
                if self._asked.is_set():
                    self._answer(sink)
                if closing and self._status:
                    sink.end(self._status)
                self._away = False
            except Exception as error:  # noqa: BLE001  the thread's border
                self._away = True
                self._answered.set()
                self._complain(error, at_once=closing)
            if closing:
                return
            self._hurry.wait(DELIVER_EVERY_S)
            if not self._away:
                self._wake.wait()

    def _answer(self, sink: Tracker) -> None:
        self._asked.clear()
        self._protected = sink.protected()
        names = sorted(path.name for path in self._protected)
        with suppress(OSError):  # a full disk stops no delivery
            replace_file(self._layout.tracking, json.dumps({"protected": names}))
        self._answered.set()

    def _complain(self, error: Exception, *, at_once: bool) -> None:
        if at_once or monotonic() - self._complained_at > COMPLAIN_EVERY_S:
            logger.warning(
                "the tracker is away; what it lacks is delivered when it is back, or by %s: %s",
                command("track", self._layout.name, runs=self._layout.root.parent),
                error,
            )
            self._complained_at = monotonic()
