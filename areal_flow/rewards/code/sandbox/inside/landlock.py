"""What a program may open where there are no user namespaces: a few read-only places, by Landlock.

Landlock cannot hide that a file exists, nor its size; it hides what is in it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from . import kernel

_READ_FILE, _READ_DIRECTORY, _WRITE_FILE, _TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 14
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
"""Rights over files, by the version of Landlock that first knew them."""
_NETWORK_RIGHTS, _SCOPES = 0b11, 0b11
"""To bind and connect TCP, since 4; abstract sockets and signals of others, since 6."""
_TRUNCATE_SINCE = 3


def version() -> int:
    """Return the version of Landlock's interface; 0 without Landlock."""
    try:
        return kernel.syscall("landlock_create_ruleset", 0, 0, 1)
    except OSError:
        return 0


def refuses_truncation() -> bool:
    """Return whether this Landlock holds `open(path, O_TRUNC)` to its rules."""
    return version() >= _TRUNCATE_SINCE


def make_ruleset(readable: Iterable[str], devices: Iterable[str]) -> int:
    """Return a descriptor of the rules: what may be read, and devices that may also be written.

    Raises:
        OSError: there is no Landlock.
    """
    known = version()
    handled = sum(rights for since, rights in _FILE_RIGHTS.items() if since <= known)
    network = _NETWORK_RIGHTS if known >= 4 else 0
    scopes = _SCOPES if known >= 6 else 0
    attributes = struct.pack("QQQ", handled, network, scopes)
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    ruleset = kernel.move_high(kernel.syscall("landlock_create_ruleset", attributes, size, 0))
    for path in readable:
        is_folder = os.path.isdir(path)
        _allow(ruleset, path, _READ_FILE | (_READ_DIRECTORY if is_folder else 0))
    for path in devices:
        _allow(ruleset, path, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & handled)
    return ruleset


def restrict(ruleset: int) -> None:
    """Hold this process to rules for good; it needs `no_new_privs`."""
    kernel.syscall("landlock_restrict_self", ruleset, 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        request = struct.pack("=Qi", rights, place)
        kernel.syscall("landlock_add_rule", ruleset, 1, request, 0)
    finally:
        os.close(place)
