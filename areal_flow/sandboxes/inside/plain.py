"""Values as plain data, without code: JSON, with tags for types that JSON lacks.

A number, text or list stands for itself; `{"t": [...]}` is a tuple, and so on. What does not
consist of built-in values is `{"r": [number, type]}`: a reference, equal to nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

MAX_ITEMS = 100_000
"""Maximum number of items taken from an iterator."""
_MAX_PLAIN = 2**53
_SEQUENCES: dict[str, type] = {"t": tuple, "s": set, "z": frozenset}
_BYTES: dict[str, type] = {"b": bytes, "B": bytearray}
_ITERATORS = frozenset(
    {type(iter(())), type({}.keys()), type({}.values()), type({}.items()), type(None for _ in ())}
    | {map, filter, zip, reversed, enumerate, range, type(reversed([]))}
)

Refer = Callable[[Any], int]


def encode(value: Any, refer: Refer) -> Any:
    """Return a value as JSON data.

    Args:
        value: any.
        refer: keeps an object that does not consist of built-in values; returns its number.

    Raises:
        RecursionError: the value contains itself, or is nested too deeply.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind in (int, float, complex):
        return _number(value)
    if kind is list:
        return [encode(item, refer) for item in value]
    for tag, sequence in _SEQUENCES.items():
        if kind is sequence:
            return {tag: [encode(item, refer) for item in value]}
    if kind is dict:
        return {"d": [[encode(k, refer), encode(v, refer)] for k, v in value.items()]}
    for tag, raw in _BYTES.items():
        if kind is raw:
            return {tag: value.hex()}
    if kind in _ITERATORS:
        return {"g": [encode(item, refer) for item in islice(value, MAX_ITEMS)]}
    base = _base_value(value)
    return {"r": [refer(value), kind.__name__]} if base is value else encode(base, refer)


def decode(encoded: Any, resolve: Callable[[int, str], Any]) -> Any:
    """Return the value of encoded data.

    Args:
        encoded: what `encode` returned.
        resolve: returns the object of a reference, by its number and type.

    Raises:
        ValueError, TypeError: the data are invalid.
    """
    if isinstance(encoded, list):
        return [decode(item, resolve) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((tag, content),) = encoded.items()
    if tag in _BYTES:
        return _BYTES[tag](bytes.fromhex(content))
    if tag in ("i", "f"):
        return int(content, 16) if tag == "i" else float(content)
    if tag == "c":
        return complex(*(float(part) for part in content))
    if tag == "r":
        return resolve(int(content[0]), str(content[1]))
    items: Iterable[Any] = (decode(item, resolve) for item in content)
    if tag == "d":
        return {_hashable(key): value for key, value in items}
    return iter([*items]) if tag == "g" else _SEQUENCES[tag](items)


def canonical(value: Any) -> Any:
    """Return data in a form that is equal if the values are, whatever the order of a set.

    A tuple counts as a list, and 2.0 as 2, but True not as 1. Values are never constructed, so that
    none can be slow to compare.

    Raises:
        ValueError, TypeError: the data are invalid.
    """
    if value is None or isinstance(value, bool | str):
        return value if isinstance(value, str) else {"k": repr(value)}
    if isinstance(value, int | float):
        is_whole = isinstance(value, int) or value.is_integer()
        return {"i": hex(int(value))} if is_whole else value
    if isinstance(value, list):
        return [canonical(item) for item in value]
    ((tag, content),) = value.items()
    if tag in ("t", "g"):
        return [canonical(item) for item in content]
    if tag in ("s", "z", "d"):
        return {tag: sorted(json.dumps(canonical(item)) for item in content)}
    if tag == "r":
        raise ValueError(f"a value of type {content[1]!s:.40} is not data")
    return {tag: content}


def parse(line: bytes | str) -> Any:
    """Parse a line of JSON from a hostile process.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(line, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not data")


def _number(value: complex) -> Any:
    if isinstance(value, int):
        return value if -_MAX_PLAIN < value < _MAX_PLAIN else {"i": hex(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"f": repr(value)}
    return {"c": [repr(value.real), repr(value.imag)]}


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def _base_value(value: Any) -> Any:
    """Return a value of a subclass as its built-in base, or the value itself."""
    bases: dict[type, Callable[[Any], Any]] = {
        int: int.__int__, float: float.__float__, str: str.__str__, complex: complex.__pos__,
        list: lambda v: [*list.__iter__(v)], tuple: lambda v: tuple(tuple.__iter__(v)),
        dict: lambda v: dict(dict.items(v)), set: lambda v: set(set.__iter__(v)),
        frozenset: lambda v: frozenset(frozenset.__iter__(v)),
    }  # fmt: skip
    for base, plain in bases.items():
        if isinstance(value, base):
            return plain(value)
    if type(value).__module__ == "numpy":
        return value.tolist()
    return value
