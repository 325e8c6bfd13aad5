"""MLflow's model registry: aliases of versions, and the version that a reference names.

Each run has an alias of its own, all runs share `current` and `best`, and users may add others.
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
"""The newest checkpoint of the most recently trained run among those that finished."""
BEST = "best"
"""The version with the highest held-out pass rate among all runs."""

_ALLOWED = re.compile(r"[A-Za-z0-9_-]+")
_RESERVED = re.compile(rf"{CURRENT}|{BEST}|latest|v\d+", re.IGNORECASE)


def run_alias(name: str) -> str:
    """Return a run's alias: its name if MLflow accepts it, else the name made valid plus a hash.

    MLflow accepts letters, digits, dashes and underscores, but not `latest` or names like `v1`.
    `sums.2` becomes `sums_2-ee0c0b`.
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
    """Return the version that `models:/NAME@ALIAS` or `models:/NAME/VERSION` names.

    Raises:
        ModelError: there is no such registry or version.
    """
    database = uri.removeprefix(SQLITE)
    if database != uri and not Path(database).is_file():  # a client would create it
        raise ModelError(
            f"expected a registry at {uri} for {reference!r}, found none: give --runs or --registry"
        )
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    name, separator, alias = reference.removeprefix("models:/").partition("@")
    try:
        if separator:
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
