"""What stands in for a zygote in a container of somebody else: descriptors and limits of a run.

It is sent there as text, with what it imports. Isolation is the container's.
"""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Mapping
from typing import Any

from . import lending, program

_HIGH_DESCRIPTOR = 64


def main(request: Mapping[str, Any]) -> None:
    """Become the run; never returns."""
    given = {0: request["stdin"], program.SOURCE: request["source"]}
    if is_lender := request["mode"] == program.LEND:
        given[program.CALLS_IN] = request["calls"]
    answers = fcntl.fcntl(1, fcntl.F_DUPFD, _HIGH_DESCRIPTOR)
    files = {number: _file(content) for number, content in given.items()}
    for number, file in files.items():
        os.dup2(file, number)
        os.close(file)
    if is_lender:  # what the program prints is no answer
        os.dup2(answers, program.CALLS_OUT)
        os.dup2(2, 1)
    os.close(answers)
    cpu_s, memory_bytes = request["cpu_s"], request["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    program.run(lending.lend if is_lender else program.run_source)


def _file(content: bytes) -> int:
    file = os.memfd_create("given")
    with open(file, "wb", closefd=False) as writing:
        writing.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    high = fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH_DESCRIPTOR)
    os.close(file)
    return high
