"""Output of a driver and its workers: on the terminal or as JSON, and in `train.log`.

Each line of the log begins with the local time, then with `[WORKER]` if a worker printed it. A
driver that resumes a run appends to its log.
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
_messages = logging.getLogger("areal_flow.messages")
_messages.setLevel(logging.INFO)
_messages.propagate = False
_messages.addHandler(logging.NullHandler())
_worker_output = logging.getLogger("areal_flow.output")  # see `cluster.launchers.child`


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if record.name == _messages.name:
            return f"{self.formatTime(record, _TIME)} {record.getMessage()}".rstrip()
        if worker := getattr(record, "worker", ""):
            return f"{self.formatTime(record, _TIME)} [{worker}] {record.getMessage()}"
        return super().format(record)


class _JsonLines(logging.Handler, TextIOBase):
    """Writes log records, and lines written to it as a stream, as JSON objects."""

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
    """Print everything from now on as `text`, or as `json` for other programs."""
    if log_format == "json":
        sys.stdout = handler = _JsonLines(run, os.fdopen(os.dup(1), "w"))
        os.dup2(2, 1)  # output of other processes is no event
        _worker_output.handlers = logging.getLogger().handlers = [handler]


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore a full disk: the line was printed already, and a log must not end a run."""


def say(*parts: RenderableType) -> None:
    log(*parts)
    # A live display redirects `print` above itself; another console would write into it.
    print(rendered(make_console(), *parts), end="", flush=True)


def log(*parts: RenderableType) -> None:
    """Log lines, facts and tables without printing them; does nothing outside `log_kept`."""
    plain = Console(width=PIPE_WIDTH, file=StringIO(), color_system=None, **PLAIN)
    for line in rendered(plain, *parts).removesuffix("\n").split("\n"):
        _messages.info("%s", line)


@contextmanager
def log_kept(path: Path) -> Iterator[None]:
    """Append every message and warning to a file inside the `with` block."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s: %(message)s", _TIME))
    loggers = (_messages, _worker_output, logging.getLogger())
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
    """Return the warnings and errors of a log: the time, and the first line of the message."""
    # A driver that is killed can leave half a character.
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    matches = (_WARNING.fullmatch(line) for line in text.splitlines())
    return [(match[1], match[2]) for match in matches if match]


def logged_lines(layout: RunLayout, num_read: Counter[Path]) -> Iterator[str]:
    """Yield the lines of a run's log, and of its workers' jobs with `[WORKER]` before them.

    `num_read` counts the bytes read of each file: a second call yields only new lines.
    """
    for path in (layout.log, *sorted(layout.jobs.glob("*.log"))):
        # A file's name ends with the number of the job, or the suffix of the Pod.
        before = f"[{path.stem.rpartition('-')[0]}] " if path.parent == layout.jobs else ""
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(num_read[path])
            for line in file:
                if line.endswith(b"\n"):  # otherwise it is still being written
                    num_read[path] += len(line)
                    yield before + line.decode(errors="replace").rstrip()
