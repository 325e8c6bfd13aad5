"""Runs one worker process on another machine, for as long as its driver's channel stays open.

Over `ssh` the channel is the standard input, which closes when the connection ends. A job connects
to its driver: with TLS, by the run's certificate, and with the job's token. The supervisor loads
nothing beyond the standard library, so that it starts at once and cannot hang.

| on the channel       | what follows                                           |
|----------------------|--------------------------------------------------------|
| `KILL`               | the worker is killed                                   |
| `END`, or it is shut | the worker is asked to end, and killed after `GRACE_S` |
"""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread

KILL, END = b"k", b"e"
TO_DRIVER = "--driver"
"""Comes before the driver's host and port, the folder of certificates and the token's file."""
GRACE_S = 5.0


def main(arguments: list[str]) -> int:
    """Run Python with these arguments and this process's number; return as a shell would."""
    read: Callable[[int], bytes] = partial(os.read, sys.stdin.fileno())
    if arguments[0] == TO_DRIVER:
        _, host, port, certificates, token, *arguments = arguments
        read = _connect(host, int(port), Path(certificates), Path(token)).recv
    command = [sys.executable, *arguments, str(os.getpid())]
    worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    Thread(target=_obey, args=(worker, read), daemon=True).start()
    code = worker.wait()
    return 128 - code if code < 0 else code


def _connect(host: str, port: int, certificates: Path, token: Path) -> ssl.SSLSocket:
    """Connect as Dask does: both sides show a certificate of the run's authority, not of a host.

    One thread at a time may use the connection: OpenSSL's are not safe for two.
    """
    try:
        context = ssl.create_default_context(cafile=certificates / "ca.pem")
        context.check_hostname = False
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.load_cert_chain(certificates / "certificate.pem", certificates / "key.pem")
        channel = context.wrap_socket(socket.create_connection((host, port)))
        channel.sendall(token.read_bytes())
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        reason = f"{where}{error.strerror or error}"
        sys.exit(f"the driver at {host}:{port} cannot be reached: {reason}")
    return channel


def _obey(worker: subprocess.Popen[bytes], read: Callable[[int], bytes]) -> None:
    order = b""
    with suppress(OSError):  # the connection is lost
        order = read(1)
    if order != KILL:
        worker.terminate()
        with suppress(subprocess.TimeoutExpired):
            worker.wait(GRACE_S)
    worker.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
