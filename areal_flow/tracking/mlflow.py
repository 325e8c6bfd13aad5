"""Events of a run in, MLflow out: metrics by policy version, model versions, dataset inputs.

The only importer of MLflow, and never in the training path: callers append to a spool, one thread
delivers. While the server is away events wait on disk; a later driver delivers what is left.

| who          | waits for                | unblocked by                   |
|--------------|--------------------------|--------------------------------|
| a caller     | nothing but a local file |                                |
| the thread   | events                   | `append`, or a retry's timer   |
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time
from typing import Any, Protocol

from areal_flow.spool import Spool

logger = logging.getLogger(__name__)

RETRY_EVERY_S = 5.0
COMPLAIN_EVERY_S = 60.0
_FAST_FAILURE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
}


class Tracker(Protocol):
    """Where a run's numbers go. Nothing here blocks on a network or raises for one."""

    protected: frozenset[Path]
    """Checkpoints that somebody refers to by an alias other than `current`: not to be pruned."""

    def log_parameters(self, parameters: dict[str, Any]) -> None: ...

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None: ...

    def register_checkpoint(self, path: Path, tags: dict[str, str]) -> None:
        """Make a checkpoint directory a model version with the alias `current`, without a copy."""
        ...

    def forget_checkpoint(self, path: Path) -> None:
        """Remove the model version of a checkpoint that was pruned."""
        ...

    def log_dataset(self, path: Path, *, version: int, num_rows: int) -> None: ...

    def close(self, status: str | None) -> None:
        """Deliver what can be delivered, mark the run ended, stop; None: another driver goes on."""
        ...


