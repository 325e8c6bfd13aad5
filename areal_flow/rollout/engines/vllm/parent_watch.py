"""Ends a process that Python's `multiprocessing` started when its parent ends.

It waits on the pipe that `multiprocessing` gives each child, which the kernel closes however the
parent ends. `PR_SET_PDEATHSIG` would signal when the starting thread ends, possibly much earlier.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import current_process, parent_process


def end_with_parent() -> None:
    """Kill this process when its parent ends, or now if it has ended.

    This does nothing in a process that `multiprocessing` did not start.
    """
    # While a child unpickles, and so imports, its target, it does not know its parent yet.
    is_unpickling = getattr(current_process(), "_inheriting", False)
    if is_unpickling or parent_process() is not None:
        threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    while (parent := parent_process()) is None:
        time.sleep(0.05)
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
