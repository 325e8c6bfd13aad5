"""A process that has imported what workers need, and forks one for each request. Linux only.

Most of a worker's start is imports, which a fork has at once: also where a killed worker starts
again. It imports nothing that has threads, which a fork would lack: no Polars and no CUDA.
"""

from __future__ import annotations

import gc
import os
import selectors
import socket
import sys
from contextlib import suppress
from importlib import import_module

import numpy as np

from areal_flow.cluster.worker_process import end_with_parent, work
from areal_flow.core.machine import raise_open_files_limit

MODULES = (
    "areal_flow.cluster.trainer_tasks",
    "areal_flow.rollout.engines.torch_engine",
    "areal_flow.training.rank",
    "areal_flow.training.sft",
    "pandas",
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
)
"""Of this project and, of others, what is otherwise imported by its first use."""
REQUEST_BYTES = 1 << 16
NUMBER_BYTES = 4
"""Of a process number and of an exit code."""


def main(parent: str) -> None:
    """Serve the socket that is the standard input; a fork goes on as a worker.

    Args:
        parent: the number of the process that started this one.
    """
    end_with_parent(int(parent))
    for module in MODULES:
        import_module(module)
    raise_open_files_limit()
    gc.freeze()  # or the first collection in each fork would copy every page
    work(fork_for_requests(socket.socket(fileno=sys.stdin.fileno())))


def fork_for_requests(requests: socket.socket) -> str:
    """Fork for each request; return in a fork, with its options.

    A message has the options of a worker and three descriptors: its input, its output, and a pipe
    that gets its process number and, once it has ended, its exit code; nothing if the fork fails.
    The end of messages ends this process, and the kernel its forks.
    """
    fork_server = os.getpid()
    running: dict[int, tuple[int, int]] = {}
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        ready = {key.fd for key, _ in selector.select()}
        for ended in ready & running.keys():
            selector.unregister(ended)
            _report(ended, *running.pop(ended))
        if requests.fileno() not in ready:
            continue
        options, descriptors, *_ = socket.recv_fds(requests, REQUEST_BYTES, 3)
        if not options:
            sys.exit()
        try:
            standard_input, output, report = descriptors
            pid = os.fork()
        except (OSError, ValueError):  # too many processes, or descriptors
            for descriptor in descriptors:  # the end of `report` tells the driver
                os.close(descriptor)
            continue
        if not pid:
            selector.close()
            requests.close()
            for descriptor, (_, reported) in running.items():
                os.close(descriptor)
                os.close(reported)
            _become_worker(fork_server, standard_input, output, report)
            return options.decode()
        os.close(standard_input)
        os.close(output)
        _send(report, pid)
        running[descriptor := os.pidfd_open(pid)] = pid, report
        selector.register(descriptor, selectors.EVENT_READ)


def _report(ended: int, pid: int, report: int) -> None:
    _send(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.close(ended)
    os.close(report)


def _send(report: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(report, number.to_bytes(NUMBER_BYTES, "big", signed=True))


def _become_worker(fork_server: int, standard_input: int, output: int, report: int) -> None:
    os.setpgid(0, 0)  # no Ctrl-C at a terminal reaches it
    for descriptor, standard in ((standard_input, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    for descriptor in (standard_input, output, report):
        os.close(descriptor)
    end_with_parent(fork_server)
    np.random.seed()  # else all forks would draw the same numbers; `random` does this by itself


if __name__ == "__main__":
    main(*sys.argv[1:])
