"""What answers readers of a broadcast: a thread of the trainer's process, beside its steps.

Readers that ask at the same time for the same version, and hold the same one, are a group for one
broadcast. Of a version that follows from what they hold they are sent what has changed.

| who | waits for | unblocked by |
|---|---|---|
| the sender's thread | a question, or the end of its writer | looking every `POLL_S` |
| a reader | its place in a group | the sender, after the broadcasts before it |
| a group | its members, and each piece | a member that leaves; `PIECE_TIMEOUT_S` |
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, NamedTuple

from areal_flow.weights.card_transfer import StoreClient
from areal_flow.weights.gloo import broadcast_tensors, connect_gloo, first_line
from areal_flow.weights.settings import Carrier

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

PIECE_TIMEOUT_S = 10.0
"""How long a group waits for a member that neither answers nor leaves."""
GATHER_S = 0.02
"""How long the sender waits for others that ask now."""
POLL_S = 0.01

GONE, LATER = "gone", "later"
"""Instead of a group: the version is too old, or is yet to be staged."""


class Question(NamedTuple):
    """What a reader asks for, the version that it holds (-1: none), and how it is to come."""

    version: int
    held: int
    carrier: Carrier = "gloo"
    num_workers: int = 1
    """Processes of the reader's engine, if weights come from card to card."""


class Place(NamedTuple):
    """Where a reader stands in which group, and what it is sent."""

    group: str
    rank: int = 0
    num_ranks: int = 0
    num_delta_bytes: int | None = None
    """Of what has changed since the version that it holds; None: it is sent everything."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedVersion:
    tensors: Mapping[str, Tensor]
    deltas: dict[int, Tensor | None] = field(default_factory=dict)
    """As bytes, by the version that they follow from; None where they are no less. They are made
    when a reader asks, by the sender's thread alone."""


@dataclass(slots=True)
class Sender:
    """Answers the questions that readers leave in a store."""

    staged: Mapping[int, StagedVersion]
    """The trainer's thread adds and removes versions."""
    store: Any
    host: str
    key: bytes
    model: Path
    """The policy's configuration, for transfers between cards."""
    num_sent_bytes: int = 0
    """Each group's once, however many members it has, and also if it did not get them all."""

    def run(self, ended: threading.Event) -> None:
        num_finished = num_answered = 0
        while not ended.wait(POLL_S):
            if self.store.add("num_questions", 0) > num_answered:
                sleep(GATHER_S)
                num_questions = self.store.add("num_questions", 0)
                self._answer(range(num_answered, num_questions))
                self._forget(num_finished)
                num_finished, num_answered = num_answered, num_questions

    def _answer(self, asked: Iterable[int]) -> None:
        groups: dict[Question, list[int]] = {}
        for number in asked:
            with suppress(RuntimeError):  # a reader died before it said what it wants
                self.store.wait([f"question-{number}"], timedelta(seconds=1))
                question = Question(*json.loads(self.store.get(f"question-{number}")))
                groups.setdefault(question, []).append(number)
        for question in [each for each in groups if self._delta(each) is None]:
            numbers = groups.pop(question)
            groups.setdefault(question._replace(held=-1), []).extend(numbers)
        for question, numbers in groups.items():
            self._answer_group(question, numbers)

    def _forget(self, num_finished: int) -> None:
        """Delete what the first questions left in the store, their groups' addresses too."""
        for key in self.store.list_keys():
            number = key.partition("-")[2].partition("/")[0]
            if number.isdigit() and int(number) < num_finished:
                self.store.delete_key(key)

    def _answer_group(self, question: Question, numbers: list[int]) -> None:
        version = self.staged.get(question.version)
        if version is None:
            # A trainer that was restored stages on its way what its predecessor had.
            is_old = max(self.staged, default=-1) > question.version
            for number in numbers:
                self._place(number, Place(GONE if is_old else LATER))
            return
        delta = version.deltas.get(question.held)
        sent = version.tensors if delta is None else {"delta": delta}
        name, num_ranks = f"group-{numbers[0]}", len(numbers) + 1
        for rank, number in enumerate(numbers, 1):
            num_delta_bytes = None if delta is None else delta.nbytes
            self._place(number, Place(name, rank, num_ranks, num_delta_bytes))
        self.num_sent_bytes += sum(tensor.nbytes for tensor in sent.values())
        try:
            if question.carrier == "gloo":
                broadcast(self.store, Place(name, 0, num_ranks), sent, host=self.host, key=self.key)
            else:
                from areal_flow.generation.vllm.transfer import send_between_cards

                client = StoreClient(
                    self.store, name, self.key, question.carrier, len(numbers), question.num_workers
                )
                send_between_cards(sent, self.model, client, host=self.host)
        except (RuntimeError, ImportError) as error:  # vLLM may not be where the trainer is
            cause = first_line(error)
            logger.warning("a reader left while weights were sent; the others ask again: %s", cause)

    def _delta(self, question: Question) -> Tensor | None:
        version, base = self.staged.get(question.version), self.staged.get(question.held)
        if version is None or base is None:
            return None
        if question.held not in version.deltas:
            for other in list(self.staged.values()):
                if other is not version:  # whose deltas may be nearly as large as it is
                    other.deltas.clear()
            version.deltas[question.held] = _delta_bytes(base.tensors, version.tensors)
        return version.deltas[question.held]

    def _place(self, number: int, place: Place) -> None:
        self.store.set(f"place-{number}", json.dumps(place))


def broadcast(
    store: Any, place: Place, tensors: Mapping[str, Tensor], *, host: str, key: bytes
) -> None:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    group = connect_gloo(
        PrefixStore(place.group, store),
        rank=place.rank,
        num_ranks=place.num_ranks,
        host=host,
        timeout_s=PIECE_TIMEOUT_S,
    )
    broadcast_tensors(group, tensors, key=key)


def _delta_bytes(base: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor | None:
    """Return what to send to a reader that has `base`; None where that is not less than all."""
    import torch
    from safetensors.torch import save

    from areal_flow.weights import delta as deltas

    if not (deltas.is_delta_candidate(weights) and deltas.are_alike(base, weights)):
        return None
    delta = deltas.make_delta(base, weights)
    if not deltas.is_smaller(delta, weights):
        return None
    return torch.frombuffer(bytearray(save(deltas.labelled_parts(delta))), dtype=torch.uint8)
