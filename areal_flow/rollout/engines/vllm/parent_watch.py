"""Ends a process that Python's `multiprocessing` started with the one that started it.

By the pipe that `multiprocessing` gives a child for that: the kernel closes it however the parent
ends. Its signal for the same (`PR_SET_PDEATHSIG`) comes when the thread ends that started the
child, which may be long before.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import current_process, parent_process


def end_with_parent() -> None:
    """Have this process killed when its parent ends, at once if it has ended.

    A process that `multiprocessing` did not start is left alone.
    """
    # A child that unpickles, and so imports, what it will run does not know its parent yet.
    is_unpickling = getattr(current_process(), "_inheriting", False)
    if is_unpickling or parent_process() is not None:
        threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    while (parent := parent_process()) is None:
        time.sleep(0.05)
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
