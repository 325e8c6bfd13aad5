"""MLflow as a sink: a run's description, its metrics by step, and its model versions.

The last delivered step is a tag of the MLflow run, written with each step's numbers: a server that
lost the run, or never had it, is filled from the first step on. Model versions are registered by
reference. Each run has one alias; `current` and `best` are shared by all runs; users have their
own.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_flow.config import TrackingSettings
from areal_flow.core.digests import sha256_hex
from areal_flow.core.errors import ModelError
from areal_flow.core.layout import RunLayout
from areal_flow.log.directory import check_schema_version
from areal_flow.tracking.completions import write_signature
from areal_flow.tracking.protocol import (
    PASS_RATE_TAG,
    TRAINED_AT_TAG,
    InputPrompts,
    RunDescription,
    StepMetrics,
)

IDENTITY_TAG = "areal_flow.run"
DELIVERED_TAG = "areal_flow.delivered_step"
ALIAS_TAG = "areal_flow.alias"
"""Of the MLflow run: the alias that it was given stays its own, also under another name."""
KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"
"""Of the experiment: opens it in the view of model training, not in that of applications."""
RECIPE_FILE, SAMPLES_FILE = "recipe.toml", "samples.json"
"""Artifacts."""
_MAX_POINTS = 1000
"""Of one request, by MLflow's own limit."""
_FAST_FAILURE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
}
"""MLflow's own retries would hold a thread for four minutes."""


