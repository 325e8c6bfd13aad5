"""What a driver says, on the terminal and in `train.log`, where its warnings stand as well.

Lines of the log are plain text with the local time before them. A driver that goes on with a run
appends to the log of those before it. The processes of workers write to the terminal alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path

from rich.console import Console, RenderableType

from pipelines.console.tables import PIPE_WIDTH, PLAIN, make_console, rendered

_TIME = "%Y-%m-%d %H:%M:%S"
_WARNING = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:WARNING|ERROR|CRITICAL) (.*)")
_said = logging.getLogger("areal_flow.said")
_said.setLevel(logging.INFO)
_said.propagate = False
_said.addHandler(logging.NullHandler())


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if record.name == _said.name:
            return f"{self.formatTime(record, _TIME)} {record.getMessage()}".rstrip()
        return super().format(record)


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
    loggers = (_said, logging.getLogger())
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
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = (_WARNING.fullmatch(line) for line in lines)
    return [(match[1], match[2]) for match in found if match]
