"""Serves MLflow's own pages over a folder of runs, opened at the newest run's experiment.

MLflow's first page is about applications, and its charts have one metric each, in sections by
alphabet: here reward and pass rate come first, and a value and its bounds are one chart.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from areal_flow.core.pass_rates import PASS_RATE

logger = logging.getLogger(__name__)

VIEW = "intervals"
FIRST = "Reward and pass rate"
FIRST_METRICS = ("rollout/reward_mean", PASS_RATE)
_VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
"""Of an experiment: what MLflow writes when a user shares a view. It adds all other charts."""


def serve(uri: str, *, port: int) -> None:
    from mlflow import MlflowClient

    page = first_page(MlflowClient(tracking_uri=uri, registry_uri=uri))
    warnings.simplefilter("ignore")  # of what MLflow imports
    from mlflow import server

    os.environ |= {
        server.BACKEND_STORE_URI_ENV_VAR: uri,
        server.REGISTRY_STORE_URI_ENV_VAR: uri,
        server.SERVE_ARTIFACTS_ENV_VAR: "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    import uvicorn
    from mlflow.server.fastapi_app import app

    html = Path(server.app.static_folder or "", "index.html").read_text()
    move = f"<script>location.hash || history.replaceState(0, '', {json.dumps(page)})</script>"
    server.app.view_functions["serve"] = lambda: html.replace("<head>", f"<head>{move}", 1)
    print(f"MLflow: http://127.0.0.1:{port}/{page}\nCtrl-C ends it.", flush=True)
    quiet = uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(quiet).run()


def first_page(client: Any) -> str:
    """Give the newest run's experiment the view; return where that is, as the end of an address.

    A database that cannot be written is shown without it.
    """
    from mlflow.exceptions import MlflowException

    experiments = [each.experiment_id for each in client.search_experiments()]
    newest = ["attributes.start_time DESC"]
    runs = client.search_runs(experiments, order_by=newest, max_results=1)
    if not runs:
        return "#/experiments?workflowType=machine_learning"
    (run,) = runs
    experiment, view = run.info.experiment_id, json.dumps(interval_view(run.data.metrics))
    page = f"#/experiments/{experiment}/runs?workflowType=machine_learning"
    logging.getLogger("mlflow.store.db.utils").disabled = True  # a traceback of what is caught
    try:
        client.set_experiment_tag(experiment, _VIEW_TAG, view)
    except MlflowException as error:
        why = str(error).partition("\n")[0]
        logger.warning("MLflow's pages show each bound of an interval by itself: %s", why)
        return page
    return f"{page}&compareRunsMode=CHART&viewStateShareKey={VIEW}"


def interval_view(metrics: Iterable[str]) -> dict[str, Any]:
    names = set(metrics)
    first = [
        {**_chart([name]), "metricSectionId": FIRST} for name in FIRST_METRICS if name in names
    ]
    bounds = {name: [f"{name}_low", f"{name}_high"] for name in sorted(names)}
    bounds = {name: both for name, both in bounds.items() if names.issuperset(both)}
    charts = [_chart([name, *both]) for name, both in bounds.items()]
    hidden = [{**_chart([name]), "deleted": True} for both in bounds.values() for name in both]
    areas = [*([FIRST] if first else []), *sorted({_area(name) for name in bounds})]
    section = {"display": True, "isReordered": True}
    return {
        "compareRunCharts": [*first, *charts, *hidden],
        "compareRunSections": [{"uuid": area, "name": area, **section} for area in areas],
        "isAccordionReordered": True,  # else MLflow sorts the sections
    }


def _area(metric: str) -> str:
    return metric.rpartition("/")[0]


def _chart(metrics: list[str]) -> dict[str, Any]:
    return {
        "type": "LINE",
        "uuid": metrics[0],
        "metricSectionId": _area(metrics[0]),
        "metricKey": metrics[0],
        "selectedMetricKeys": metrics,
        "displayName": metrics[0],
        "runsCountToCompare": 10,
        "range": {},
        "xAxisKey": "step",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
