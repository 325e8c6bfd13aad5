"""Files that are whole or absent, that survive a power failure, or that only their user reads."""

from __future__ import annotations

import os
from pathlib import Path


def force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    """Give a file new content; a reader sees the old or the new."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def replace_file_durably(path: Path, text: str) -> None:
    """As `replace_file`; the new content survives a power failure once this returns."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    force_to_disk(partial)
    partial.replace(path)
    force_to_disk(path.parent)


def write_secret(path: Path, text: str) -> None:
    """Write a file that only this user reads, from its first byte on."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
