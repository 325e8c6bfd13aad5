"""An append-only file of events on their way elsewhere, and how far they got. No MLflow here.

mlflow-spool.jsonl      one JSON object a line
mlflow-spool.offset     bytes delivered; behind after a crash, never ahead
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_flow.durable import replace_file

logger = logging.getLogger(__name__)


class Spool:
    """Survives a dead receiver and a dead sender. Any thread may append, one delivers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_path = path.with_suffix(".offset")
        self._lock = threading.Lock()
        self._path.touch()
        self._drop_torn_line()

    def append(self, event: dict[str, Any]) -> None:
        """Add one event; on a disk that refuses, log it and go on: metrics never stop a run."""
        line = json.dumps(event) + "\n"
        try:
            with self._lock, self._path.open("a") as file:
                file.write(line)
        except OSError as error:
            logger.warning(
                "an event for MLflow is lost, %s cannot be written: %s", self._path, error
            )

    def pending(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield undelivered events, each with the offset to confirm once it is delivered."""
        offset = self._delivered()
        with self._path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                try:
                    event = json.loads(line)
                except ValueError:
                    logger.warning("a damaged line of %s is left out", self._path)
                    continue
                yield event, offset

    def confirm(self, offset: int) -> None:
        """Remember that everything before `offset` was delivered."""
        replace_file(self._offset_path, str(offset))

    def _delivered(self) -> int:
        return int(self._offset_path.read_text()) if self._offset_path.exists() else 0

    def _drop_torn_line(self) -> None:
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            with self._path.open("rb+") as file:
                file.truncate(whole)
