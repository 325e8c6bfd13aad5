"""Says what to look at when workers of a kind die again and again; a pure function of the cause."""

from __future__ import annotations

SILENT = "silent for"
"""How `health` begins the cause when it has a worker killed that cannot be heard."""


def advice(worker: str, cause: str) -> str:
    """Return what to look at, for a worker's title and the cause of its latest death.

    A reward worker runs code of the user's, which is to blame for most of what it dies of.
    """
    if worker != "reward worker" or "signal 9" in cause:
        return "Look at what its process said last, and at this machine's memory"
    if cause.startswith(SILENT):
        return (
            "A verifier or a tool hangs: look for an `async` one that computes or waits without "
            "`await`, or for native code that does not return, and give it a time limit"
        )
    if "signal" in cause:
        return "A verifier or a tool crashes in native code: look at what its process said last"
    return "A verifier or a tool ends its process, as os._exit does: have it return or raise"
