"""The ways to start worker processes, by the name that recipes use.

The next one is a file beside these, a line in `LAUNCHERS` and its case in
`tests/contracts/test_launchers.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from areal_flow.cluster.launchers.local import LocalLauncher
from areal_flow.cluster.launchers.protocol import Launcher
from areal_flow.cluster.launchers.ssh import SshLauncher
from areal_flow.cluster.settings import ClusterSettings
from areal_flow.errors import ConfigError

LAUNCHERS: dict[str, Callable[[str, ClusterSettings], Launcher]] = {
    "local": LocalLauncher,
    "ssh": SshLauncher,
}
"""By `cluster.launcher`; each is made from the scheduler's address and these settings."""


def make_launcher(scheduler: str, settings: ClusterSettings) -> Launcher:
    """Return the launcher that these settings name.

    Args:
        scheduler: the address at which workers find the scheduler.
        settings: the launcher's name, and what it needs to know.

    Raises:
        ConfigError: there is none of this name, or its own settings do not fit.
    """
    if settings.launcher not in LAUNCHERS:
        raise ConfigError(
            f"cluster.launcher = {settings.launcher!r}: expected one of {', '.join(LAUNCHERS)}"
        )
    return LAUNCHERS[settings.launcher](scheduler, settings)
