"""The program `areal-flow`, also as `python -m areal_flow` where it is not on the PATH."""

from __future__ import annotations

import atexit
import os
import signal
import sys


def main() -> int:
    """Import and run the command line; Ctrl-C during the imports ends it without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    atexit.register(_discard_errors)  # the first one runs last
    from pipelines.cli.main import main

    signal.signal(signal.SIGINT, handler)
    return main()


def _discard_errors() -> None:
    """Discard what is printed after the program has ended.

    DuckDB 2.0 reports forty lines of leaks where other libraries keep Python's modules until then.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


if __name__ == "__main__":
    sys.exit(main())
