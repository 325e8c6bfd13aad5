"""The certificates with which the processes of a run identify each other, and what they use."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from distributed import Security

from areal_flow.config.cluster import NetworkSettings
from areal_flow.core.durable import write_secret
from areal_flow.core.errors import ConfigError

CERTIFICATES = ("ca.pem", "certificate.pem", "key.pem")
"""The authority's certificate, this run's own, and the key of that."""

NAME = "areal-flow"
CLOCK_SKEW = timedelta(days=1)
"""By how much the clocks of a run's hosts may differ."""
VALIDITY = timedelta(days=365)


def connection_security(network: NetworkSettings) -> Security:
    """Return Dask's connection settings; all processes use one certificate, if there is one."""
    if network.tls_directory is None:
        return Security()
    authority, certificate, key = _files_of(network.tls_directory)
    roles = ("client", "scheduler", "worker")
    files = {f"tls_{role}_cert": str(certificate) for role in roles}
    files |= {f"tls_{role}_key": str(key) for role in roles}
    return Security(require_encryption=True, tls_ca_file=str(authority), **files)


def check_certificates(network: NetworkSettings) -> None:
    """Refuse a given key that other users can read."""
    if network.tls_directory is None:
        return
    *_, key = _files_of(network.tls_directory)
    status = key.stat()
    # A mounted secret belongs to root, who lets a process read it by its group.
    forbidden = 0o077 if status.st_uid == os.getuid() else 0o007
    if status.st_mode & forbidden:
        raise ConfigError(
            f"cluster.network.tls_directory: other users can read {key} (mode "
            f"{status.st_mode & 0o777:o}), and with it run code in this run: chmod 600 {key}"
        )


def _files_of(directory: Path) -> list[Path]:
    paths = [directory / name for name in CERTIFICATES]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"cluster.network.tls_directory: there is no file {path}")
    return paths


def with_certificates(network: NetworkSettings, folder: Path) -> NetworkSettings:
    """Return settings with certificates, new ones if none are given.

    Any user of a machine can connect to its loopback, and a client of the scheduler can run code.
    So only this user may read the new certificates.
    """
    if network.tls_directory is not None:
        check_certificates(network)
        return network
    certificate, key = _self_signed()
    for name, text in zip(CERTIFICATES, (certificate, certificate, key), strict=True):
        write_secret(folder / name, text)
    return network.model_copy(update={"tls_directory": folder})


def _self_signed() -> tuple[str, str]:
    """Return a new certificate and its key; valid too where a clock is behind this one."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALIDITY)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem).decode(), secret.decode()
