"""Serves the pages on this machine alone: other hosts, and pages of other sites, get nothing."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from importlib import import_module
from threading import Thread

import panel as pn

from areal_flow.run.layout import RunLayout
from areal_flow.store.queries import Run
from pipelines.view.page import Page

HOST = "127.0.0.1"
_CSS = "body { margin: 0 auto; padding: 12px 8px; max-width: 1180px; }"


def serve(layouts: Sequence[RunLayout], *, port: int) -> None:
    pn.extension("tabulator", raw_css=[_CSS])
    Thread(target=import_module, args=["areal_flow.trainer.step"], daemon=True).start()
    tunnel = f"ssh -N -L {port}:{HOST}:{port} {socket.gethostname()}"
    print(f"http://{HOST}:{port}/ shows {', '.join(layout.name for layout in layouts)}")
    print(f"On another machine run `{tunnel}` first. Ctrl-C ends it.", flush=True)
    origins = [f"{HOST}:{port}", f"localhost:{port}"]
    options = {"show": False, "verbose": False, "title": "areal-flow view"}
    page = lambda: Page([Run(layout.root) for layout in layouts]).layout()  # noqa: E731
    pn.serve(page, address=HOST, port=port, websocket_origin=origins, **options)
