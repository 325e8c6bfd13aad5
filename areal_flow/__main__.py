"""`python -m areal_flow`: the command line, where `areal-flow` is not on the PATH."""

import sys

from pipelines.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
