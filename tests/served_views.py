"""`areal-flow view` as a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served_view(*runs: Path) -> Iterator[str]:
    """Serve pages of runs; return their address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "pipelines.cli.main", "view", *map(str, runs), "--port", port]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            output = server.stdout.readline() + server.stdout.readline()
            assert f"ssh -N -L {port}:127.0.0.1:{port}" in output
            yield output.split()[0]
        finally:
            server.terminate()
