"""Providers of sandboxes by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field

from areal_flow.core.errors import ConfigError
from areal_flow.core.settings import import_function
from areal_flow.sandboxes.container import ContainerSandbox
from areal_flow.sandboxes.local import LocalSandbox
from areal_flow.sandboxes.protocol import Sandbox, SandboxLimits

PROVIDERS: dict[str, Callable[..., Sandbox]] = {"local": LocalSandbox, "docker": ContainerSandbox}

NO_SANDBOX = "none"


class SandboxSettings(SandboxLimits):
    """Where the commands of an episode run."""

    provider: str = "local"
    """`none`, as without this table; `local`: namespaces of the reward worker's machine;
    `docker`: a container, by Docker or Podman; or the import path of a class that is a `Sandbox`,
    which gets the limits, `image`, `workdir` and `variables`."""
    image: str = ""
    """Of a container: a name, or the absolute path of a folder with a Dockerfile, which is built
    when it is first used."""
    workdir: str = ""
    """Where commands begin, by default in the image's own or `/home/agent`."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Of the environment of commands."""
    provider_settings: dict[str, Any] = Field(default_factory=dict)
    """Other keyword arguments of the provider; of `docker` `arguments`, a list for its `run`."""


def make_sandbox(settings: SandboxSettings) -> Sandbox:
    """Return a sandbox that is not started.

    Raises:
        ConfigError: the provider is unknown, or refuses the settings.
    """
    name = settings.provider
    make = PROVIDERS.get(name) or import_function(
        name, setting="sandbox.provider", error=ConfigError, built_in=PROVIDERS
    )
    limits = SandboxLimits(**{key: getattr(settings, key) for key in SandboxLimits.model_fields})
    try:
        sandbox: Sandbox = make(
            limits,
            image=settings.image,
            workdir=settings.workdir,
            variables=settings.variables,
            **settings.provider_settings,
        )
    except TypeError as error:
        raise ConfigError(f"sandbox.provider = {name!r}: {error}") from error
    return sandbox
