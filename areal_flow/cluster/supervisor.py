"""Runs one worker process on another machine, for as long as its standard input stays open.

Started over `ssh`, whose server closes that input when the connection ends but signals nobody. The
supervisor loads nothing beyond the standard library, so that it starts at once and cannot hang.

| on the standard input | what follows                                           |
|-----------------------|--------------------------------------------------------|
| `KILL`                | the worker is killed                                   |
| the end               | the worker is asked to end, and killed after `GRACE_S` |
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from threading import Thread

KILL = b"k"
GRACE_S = 5.0


def main(arguments: list[str]) -> int:
    """Run Python with these arguments and this process's number; return as a shell would."""
    command = [sys.executable, *arguments, str(os.getpid())]
    worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    Thread(target=_obey, args=(worker,), daemon=True).start()
    code = worker.wait()
    return 128 - code if code < 0 else code


def _obey(worker: subprocess.Popen[bytes]) -> None:
    if os.read(sys.stdin.fileno(), 1) != KILL:
        worker.terminate()
        with suppress(subprocess.TimeoutExpired):
            worker.wait(GRACE_S)
    worker.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