class _FailingFast:
    """A client whose calls give up soon; their limits stand in the user's environment."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*arguments: Any, **options: Any) -> Any:
            added = _FAST_FAILURE.keys() - os.environ.keys()
            os.environ.update({name: _FAST_FAILURE[name] for name in added})
            try:
                return method(*arguments, **options)
            finally:
                for name in added:
                    os.environ.pop(name, None)

        return call


class MlflowTracker:
    """A `Tracker` over an MLflow server or database."""

    def __init__(self, layout: RunLayout, settings: TrackingSettings, uri: str = "") -> None:
        self.uri = uri or default_tracking_uri(layout.root.parent)
        self.run_id = ""
        self.model_version: str | None = None
        self.alias: str | None = None
        self._layout = layout
        self._identity = check_schema_version(layout)
        self._experiment = settings.experiment
        self._model = settings.registered_model
        self._client: Any = None
        self._description: RunDescription | None = None

    def begin(self) -> int:
        client = self._connect()
        if existing := self._find_run():
            self.run_id = existing.info.run_id
            client.update_run(self.run_id, status="RUNNING")
            return int(existing.data.tags.get(DELIVERED_TAG, 0))
        tags = {IDENTITY_TAG: self._identity}
        run = client.create_run(self._experiment_id(), run_name=self._layout.name, tags=tags)
        self.run_id = run.info.run_id
        return 0

    def describe(self, description: RunDescription) -> None:
        from mlflow.entities import Param, RunTag

        self._description = description
        recorded = self._client.get_run(self.run_id).data.params
        parameters = description.parameters.items()
        new = [Param(name, str(value)) for name, value in parameters if name not in recorded]
        tags = {**description.tags, **_own_tags(description)}
        named = [RunTag(name, value) for name, value in tags.items()]
        self._client.log_batch(self.run_id, params=new, tags=named)
        if description.prompts:
            self._log_prompts(description.prompts)
        self._client.log_text(self.run_id, description.recipe, RECIPE_FILE)

    def show_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write what the client's `log_table` writes, which would append to the table before."""
        columns = list(rows[0])
        table = {"columns": columns, "data": [[row[name] for name in columns] for row in rows]}
        self._client.log_text(self.run_id, json.dumps(table, ensure_ascii=False), SAMPLES_FILE)
        shown = json.dumps([{"path": SAMPLES_FILE, "type": "table"}])
        self._client.set_tag(self.run_id, "mlflow.loggedArtifacts", shown)

    def show_report(self, page: Path) -> None:
        self._connect()
        if run := self._find_run():
            self._client.log_artifact(run.info.run_id, str(page))

    def log_steps(self, steps: Sequence[StepMetrics]) -> None:
        """Log as many steps by a request as it may have points: each is a few transactions."""
        several, num_points = list[StepMetrics](), 0
        for step in steps:
            if several and num_points + len(step.metrics) > _MAX_POINTS:
                self._log(several, tags={DELIVERED_TAG: str(several[-1].step)})
                several, num_points = [], 0
            several.append(step)
            num_points += len(step.metrics)
        self._log(several, tags={DELIVERED_TAG: str(several[-1].step)})

    def log_evaluation(
        self, policy_version: int, metrics: Mapping[str, float], *, timestamp_ms: int
    ) -> None:
        self._log([StepMetrics(policy_version, metrics, timestamp_ms)], tags={})

    def register_checkpoints(self, present: Mapping[Path, Mapping[str, str]]) -> None:
        versions = {version.source: version for version in self._versions()}
        sources = {f"file://{path}": dict(tags) for path, tags in present.items()}
        for source, tags in sources.items():
            if source not in versions:
                versions[source] = self._register(source, tags)
            self._describe_version(versions[source], tags)
        for source, version in versions.items():
            if source not in sources:
                self._client.delete_model_version(self._model, version.version)
        if sources:
            self.model_version = str(versions[list(sources)[-1]].version)
            self.alias = self._own_alias()
            aliases = self._aliases()
            aliases.point(self.alias, self.model_version)
            aliases.point_to_best()

    def protected(self) -> frozenset[Path]:
        versions = self._versions()
        if not versions:
            return frozenset()
        protected = self._aliases().protected_versions(own_alias=self._own_alias())
        return frozenset(
            source_path(version.source) for version in versions if str(version.version) in protected
        )

    def remove(self) -> int:
        database = self.uri.removeprefix(SQLITE)
        if database != self.uri and not Path(database).is_file():
            return 0  # a client would create it
        self._connect()
        if (run := self._find_run()) is None:
            return 0
        self.run_id = run.info.run_id
        versions = self._versions()
        for version in versions:
            self._client.delete_model_version(self._model, version.version)
        self._client.delete_run(self.run_id)
        if self.uri.startswith(SQLITE):  # a server's files are the server's to delete
            shutil.rmtree(source_path(run.info.artifact_uri).parent, ignore_errors=True)
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
            logging.getLogger("alembic").setLevel(logging.WARNING)
            from mlflow import MlflowClient

            logging.getLogger("mlflow").setLevel(logging.WARNING)
            # It prints each error with its SQL and a traceback, and raises it, too.
            logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
            client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
            is_server = self.uri.startswith(("http://", "https://"))
            self._client = _FailingFast(client) if is_server else client
        return self._client

    def _find_run(self) -> Any | None:
        experiment = self._client.get_experiment_by_name(self._experiment)
        own_runs = f"tags.`{IDENTITY_TAG}` = '{self._identity}'"
        runs = experiment and self._client.search_runs(
            [experiment.experiment_id], own_runs, max_results=1
        )
        return runs[0] if runs else None

    def _log(self, rows: Sequence[StepMetrics], *, tags: dict[str, str]) -> None:
        from mlflow.entities import Metric, RunTag

        points = [
            Metric(name, value, timestamp_ms, step)
            for step, metrics, timestamp_ms in rows
            for name, value in metrics.items()
        ]
        named = [RunTag(name, value) for name, value in tags.items()]
        self._client.log_batch(self.run_id, metrics=points, tags=named)

    def _versions(self) -> list[Any]:
        return list(self._client.search_model_versions(f"run_id = '{self.run_id}'"))

    def _register(self, source: str, tags: dict[str, str]) -> Any:
        if self._description is not None:
            max_new_tokens = self._description.max_new_tokens
            write_signature(source_path(source), max_new_tokens=max_new_tokens)
        if not self._client.search_registered_models(f"name = '{self._model}'"):
            self._client.create_registered_model(self._model)
        return self._client.create_model_version(
            self._model, source=source, run_id=self.run_id, tags=tags
        )

    def _describe_version(self, version: Any, tags: dict[str, str]) -> None:
        if self._description is not None:
            card = model_card(self._description, f"models:/{self._model}/{version.version}", tags)
            if version.description != card:
                self._client.update_model_version(self._model, version.version, card)
        for name, value in tags.items():
            if version.tags.get(name) != value:
                self._client.set_model_version_tag(self._model, version.version, name, value)

    def _aliases(self) -> Aliases:
        return Aliases(self._client, self._model)

    def _own_alias(self) -> str:
        """Return the alias of this run, which never changes."""
        if recorded := self._client.get_run(self.run_id).data.tags.get(ALIAS_TAG):
            return str(recorded)
        alias = self._aliases().alias_for(self._layout, identity=self._identity)
        self._client.set_tag(self.run_id, ALIAS_TAG, alias)
        return alias

    def _experiment_id(self) -> str:
        if experiment := self._client.get_experiment_by_name(self._experiment):
            if KIND_TAG not in experiment.tags:
                self._client.set_experiment_tag(experiment.experiment_id, KIND_TAG, KIND)
            return str(experiment.experiment_id)
        place = None  # for a server to choose; a client of a database would take the working folder
        if self.uri.startswith(SQLITE):
            place = Path(self.uri.removeprefix(SQLITE)).with_name("mlflow-artifacts").as_uri()
        experiment_id = self._client.create_experiment(
            self._experiment, place, tags={KIND_TAG: KIND}
        )
        return str(experiment_id)

    def _log_prompts(self, prompts: InputPrompts) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = json.dumps({"uri": str(prompts.path)})
        dataset = Dataset("prompts", prompts.content_hash, source_type="local", source=source)
        context = [InputTag("mlflow.data.context", "training")]
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, context)])


