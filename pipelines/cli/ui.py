"""The MLflow UI over a folder of runs, on loopback, with few processes."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from areal_flow.errors import ConfigError, RunError
from areal_flow.tracking.mlflow import default_tracking_uri


def serve(runs: Path, port: int) -> None:
    """Replace this process by an MLflow server.

    Raises:
        RunError: nothing was tracked in this folder.
        ConfigError: the port is taken.
    """
    if not (runs / "mlflow.db").is_file():
        raise RunError(
            f"expected {runs / 'mlflow.db'}, found none: train first with `areal-flow train`"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ConfigError(f"port {port} is taken: choose another with --port N")
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    print(f"MLflow: http://127.0.0.1:{port} (ready in about 20 s; Ctrl-C ends it)", flush=True)
    command = (
        *(sys.executable, "-m", "mlflow", "server"),
        *("--backend-store-uri", default_tracking_uri(runs)),
        *("--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
    )
    os.execv(sys.executable, command)
