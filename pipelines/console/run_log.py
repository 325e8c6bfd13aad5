"""What a driver and its workers say: on the terminal or as JSON, and in `train.log`.

Lines of the log are plain text with the local time before them, and `[WORKER]` if a worker printed
them. A driver that goes on with a run appends to the log of those before it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import StringIO, TextIOBase
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType

from areal_flow.core.layout import RunLayout
from pipelines.console.tables import PIPE_WIDTH, PLAIN, make_console, rendered

_TIME = "%Y-%m-%d %H:%M:%S"
_WARNING = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:WARNING|ERROR|CRITICAL) (.*)")
_said = logging.getLogger("areal_flow.said")
_said.setLevel(logging.INFO)
_said.propagate = False
_said.addHandler(logging.NullHandler())
_of_workers = logging.getLogger("areal_flow.output")  # see `cluster.launchers.child`


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if record.name == _said.name:
            return f"{self.formatTime(record, _TIME)} {record.getMessage()}".rstrip()
        if worker := getattr(record, "worker", ""):
            return f"{self.formatTime(record, _TIME)} [{worker}] {record.getMessage()}"
        return super().format(record)


class _JsonLines(logging.Handler, TextIOBase):
    """Writes each event as an object, and so each line that is written to it."""

    def __init__(self, run: str, output: TextIO) -> None:
        super().__init__()
        self._run, self._output, self._step, self._line = run, output, 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        message = self.format(record)
        if match := re.match(r"\s*step (\d+)/", message):
            self._step = int(match[1])
        event = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "run": self._run,
            "step": self._step,
            "worker": getattr(record, "worker", "driver"),
            "message": message,
        }
        print(json.dumps(event), file=self._output, flush=True)

    def write(self, text: str) -> int:
        *lines, self._line = f"{self._line}{text}".split("\n")
        for line in filter(str.strip, lines):
            self.handle(logging.makeLogRecord({"msg": line, "levelname": "INFO"}))
        return len(text)


def print_as(log_format: str, run: str) -> None:
    """Have all that this process prints from now on as `text`, or as `json` for other programs."""
    if log_format == "json":
        sys.stdout = handler = _JsonLines(run, os.fdopen(os.dup(1), "w"))
        os.dup2(2, 1)  # what other processes print is no event
        _of_workers.handlers = logging.getLogger().handlers = [handler]


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore a full disk: the line was printed already, and a log must not end a run."""


def say(*parts: RenderableType) -> None:
    log(*parts)
    # `print` comes out above a live display, through which a console would write.
    print(rendered(make_console(), *parts), end="", flush=True)


def log(*parts: RenderableType) -> None:
    """Log lines, facts and tables without printing them; nothing where no log is kept."""
    plain = Console(width=PIPE_WIDTH, file=StringIO(), color_system=None, **PLAIN)
    for line in rendered(plain, *parts).removesuffix("\n").split("\n"):
        _said.info("%s", line)


@contextmanager
def log_kept(path: Path) -> Iterator[None]:
    """Append everything that is said, and every warning, to a file while this is entered."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s: %(message)s", _TIME))
    loggers = (_said, _of_workers, logging.getLogger())
    logging.captureWarnings(True)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger in loggers:
            logger.removeHandler(handler)
        with suppress(OSError):
            handler.close()


def logged_warnings(path: Path) -> list[tuple[str, str]]:
    """Return the warnings and errors of a log: when, and the first line of what was said."""
    # A driver that is killed can leave half a character.
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    matches = (_WARNING.fullmatch(line) for line in text.splitlines())
    return [(match[1], match[2]) for match in matches if match]


def logged_lines(layout: RunLayout, num_read: Counter[Path]) -> Iterator[str]:
    """Yield the lines of a run's log, and of its workers' jobs with `[WORKER]` before them.

    `num_read` counts the bytes of each file that were read: a second call yields what is new.
    """
    for path in (layout.log, *sorted(layout.jobs.glob("*.log"))):
        # The number of a job, or the end of a Pod's name, ends its file's name.
        before = f"[{path.stem.rpartition('-')[0]}] " if path.parent == layout.jobs else ""
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(num_read[path])
            for line in file:
                if line.endswith(b"\n"):  # else it is being written
                    num_read[path] += len(line)
                    yield before + line.decode(errors="replace").rstrip()
