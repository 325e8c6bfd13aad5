"""Every hash that is stored or compared but that of tensors, which is `models.hashing`'s xxh3.

Of SHA-256 as many digits are kept as there are things to tell apart: 6 for aliases, 12 for code, 16
for files, recipes and prompts, 32 for batches, all of them for chat templates and texts of prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def sha256_hex(content: str | bytes, num_digits: int = 64) -> str:
    encoded = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(encoded).hexdigest()[:num_digits]


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def seed_of(text: str) -> int:
    """Return a seed of 63 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def row_hash(parts: Iterable[bytes]) -> str:
    """Return 32 digits that tell where each part ends, too."""
    return framed_hash(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


def framed_hash(parts: bytes | memoryview) -> str:
    """Return the `row_hash` of joined parts, each behind its length in eight bytes."""
    return hashlib.blake2b(parts, digest_size=16).hexdigest()