class MlflowTracker:
    """A `Tracker` over MLflow; what it knows of the server is as of its last checkpoint."""

    def __init__(
        self, spool_path: Path, *, uri: str, experiment: str, run_name: str, registered_model: str
    ) -> None:
        self.uri = uri
        self.run_id: str | None = None
        self.model_version: str | None = None
        self.protected: frozenset[Path] = frozenset()
        self._experiment = experiment
        self._run_name = run_name
        self._model = registered_model
        self._spool = Spool(spool_path)
        self._run_id_path = spool_path.with_suffix(".run_id")
        self._client: Any = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._deliver_forever, name="mlflow", daemon=True)
        self._thread.start()

    def log_parameters(self, parameters: dict[str, Any]) -> None:
        self._append(kind="parameters", parameters=parameters)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self._append(kind="metrics", step=step, metrics=metrics, timestamp_ms=int(time() * 1000))

    def register_checkpoint(self, path: Path, tags: dict[str, str]) -> None:
        self._append(kind="checkpoint", path=str(path), tags=tags)

    def forget_checkpoint(self, path: Path) -> None:
        self._append(kind="forget", path=str(path))

    def log_dataset(self, path: Path, *, version: int, num_rows: int) -> None:
        self._append(kind="dataset", path=str(path), version=version, num_rows=num_rows)

    def close(self, status: str | None, *, timeout_s: float = 20.0) -> None:
        if status is None:
            return
        self._append(kind="end", status=status)
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)

    def _append(self, **event: Any) -> None:
        self._spool.append(event)
        self._wake.set()

    def _deliver_forever(self) -> None:
        last_complaint = -COMPLAIN_EVERY_S
        while True:
            closing = self._closing.is_set()
            self._wake.clear()
            try:
                self._deliver_pending()
            except Exception as error:  # noqa: BLE001  the thread's border
                if closing or monotonic() - last_complaint > COMPLAIN_EVERY_S:
                    logger.warning("MLflow is away, events wait in the spool: %s", error)
                    last_complaint = monotonic()
                if not closing:
                    self._closing.wait(RETRY_EVERY_S)
            if closing:
                return
            if not self._wake.is_set() and not self._closing.is_set():
                self._wake.wait(RETRY_EVERY_S)

    def _deliver_pending(self) -> None:
        self._connect()
        for event, offset in self._spool.pending():
            try:
                deliver: Callable[..., None] = getattr(self, f"_deliver_{event['kind']}")
                deliver(**{name: value for name, value in event.items() if name != "kind"})
            except Exception as error:  # noqa: BLE001  one event must not block all later ones
                self._refuse_if_away(error)
                logger.warning("MLflow refused %s, which is left out: %s", event["kind"], error)
            self._spool.confirm(offset)

    def _refuse_if_away(self, error: Exception) -> None:
        """Raise `error` again if the server does not answer at all."""
        try:
            self._client.search_experiments(max_results=1)
        except Exception:  # noqa: BLE001  whatever it is, the server is not there
            raise error from None

    def _connect(self) -> None:
        if self._client is not None:
            return
        for name, value in _FAST_FAILURE.items():
            os.environ.setdefault(name, value)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)

        client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        if self._run_id_path.exists():
            self.run_id = self._run_id_path.read_text()
            client.update_run(self.run_id, status="RUNNING")
        else:
            self.run_id = self._create_run(client)
            self._run_id_path.write_text(self.run_id)
        self._client = client

    def _create_run(self, client: Any) -> str:
        found = client.get_experiment_by_name(self._experiment)
        experiment_id = found.experiment_id if found else client.create_experiment(self._experiment)
        run = client.create_run(experiment_id, run_name=self._run_name)
        return str(run.info.run_id)

    def _deliver_parameters(self, parameters: dict[str, Any]) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(self.run_id).data.params
        new = [Param(name, str(value)) for name, value in parameters.items() if name not in known]
        self._client.log_batch(self.run_id, params=new)

    def _deliver_metrics(self, step: int, metrics: dict[str, float], timestamp_ms: int) -> None:
        from mlflow.entities import Metric

        points = [Metric(name, value, timestamp_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=points)

    def _deliver_checkpoint(self, path: str, tags: dict[str, str]) -> None:
        if (version := self._find_model_version(path)) is None:
            if not self._client.search_registered_models(f"name = '{self._model}'"):
                self._client.create_registered_model(self._model)
            version = self._client.create_model_version(
                self._model, source=f"file://{path}", run_id=self.run_id, tags=tags
            ).version
        self._client.set_registered_model_alias(self._model, "current", version)
        self.model_version = str(version)
        self.protected = self._aliased()

    def _aliased(self) -> frozenset[Path]:
        """Return the checkpoints that people gave an alias of their own."""
        aliases = self._client.get_registered_model(self._model).aliases
        versions = {str(version) for alias, version in aliases.items() if alias != "current"}
        return frozenset(
            Path(found.source.removeprefix("file://"))
            for found in self._client.search_model_versions(f"run_id = '{self.run_id}'")
            if str(found.version) in versions
        )

    def _deliver_forget(self, path: str) -> None:
        if (version := self._find_model_version(path)) is not None:
            self._client.delete_model_version(self._model, version)

    def _find_model_version(self, path: str) -> Any:
        for version in self._client.search_model_versions(f"run_id = '{self.run_id}'"):
            if version.source == f"file://{path}":
                return version.version
        return None

    def _deliver_dataset(self, path: str, version: int, num_rows: int) -> None:
        import json

        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name="trajectories",
            digest=f"v{version}",
            source_type="lance",
            source=json.dumps({"uri": path, "version": version}),
            profile=json.dumps({"num_rows": num_rows}),
        )
        tags = [InputTag("mlflow.data.context", "training")]
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, tags)])

    def _deliver_end(self, status: str) -> None:
        self._client.set_terminated(self.run_id, status=status)


class NullTracker:
    """A `Tracker` that keeps nothing, for `tracking.enabled = false`."""

    protected: frozenset[Path] = frozenset()
    run_id: str | None = None
    model_version: str | None = None

    def log_parameters(self, parameters: dict[str, Any]) -> None: ...

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None: ...

    def register_checkpoint(self, path: Path, tags: dict[str, str]) -> None: ...

    def forget_checkpoint(self, path: Path) -> None: ...

    def log_dataset(self, path: Path, *, version: int, num_rows: int) -> None: ...

    def close(self, status: str | None) -> None: ...


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """A model version as the registry has it."""

    name: str
    version: str
    source: Path
    tags: dict[str, str]


def model_source(uri: str, reference: str) -> Path:
    """Return the directory behind a reference; errors as `registered_version`."""
    return registered_version(uri, reference).source


def registered_version(uri: str, reference: str) -> RegisteredVersion:
    """Return the model version behind `models:/NAME@ALIAS` or `models:/NAME/VERSION`.

    Raises:
        ModelError: the registry does not know it.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    from areal_flow.errors import ModelError

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
        source=Path(str(version.source).removeprefix("file://")),
        tags=dict(version.tags),
    )
