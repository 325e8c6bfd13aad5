"""Converts values that hold arrays, so that tests can compare them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Convert arrays, tuples and dataclasses within a value to lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value):
        return [plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value
