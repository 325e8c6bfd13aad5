"""`areal-flow --version`: what a bug report needs."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distributions, metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from areal_flow.core.program import NAME, VERSION, git_commit
from areal_flow.rollout.engines.vllm.support import BUILDS


def version_text() -> str:
    """Return the version, the commit, and the versions of Python, torch and installed extras."""
    installed = {str(canonicalize_name(each.name)): each.version for each in distributions()}
    builds = [build for build in BUILDS.values() if build in installed]
    if builds:
        installed[BUILDS["cuda"]] = installed[builds[0]]  # the CPU build is not a requirement
    lines = {
        NAME: VERSION,
        "commit": git_commit() or "unknown",
        "python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "torch": installed.get("torch", "missing"),
        "extras": ", ".join(installed_extras(installed)) or "none",
    }
    return "\n".join(f"{name:<10} {value}" for name, value in lines.items())


def installed_extras(installed: Mapping[str, str]) -> list[str]:
    """Return the extras whose packages are all installed, in versions that fit."""
    try:
        described = metadata(NAME)
    except PackageNotFoundError:  # a clone on PYTHONPATH
        return []
    required = [Requirement(text) for text in described.get_all("Requires-Dist") or ()]
    extras = described.get_all("Provides-Extra") or ()
    return [extra for extra in extras if all(_fits(installed, required, extra))]


def _fits(
    installed: Mapping[str, str], required: Iterable[Requirement], extra: str
) -> Iterator[bool]:
    """Yield, for each package that only this extra requires, whether a fitting one is installed."""
    for each in required:
        marker = each.marker
        if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            release = installed.get(canonicalize_name(each.name))
            yield release is not None and each.specifier.contains(release, prereleases=True)
