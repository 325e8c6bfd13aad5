"""Process groups over gloo, through main memory: gloo runs everywhere, and notices a dead peer.

A group is an object that its owner holds; its end closes the connections.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PIECE_BYTES = 1 << 26
NONCE_BYTES, TAG_BYTES = 12, 16
"""Of AES-GCM, before and behind each piece."""


def serve_store(host: str) -> tuple[Any, int]:
    """Return a store for other processes, and the port that it is reached at."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # It closes the listener; of itself it would listen everywhere.
    descriptor = listener.detach()
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    return store, port


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def connect_gloo(store: Any, *, rank: int, num_ranks: int, host: str, timeout_s: float) -> Any:
    """Return a group once all its processes are there; nobody else may use its store."""
    # Here, since not every build of torch has it.
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank, num_ranks, options)


def broadcast_tensors(group: Any, tensors: Mapping[str, Tensor], *, key: bytes) -> None:
    """Send (rank 0) or receive tensors in place, encrypted: gloo itself sends plain bytes.

    Raises:
        RuntimeError: a member leaves or is silent.
        ConnectionError: what was received was not sent with this key.
    """
    import torch
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher = AESGCM(key)
    for piece in _pieces(tensors):
        plain = piece.numpy().data
        sent = torch.empty(NONCE_BYTES + len(plain) + TAG_BYTES, dtype=torch.uint8)
        whole = sent.numpy().data
        if group.rank() == 0:
            whole[:NONCE_BYTES] = os.urandom(NONCE_BYTES)
            cipher.encrypt_into(bytes(whole[:NONCE_BYTES]), plain, None, whole[NONCE_BYTES:])
        group.broadcast([sent]).wait()
        if group.rank() != 0:
            try:
                cipher.decrypt_into(bytes(whole[:NONCE_BYTES]), whole[NONCE_BYTES:], None, plain)
            except InvalidTag:
                raise ConnectionError("weights that were not sent with this run's key") from None


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    import torch

    for name in sorted(tensors):
        if tensors[name].numel():
            yield from torch.split(tensors[name].view(-1).view(torch.uint8), PIECE_BYTES)
