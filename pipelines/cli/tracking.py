"""`areal-flow track` and `ui`: runs as MLflow shows them."""

from __future__ import annotations

import socket
from typing import Annotated

from cyclopts import Parameter, validators

from areal_flow.command import command
from areal_flow.config import load_recipe
from areal_flow.errors import ConfigError, RunError
from pipelines.cli.settings import Given


def track(
    run: str, /, *, to: Annotated[str | None, Parameter(metavar="URI")] = None, folders: Given
) -> None:
    """Fill an MLflow server with a run's metrics and models, again from step 0.

    Args:
        run: A run's name, or its directory.
        to: The server's address; that of the run's recipe by default.
    """
    from areal_flow.tracking.registry import track

    layout = folders.find(run).whole_run("track")
    uri = to or load_recipe(layout.config).tracking.uri
    num_steps = track(layout.root, uri)
    print(
        f"{uri or 'the database beside the runs'} has all of {run} now; it lacked {num_steps} steps"
    )


def ui(
    *,
    port: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=65_535))] = 5000,
    folders: Given,
) -> None:
    """Serve the MLflow UI on 127.0.0.1, opened where the newest run is.

    Args:
        port: To listen on.
    """
    from areal_flow.tracking.mlflow_pages import serve
    from areal_flow.tracking.model_registry import default_tracking_uri

    if not (database := folders.runs / "mlflow.db").is_file():
        raise RunError(
            f"expected {database}, found none: train first with "
            f"`{command('train', runs=folders.runs)}`"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ConfigError(f"port {port} is taken: choose another with --port N")
    print("MLflow is starting, which takes about 10 s", flush=True)
    serve(default_tracking_uri(folders.runs), port=port)


COMMANDS = (track, ui)