def model_card(run: RunDescription, model: str, tags: Mapping[str, str]) -> str:
    """Return what a version is and how to use it, as Markdown."""
    rate = tags.get(PASS_RATE_TAG)
    held_out = f"; held-out pass rate {rate}" if rate else ""
    return (
        f"{run.text}\n\n"
        f"- this is its policy after step {tags['step']}{held_out}\n"
        f"- weights: `{tags['weights_hash']}`\n\n"
        f"`areal-flow lineage {model}` shows the trajectories that it was made from.\n"
        f'`mlflow.pyfunc.load_model("{model}").predict(["..."])` completes prompts.'
    )


def _own_tags(description: RunDescription) -> dict[str, str]:
    commit, _, dirty = description.commit.partition("-")
    git_tags = {"mlflow.source.git.commit": commit, "mlflow.source.git.dirty": dirty and "True"}
    return {
        "mlflow.note.content": description.text,
        "mlflow.source.name": "areal-flow",
        "mlflow.source.type": "LOCAL",
        **{name: value for name, value in git_tags.items() if value},
    }


SQLITE = "sqlite:///"
CURRENT = "current"
"""The newest checkpoint of the run that was trained last, of those that finished."""
BEST = "best"
"""The version with the highest held-out pass rate, of all runs."""

_ALLOWED = re.compile(r"[A-Za-z0-9_-]+")
_RESERVED = re.compile(rf"{CURRENT}|{BEST}|latest|v\d+", re.IGNORECASE)


def run_alias(name: str) -> str:
    """Return a run's alias: its name, where a registry allows it.

    It allows letters, digits, dashes and underscores, and reserves `latest` and `v1`. Other
    names get underscores for dots and six digits of their hash: `sums.2` becomes
    `sums_2-ee0c0b`.
    """
    if _ALLOWED.fullmatch(name) and not _RESERVED.fullmatch(name):
        return name
    return f"{name.replace('.', '_')}-{sha256_hex(name, 6)}"


@dataclass(frozen=True, slots=True)
class Aliases:
    client: Any
    model: str

    def versions(self) -> dict[str, str]:
        aliases = self.client.get_registered_model(self.model).aliases
        return {alias: str(version) for alias, version in aliases.items()}

    def protected_versions(self, *, own_alias: str) -> frozenset[str]:
        """Return the versions whose checkpoints are kept: those of `best` and of users' aliases.

        `current` and the alias of the run move on to newer checkpoints and protect none.
        """
        moving = {CURRENT, own_alias}
        return frozenset(
            version for alias, version in self.versions().items() if alias not in moving
        )

    def alias_for(self, layout: RunLayout, *, identity: str) -> str:
        """Return an alias from a run's name; add its identity if another run has that alias.

        Runs in different folders may share a registry and a name. An alias whose checkpoints are
        in this run's own directory belongs to a deleted run, and is reused.
        """
        alias = run_alias(layout.name)
        if alias in self.versions():
            version = self.client.get_model_version_by_alias(self.model, alias)
            if source_path(version.source).parent != layout.checkpoints:
                return f"{alias}-{identity[:6]}"
        return alias

    def point(self, alias: str, version: str) -> None:
        if self.versions().get(alias) != version:
            self.client.set_registered_model_alias(self.model, alias, version)

    def point_to_best(self) -> None:
        """Point `best` to the version with the highest pass rate; the oldest wins a tie."""
        versions = self.client.search_model_versions(f"name = '{self.model}'")
        rates = {
            int(version.version): float(version.tags[PASS_RATE_TAG])
            for version in versions
            if PASS_RATE_TAG in version.tags
        }
        if rates:
            self.point(BEST, str(max(sorted(rates), key=rates.__getitem__)))

    def point_to_current(self, version: str) -> None:
        """Point `current` to a version of a finished run, unless `current` was trained later.

        Runs may be delivered late or twice, so delivery order is not training order.
        """
        if CURRENT in self.versions():
            current = self.client.get_model_version_by_alias(self.model, CURRENT)
            candidate = self.client.get_model_version(self.model, version)
            if current.tags.get(TRAINED_AT_TAG, "") > candidate.tags.get(TRAINED_AT_TAG, ""):
                return
        self.point(CURRENT, version)


def source_path(source: str) -> Path:
    return Path(source.removeprefix("file://"))


def default_tracking_uri(runs: Path) -> str:
    return f"{SQLITE}{(runs / 'mlflow.db').resolve()}"


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    name: str
    version: str
    source: Path
    tags: dict[str, str]


def registered_version(uri: str, reference: str) -> RegisteredVersion:
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
