"""The program `areal-flow`, also as `python -m areal_flow` where it is not on the PATH."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Import and run the command line; Ctrl-C during the imports ends it without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipelines.cli.main import main

    signal.signal(signal.SIGINT, handler)
    return main()


if __name__ == "__main__":
    sys.exit(main())
