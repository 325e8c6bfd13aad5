"""What trainer and generators say to each other while vLLM carries weights from card to card.

vLLM's trainer calls a client of four methods. Ours leaves what it is told in the trainer's store,
and each generator hands it to its vLLM. It is pickled, so it is sealed with the run's key.
"""

from __future__ import annotations

import pickle
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

MESSAGE_TIMEOUT_S = 10.0
"""How long an engine that is paused waits for what the trainer says next."""
TRANSFER_TIMEOUT_S = 30.0
"""How long the trainer waits for a transfer; generators that take longer are replaced."""


class CardTransfer(NamedTuple):
    """A generator's place in a transfer, which its engine finishes."""

    store: Any
    group: str
    rank: int
    key: bytes

    def message(self, of: str, *, timeout_s: float = MESSAGE_TIMEOUT_S) -> bytes:
        """Return what `TransferEngine` unpickles, `of` "init" or "update"."""
        name = f"{self.group}/{of}"
        self.store.wait([name], timedelta(seconds=timeout_s))
        return bytes(_seal(self.key).decrypt(self.store.get(name)))

    def finish(self) -> None:
        self.store.set(f"{self.group}/done-{self.rank}", "")


@dataclass(slots=True)
class StoreClient:
    """vLLM's `VLLMWeightSyncClient`, for generators of ranks 1 to `num_readers`."""

    store: Any
    group: str
    key: bytes
    carrier: str
    num_readers: int
    num_workers: int
    """Of each reader."""
    content_hash: str = ""
    """Of what is sent."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._write("init", (self.carrier, init_info))

    def start_weight_update(self) -> None:
        """Do nothing: each engine starts when it is between two steps."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._write("update", (self.content_hash, update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Wait until all have loaded: with "ipc" they read the trainer's memory."""
        done = [f"{self.group}/done-{rank}" for rank in range(1, self.num_readers + 1)]
        self.store.wait(done, timedelta(seconds=TRANSFER_TIMEOUT_S))

    def _write(self, name: str, message: Any) -> None:
        self.store.set(f"{self.group}/{name}", _seal(self.key).encrypt(pickle.dumps(message)))


def _seal(key: bytes) -> Any:
    from cryptography.fernet import Fernet

    return Fernet(urlsafe_b64encode(key))
