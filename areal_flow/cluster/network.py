"""How the processes of a run prove to each other who they are, and encrypt what they send."""

from __future__ import annotations

from distributed import Security

from areal_flow.config import NetworkSettings
from areal_flow.errors import ConfigError


def connection_security(network: NetworkSettings) -> Security:
    """Return Dask's settings for connections: with certificates, or plain ones on loopback.

    Every process shows the same certificate and accepts those that the authority has signed.

    Raises:
        ConfigError: a file is missing.
    """
    if not network.has_tls:
        return Security()
    for name in ("tls_ca", "tls_certificate", "tls_key"):
        path = getattr(network, name)
        if not path.is_file():
            raise ConfigError(f"cluster.network.{name} = {str(path)!r}: there is no such file")
    roles = ("client", "scheduler", "worker")
    certificates = {f"tls_{role}_cert": str(network.tls_certificate) for role in roles}
    keys = {f"tls_{role}_key": str(network.tls_key) for role in roles}
    return Security(
        require_encryption=True, tls_ca_file=str(network.tls_ca), **certificates, **keys
    )
