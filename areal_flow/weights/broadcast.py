"""Weights over the network: the trainer's process broadcasts a version to the readers that ask.

    weights/address                                 where the trainer's process answers, and a key
    weights/00000012/{tensors.json, hash}           published: names, types, shapes
    weights/.staged-00000013/                       not yet

A reader asks for a version, says which one it holds, and waits; `broadcast_sender` answers. A
reader that dies, hangs or leaves ends its broadcast, and the others ask again. The hash of what a
reader then has is checked, whether it was sent everything or the changes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from areal_flow.errors import WeightsError
from areal_flow.run.durable import write_secret
from areal_flow.run.layout import RunLayout
from areal_flow.weights.broadcast_sender import (
    GONE,
    LATER,
    PIECE_TIMEOUT_S,
    Place,
    Question,
    Sender,
    StagedVersion,
    broadcast,
)
from areal_flow.weights.card_transfer import CardTransfer
from areal_flow.weights.directory import (
    KEEP_VERSIONS,
    DirectoryReader,
    DirectoryWriter,
    hash_of,
    published,
    staged,
)
from areal_flow.weights.gloo import first_line, serve_store
from areal_flow.weights.settings import Carrier

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

ADDRESS_FILE = "address"
DESCRIPTION_FILE = "tensors.json"
KEY_BYTES = 32

PLACE_TIMEOUT_S = 60.0
"""How long a reader waits for its turn before it asks again."""
LOAD_TIMEOUT_S = 600.0
"""How long a reader asks: a trainer that was lost is restored meanwhile."""
RETRY_S = 0.2
END_TIMEOUT_S = 2.0
"""How long a process that ends waits for what it sends."""


class BroadcastWriter(DirectoryWriter):
    """A `WeightsWriter` that keeps tensors in its own memory, for a thread that sends them."""

    def __init__(self, root: Path, *, host: str) -> None:
        super().__init__(root)
        self._host = host
        self._held: dict[int, StagedVersion] = {}
        self.sender: Sender | None = None
        """What answers readers, once there is something to send."""

    def _write(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, like: Mapping[str, Tensor]
    ) -> None:
        described = {name: (str(t.dtype), tuple(t.shape)) for name, t in like.items()}
        (staged(self.root, version) / DESCRIPTION_FILE).write_text(json.dumps(described))
        copies = {name: tensor.clone() for name, tensor in tensors}
        self._held.pop(version, None)  # the order is that of staging
        self._held[version] = StagedVersion(copies)
        for old in list(self._held)[: -KEEP_VERSIONS - 1]:
            del self._held[old]
        if self.sender is None:
            self.sender = self._start_sending()

    def _start_sending(self) -> Sender:
        store, port = serve_store(self._host)
        key, partial = os.urandom(KEY_BYTES), self.root / f".{ADDRESS_FILE}"
        write_secret(partial, json.dumps([self._host, port, key.hex()]))
        partial.rename(self.root / ADDRESS_FILE)
        model = RunLayout(self.root.parents[1]).model
        sender, ended = Sender(self._held, store, self._host, key, model), threading.Event()
        thread = threading.Thread(target=sender.run, args=(ended,), name="weights", daemon=True)
        thread.start()
        # Also when the interpreter ends: it must not end under torch's calls.
        weakref.finalize(self, _end, thread, ended)
        return sender


class BroadcastReader(DirectoryReader):
    def __init__(self, root: Path, *, host: str) -> None:
        super().__init__(root)
        self._host = host

    def _tensors(self, version: int) -> dict[str, Tensor]:
        description = published(self.root, version) / DESCRIPTION_FILE
        if not description.exists():  # of a program that only generates
            return super()._tensors(version)
        described = json.loads(description.read_text())
        deadline, level = monotonic() + LOAD_TIMEOUT_S, logging.WARNING
        while True:
            try:
                return self._receive(version, described)
            except (OSError, RuntimeError) as error:
                cause = first_line(error)
                if monotonic() > deadline:
                    self._held = None  # so that it is not asked for once more
                    raise WeightsError(
                        f"version {version}: expected it from the trainer within "
                        f"{LOAD_TIMEOUT_S:.0f} s, found {cause}"
                    ) from error
                logger.log(level, "version %d is not here yet, asking again: %s", version, cause)
                level = logging.DEBUG
                sleep(RETRY_S)

    def _receive(
        self, version: int, described: Mapping[str, tuple[str, Sequence[int]]]
    ) -> dict[str, Tensor]:
        held, (store, key) = self._held, self._connect()
        place = _ask(store, Question(version, held.version if held else -1))
        if place.num_delta_bytes is None or held is None:
            tensors = _empty_tensors(described)
            broadcast(store, place, tensors, host=self._host, key=key)
            return tensors
        received = _empty_tensors({"delta": ("uint8", (place.num_delta_bytes,))})
        broadcast(store, place, received, host=self._host, key=key)
        return _followed(held.tensors, received["delta"])

    def _connect(self) -> tuple[Any, bytes]:
        """Return the trainer's store, and the key with which it sends weights."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        address, port, key = json.loads((self.root / ADDRESS_FILE).read_text())
        # A trainer that is lost is found so at once: torch would try for 19 s, and print its stack.
        socket.create_connection((address, port), PIECE_TIMEOUT_S).close()
        timeout = timedelta(seconds=PIECE_TIMEOUT_S)
        store = TCPStore(address, port, wait_for_workers=False, timeout=timeout)
        return store, bytes.fromhex(key)


class CardReader(BroadcastReader):
    """Finds an engine its place in a transfer from card to card; the engine compares hashes."""

    def __init__(self, root: Path, host: str, carrier: Carrier, num_workers: int) -> None:
        super().__init__(root, host=host)
        self._question = Question(-1, -1, carrier, num_workers)

    def load_with_hash(self, version: int) -> tuple[Any, str]:
        expected = hash_of(published(self.root, version))
        if expected is None:
            raise WeightsError(f"version {version} was not published in {self.root}")
        return self._tensors(version), expected

    def _receive(self, version: int, _described: object) -> Any:
        store, key = self._connect()
        place = _ask(store, self._question._replace(version=version))
        transfer = CardTransfer(store, place.group, place.rank, key)
        transfer.message("init", timeout_s=PLACE_TIMEOUT_S)  # the trainer may have vLLM to import
        return transfer


def _end(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    thread.join(END_TIMEOUT_S)


def _ask(store: Any, question: Question) -> Place:
    number = store.add("num_questions", 1) - 1
    store.set(f"question-{number}", json.dumps(question))
    store.wait([f"place-{number}"], timedelta(seconds=PLACE_TIMEOUT_S))
    place = Place(*json.loads(store.get(f"place-{number}")))
    if place.group == GONE:
        raise WeightsError(
            f"version {question.version}: the trainer keeps the last {KEEP_VERSIONS}, and this one "
            "is not among them"
        )
    if place.group == LATER:
        raise ConnectionError("a trainer that has not staged it yet")
    return place


def _followed(held: Mapping[str, Tensor], delta: Tensor) -> dict[str, Tensor]:
    from safetensors.torch import load

    from areal_flow.weights.delta import apply_delta, delta_of_parts

    tensors = {name: tensor.clone() for name, tensor in held.items()}
    apply_delta(tensors, delta_of_parts(load(delta.numpy().tobytes())))
    return tensors


def _empty_tensors(described: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, Tensor]:
    import torch

    return {
        name: torch.empty(tuple(shape), dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (dtype, shape) in described.items()
    }
