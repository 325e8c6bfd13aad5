"""MLflow's model registry: versions by reference, and their aliases.

Each run has one alias; `current` and `best` are of all runs; users have their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_flow.core.digests import sha256_hex
from areal_flow.core.errors import ModelError
from areal_flow.core.layout import RunLayout
from areal_flow.tracking.protocol import PASS_RATE_TAG, TRAINED_AT_TAG

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

    def keeping(self, *, without: str) -> frozenset[str]:
        """Return the versions whose checkpoints are kept: of `best`, and of users' own aliases."""
        moving = {CURRENT, without}
        return frozenset(v for alias, v in self.versions().items() if alias not in moving)

    def free_for(self, layout: RunLayout, *, identity: str) -> str:
        """Return the alias of a run's name, with its identity where another run has that.

        A registry of several folders may have two runs of one name; one in the same place is gone.
        """
        alias = run_alias(layout.name)
        if alias in self.versions():
            holder = self.client.get_model_version_by_alias(self.model, alias)
            if source_path(holder.source).parent != layout.checkpoints:
                return f"{alias}-{identity[:6]}"
        return alias

    def point(self, alias: str, version: str) -> None:
        if self.versions().get(alias) != version:
            self.client.set_registered_model_alias(self.model, alias, version)

    def point_to_best(self) -> None:
        """Have `best` point to the highest pass rate; of equals, to the version that was first."""
        versions = self.client.search_model_versions(f"name = '{self.model}'")
        rates = {
            int(version.version): float(version.tags[PASS_RATE_TAG])
            for version in versions
            if PASS_RATE_TAG in version.tags
        }
        if rates:
            self.point(BEST, str(max(sorted(rates), key=rates.__getitem__)))

    def point_to_current(self, version: str) -> None:
        """Have `current` point to a version of a run that finished.

        One that was trained before the version there takes nothing from it: a run may be delivered
        late, or again.
        """
        if CURRENT in self.versions():
            there = self.client.get_model_version_by_alias(self.model, CURRENT)
            registered = self.client.get_model_version(self.model, version)
            if there.tags.get(TRAINED_AT_TAG, "") > registered.tags.get(TRAINED_AT_TAG, ""):
                return
        self.point(CURRENT, version)


def source_path(source: str) -> Path:
    return Path(source.removeprefix("file://"))


def default_tracking_uri(runs: Path) -> str:
    return f"sqlite:///{(runs / 'mlflow.db').resolve()}"


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
