"""Lends out the functions of a program: answers calls to them until no more come."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from . import plain, program


class Lender:
    """A program's names, and the objects that calls to it have returned."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._objects: list[Any] = []

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a call returns, or what it raises, as data."""
        try:
            function = self._function(call["of"], call["name"])
            args = [plain.decode(given, self._resolve) for given in call["args"]]
            kwargs = {k: plain.decode(given, self._resolve) for k, given in call["kwargs"].items()}
            return {"value": plain.encode(function(*args, **kwargs), self._refer)}
        except BaseException as error:  # noqa: BLE001 - it is for whoever called
            return {"raised": [type(error).__name__, str(error)[:400]]}

    def _function(self, of: int | None, name: str) -> Any:
        """Return a method of an object, a function, or a method of the class `Solution`."""
        if of is not None:
            return getattr(self._objects[of], name)
        if name in self._names:
            return self._names[name]
        if "Solution" in self._names:
            return getattr(self._names["Solution"](), name)
        raise NameError(f"name {name!r} is not defined")

    def _refer(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _resolve(self, number: int, _: str) -> Any:
        return self._objects[number]


def lend() -> None:
    """Run the source, say so, and answer calls."""
    lender = Lender(program.run_source())
    with open(program.CALLS_OUT, "w") as out, open(program.CALLS_IN) as calls:
        print("{}", file=out, flush=True)
        for line in calls:
            print(json.dumps(lender.answer(json.loads(line))), file=out, flush=True)
