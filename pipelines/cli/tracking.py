"""`areal-flow track` and `ui`: runs as MLflow shows them."""

from __future__ import annotations

import os
import socket
import sys
from typing import Annotated

from cyclopts import Parameter

from areal_flow.errors import ConfigError, RunError
from areal_flow.recovery.run_directory import find_run
from pipelines.cli.settings import Given


def track(run: str, /, *, to: Annotated[str, Parameter(metavar="URI")], folders: Given) -> None:
    """Fill an MLflow server with a run's metrics and models, again from step 0.

    Args:
        run: A run's name, or its directory.
        to: The server's address.
    """
    from areal_flow.tracking.registry import track

    num_steps = track(find_run(folders.runs, run).root, to)
    print(f"{to} has all of {run} now; it lacked {num_steps} steps")


def ui(*, port: int = 5000, folders: Given) -> None:
    """Serve the MLflow UI over the runs, on 127.0.0.1.

    Args:
        port: To listen on.
    """
    from areal_flow.tracking.mlflow import default_tracking_uri

    if not (database := folders.runs / "mlflow.db").is_file():
        raise RunError(f"expected {database}, found none: train first with `areal-flow train`")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ConfigError(f"port {port} is taken: choose another with --port N")
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    print(f"MLflow: http://127.0.0.1:{port} (ready in about 20 s; Ctrl-C ends it)", flush=True)
    where = ("--backend-store-uri", default_tracking_uri(folders.runs), "--host", "127.0.0.1")
    few = ("--port", str(port), "--workers", "1")  # a worker of its own for each core otherwise
    os.execv(sys.executable, (sys.executable, "-m", "mlflow", "server", *where, *few))


COMMANDS = (track, ui)
