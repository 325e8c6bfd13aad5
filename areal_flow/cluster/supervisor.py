"""Runs one worker process on another machine, for as long as its driver's channel stays open.

Over `ssh` the channel is the standard input, which closes when the connection ends. A job connects
to its driver: with TLS, by the run's certificate, and with the job's token. The supervisor loads
nothing beyond the standard library, so that it starts at once and cannot hang.

| on the channel       | what follows                                           |
|----------------------|--------------------------------------------------------|
| `KILL`               | the worker is killed                                   |
| `END`, or it is shut | the worker is asked to end, and killed after `GRACE_S` |

Once a second it reports the worker's processor time, since a worker that is busy in one long call
sends no heartbeats. Over `ssh` reports are lines of the output, which it shares with the worker.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread

KILL, END = b"k", b"e"
TO_DRIVER = "--driver"
"""Comes before the driver's host and port, the folder of certificates and the token's file."""
GRACE_S = 5.0
REPORT_EVERY_S = 1.0
REPORT_START, REPORT_END = b"\x1eareal-flow ", b"\n"


def main(arguments: list[str]) -> int:
    """Run Python with these arguments and this process's number; return as a shell would."""
    channel = None
    if arguments[0] == TO_DRIVER:
        _, host, port, certificates, token, *arguments = arguments
        channel = _connect(host, int(port), Path(certificates), Path(token))
    command = [sys.executable, *arguments, str(os.getpid())]
    worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    Thread(target=_obey, args=(worker, channel), daemon=True).start()
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


def _obey(worker: subprocess.Popen[bytes], channel: ssl.SSLSocket | None) -> None:
    order: bytes | None = None
    try:
        while order is None:
            _report(worker.pid, channel)
            order = _next_order(channel)
    except OSError:
        pass  # the connection is lost
    if order != KILL:
        worker.terminate()
        with suppress(subprocess.TimeoutExpired):
            worker.wait(GRACE_S)
    worker.kill()


def _next_order(channel: ssl.SSLSocket | None) -> bytes | None:
    """Return an order, nothing if the channel is shut, or None if it is time to report."""
    if channel is None:
        ready, _, _ = select.select([sys.stdin], [], [], REPORT_EVERY_S)
        return os.read(sys.stdin.fileno(), 1) if ready else None
    channel.settimeout(REPORT_EVERY_S)
    try:
        return channel.recv(1)
    except TimeoutError:
        return None


def _report(pid: int, channel: ssl.SSLSocket | None) -> None:
    """Report the processor time of a process, unless a driver that hangs reads nothing."""
    report = REPORT_START + _processor_use(pid).encode() + REPORT_END
    if not select.select([], [channel or sys.stdout], [], 0)[1]:
        return
    if channel:
        channel.sendall(report)
    else:
        os.write(sys.stdout.fileno(), report)


def _processor_use(pid: int) -> str:
    """Return a process's processor seconds and its state, as Linux names it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # another system, or it has ended
        return "nan ?"
    fields = text.rpartition(")")[2].split()  # the program's name before it may have spaces
    ticks = int(fields[11]) + int(fields[12])
    return f"{ticks / os.sysconf('SC_CLK_TCK'):.2f} {fields[0]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
