"""`nox -s ui`: the MLflow UI over the runs beside it, on loopback, with few processes."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

from areal_flow.tracking.registry import default_tracking_uri


def main() -> None:
    """Replace this process by an MLflow server."""
    parser = argparse.ArgumentParser(prog="nox -s ui --")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--port", type=int, default=5000)
    arguments = parser.parse_args()
    database = arguments.runs / "mlflow.db"
    if not database.is_file():
        sys.exit(f"expected {database}, found none: train first with `nox -s train`")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.connect_ex(("127.0.0.1", arguments.port)) == 0:
            sys.exit(f"port {arguments.port} is taken: choose another with -- --port N")
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    print(f"MLflow: http://127.0.0.1:{arguments.port} (ready in about 20 s; Ctrl-C ends it)")
    sys.stdout.flush()
    os.execv(
        sys.executable,
        [
            *(sys.executable, "-m", "mlflow", "server"),
            *("--backend-store-uri", default_tracking_uri(arguments.runs)),
            *("--host", "127.0.0.1", "--port", str(arguments.port), "--workers", "1"),
        ],
    )


if __name__ == "__main__":
    main()
