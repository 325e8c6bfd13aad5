"""MLflow as a sink: metrics by step, model versions, dataset inputs. The only importer of MLflow.

How far a run was delivered is a tag of its MLflow run, written with each step's numbers: a server
that lost the run, or never had it, is filled from the first step on.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_flow.config import TrackingSettings
from areal_flow.errors import ModelError
from areal_flow.layout import RunLayout
from areal_flow.recovery.run_directory import check_schema_version
from areal_flow.tracking.aliases import Aliases, source_path

IDENTITY_TAG = "areal_flow.run"
DELIVERED_TAG = "areal_flow.delivered_step"
ALIAS_TAG = "areal_flow.alias"
"""Of the MLflow run: the alias that it was given stays its own, also under another name."""
SQLITE = "sqlite:///"
_FAST_FAILURE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
}
"""MLflow's own retries would hold a thread for four minutes."""


class MlflowTracker:
    """A `Tracker` over an MLflow server or database."""

    def __init__(self, layout: RunLayout, settings: TrackingSettings, uri: str = "") -> None:
        """Remember what to deliver where; the first call connects.

        Args:
            uri: of tracking and registry; the database beside the runs, if empty.
        """
        self.uri = uri or default_tracking_uri(layout.root.parent)
        self.run_id = ""
        self.model_version: str | None = None
        self.alias: str | None = None
        self._layout = layout
        self._identity = check_schema_version(layout)
        self._experiment = settings.experiment
        self._model = settings.registered_model
        self._client: Any = None

    def begin(self) -> int:
        client = self._connect()
        if known := self._known_run():
            self.run_id = known.info.run_id
            client.update_run(self.run_id, status="RUNNING")
            return int(known.data.tags.get(DELIVERED_TAG, 0))
        found = client.get_experiment_by_name(self._experiment)
        experiment_id = found.experiment_id if found else client.create_experiment(self._experiment)
        tags = {IDENTITY_TAG: self._identity}
        run = client.create_run(experiment_id, run_name=self._layout.name, tags=tags)
        self.run_id = run.info.run_id
        return 0

    def log_parameters(self, parameters: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(self.run_id).data.params
        new = [Param(name, str(value)) for name, value in parameters.items() if name not in known]
        self._client.log_batch(self.run_id, params=new)

    def log_step(self, step: int, metrics: Mapping[str, float], *, timestamp_ms: int) -> None:
        self._log(step, metrics, timestamp_ms, tags={DELIVERED_TAG: str(step)})

    def log_evaluation(
        self, policy_version: int, metrics: Mapping[str, float], *, timestamp_ms: int
    ) -> None:
        self._log(policy_version, metrics, timestamp_ms, tags={})

    def register_checkpoints(self, present: Mapping[Path, Mapping[str, str]]) -> None:
        known = {version.source: version for version in self._versions()}
        sources = {f"file://{path}": dict(tags) for path, tags in present.items()}
        for source, tags in sources.items():
            if source not in known:
                self._log_dataset(tags)
                known[source] = self._register(source, tags)
            self._tag(known[source], tags)
        for source, version in known.items():
            if source not in sources:
                self._client.delete_model_version(self._model, version.version)
        if sources:
            self.model_version = str(known[list(sources)[-1]].version)
            self.alias = self._own_alias()
            aliases = self._aliases()
            aliases.point(self.alias, self.model_version)
            aliases.point_to_best()

    def protected(self) -> frozenset[Path]:
        versions = self._versions()
        if not versions:
            return frozenset()
        named = self._aliases().keeping(without=self._own_alias())
        return frozenset(
            source_path(found.source) for found in versions if str(found.version) in named
        )

    def remove(self) -> int:
        database = self.uri.removeprefix("sqlite:///")
        if database != self.uri and not Path(database).is_file():
            return 0  # to ask would make one
        self._connect()
        if (known := self._known_run()) is None:
            return 0
        self.run_id = known.info.run_id
        versions = self._versions()
        for found in versions:
            self._client.delete_model_version(self._model, found.version)
        self._client.delete_run(self.run_id)
        if versions:
            self._aliases().point_to_best()
        return len(versions)

    def is_reachable(self) -> bool:
        try:
            self._connect().search_experiments(max_results=1)
        except Exception:  # noqa: BLE001  whatever it is, the server is not there
            return False
        return True

    def end(self, status: str) -> None:
        self._client.set_terminated(self.run_id, status=status)
        if status == "FINISHED" and self.model_version:
            self._aliases().point_to_current(self.model_version)

    def _connect(self) -> Any:
        if self._client is None:
            for name, value in _FAST_FAILURE.items():
                os.environ.setdefault(name, value)
            logging.getLogger("alembic").setLevel(logging.WARNING)
            from mlflow import MlflowClient

            logging.getLogger("mlflow").setLevel(logging.WARNING)
            self._client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        return self._client

    def _known_run(self) -> Any | None:
        """Return the MLflow run of this run, whatever both are called now."""
        found = self._client.get_experiment_by_name(self._experiment)
        mine = f"tags.`{IDENTITY_TAG}` = '{self._identity}'"
        runs = found and self._client.search_runs([found.experiment_id], mine, max_results=1)
        return runs[0] if runs else None

    def _log(
        self, step: int, metrics: Mapping[str, float], timestamp_ms: int, *, tags: dict[str, str]
    ) -> None:
        from mlflow.entities import Metric, RunTag

        points = [Metric(name, value, timestamp_ms, step) for name, value in metrics.items()]
        named = [RunTag(name, value) for name, value in tags.items()]
        self._client.log_batch(self.run_id, metrics=points, tags=named)

    def _versions(self) -> list[Any]:
        """Return the model versions of this run."""
        return list(self._client.search_model_versions(f"run_id = '{self.run_id}'"))

    def _register(self, source: str, tags: dict[str, str]) -> Any:
        if not self._client.search_registered_models(f"name = '{self._model}'"):
            self._client.create_registered_model(self._model)
        return self._client.create_model_version(
            self._model, source=source, run_id=self.run_id, tags=tags
        )

    def _tag(self, version: Any, tags: dict[str, str]) -> None:
        """Give a version the tags that it lacks, or has otherwise."""
        for name, value in tags.items():
            if version.tags.get(name) != value:
                self._client.set_model_version_tag(self._model, version.version, name, value)

    def _aliases(self) -> Aliases:
        return Aliases(self._client, self._model)

    def _own_alias(self) -> str:
        """Return the alias of this run, which it keeps for good."""
        if known := self._client.get_run(self.run_id).data.tags.get(ALIAS_TAG):
            return str(known)
        alias = self._aliases().free_for(self._layout, identity=self._identity)
        self._client.set_tag(self.run_id, ALIAS_TAG, alias)
        return alias

    def _log_dataset(self, tags: Mapping[str, str]) -> None:
        """Name the version of the trajectories that a checkpoint was trained from as an input."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        version, num_rows = (int(tags[f"trajectories_{name}"]) for name in ("version", "watermark"))
        dataset = Dataset(
            name="trajectories",
            digest=f"v{version}",
            source_type="lance",
            source=json.dumps({"uri": str(self._layout.trajectories), "version": version}),
            profile=json.dumps({"num_rows": num_rows}),
        )
        context = [InputTag("mlflow.data.context", "training")]
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, context)])


def default_tracking_uri(runs: Path) -> str:
    """Return the database beside the runs."""
    return f"sqlite:///{(runs / 'mlflow.db').resolve()}"


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """A model version as the registry has it."""

    name: str
    version: str
    source: Path
    tags: dict[str, str]


def registered_version(uri: str, reference: str) -> RegisteredVersion:
    """Return the model version behind `models:/NAME@ALIAS` or `models:/NAME/VERSION`.

    Raises:
        ModelError: the registry does not know it.
    """
    database = uri.removeprefix(SQLITE)
    if database != uri and not Path(database).is_file():  # a client would make it
        raise ModelError(
            f"expected a registry at {uri} for {reference!r}, found none: give --runs or --registry"
        )
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    name, at, alias = reference.removeprefix("models:/").partition("@")
    try:
        if at:
            version = client.get_model_version_by_alias(name, alias)
        else:
            version = client.get_model_version(*name.rsplit("/", 1))
    except (MlflowException, TypeError) as error:
        raise ModelError(
            f"expected models:/NAME@ALIAS or models:/NAME/VERSION in the registry {uri}, found "
            f"{reference!r}: {error}"
        ) from error
    return RegisteredVersion(
        name=version.name,
        version=str(version.version),
        source=source_path(str(version.source)),
        tags=dict(version.tags),
    )
