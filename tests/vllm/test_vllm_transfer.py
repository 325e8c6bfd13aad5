"""Weights from card to card: vLLM's own engines at both ends, with a queue where NCCL would be."""

from __future__ import annotations

import pickle
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from vllm.distributed.weight_transfer import VLLMWeightSyncClient, nccl_engine

from areal_flow.errors import WeightsError
from areal_flow.generation.vllm import transfer
from areal_flow.generation.vllm.transfer import TransferEngine, init_info
from areal_flow.models.hashing import hash_tensors
from areal_flow.weights import card_transfer
from areal_flow.weights.broadcast import BroadcastWriter, CardReader
from areal_flow.weights.card_transfer import CardTransfer, StoreClient
from tests.engines import (
    VOCABULARY,
    Subject,
    assert_exact,
    request_of,
    run_all,
    versions_of,
    vllm_subject,
)
from tests.policies import small_policy

HOST = "127.0.0.1"


class Queue:
    """One end of what stands for a communicator; the trainer's end waits until the other joins."""

    ends: ClassVar[defaultdict[int, queue.SimpleQueue[Any]]] = defaultdict(queue.SimpleQueue)
    joined: ClassVar[defaultdict[int, threading.Event]] = defaultdict(threading.Event)
    destroyed: ClassVar[defaultdict[int, threading.Event]] = defaultdict(threading.Event)

    def __init__(self, info: Any, *_parallel: Any) -> None:
        self.port = info.master_port
        if hasattr(info, "rank_offset"):
            self.joined[self.port].set()
        else:
            self.joined[self.port].wait()

    def destroy(self) -> None:
        self.destroyed[self.port].set()


def send(*, iterator: Any, group: Queue, post_iter_func: Callable[..., Any], **_sizes: Any) -> None:
    for item in iterator:
        group.ends[group.port].put(post_iter_func(item))


def receive(
    *, iterator: Any, group: Queue, post_unpack_func: Callable[..., Any], **_sizes: Any
) -> None:
    for name, (shape, dtype) in iterator:
        tensor = group.ends[group.port].get(timeout=5)
        assert (list(tensor.shape), tensor.dtype) == (shape, dtype)
        post_unpack_func([(name, tensor)])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BroadcastWriter]:
    """Yield the trainer's writer of a run on one machine, whose cards are main memory."""
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", Queue)
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", Queue)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", send)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_consumer", receive)
    monkeypatch.setattr(transfer, "DEVICE", "cpu")
    small_policy(vocab_size=VOCABULARY).config.save_pretrained(tmp_path / "model")
    yield BroadcastWriter(tmp_path / "weights" / "00000000", host=HOST)
    for joined in Queue.joined.values():
        joined.set()  # the threads that were given up


def publish(writer: BroadcastWriter, subject: Subject, version: int) -> str:
    content_hash = writer.stage(version, subject.weights(version))
    writer.publish(version)
    return content_hash


def reader_of(writer: BroadcastWriter) -> CardReader:
    return CardReader(writer.root, HOST, "nccl", 1)


@pytest.mark.parametrize(("interruption", "tied"), [("interrupt", False), ("keep", True)])
def test_running_completions_go_on_with_weights_that_came_by_vllm_s_own_engine(
    run: BroadcastWriter, interruption: str, tied: bool
) -> None:
    subject, model = vllm_subject(tied=tied), run.root.parents[1] / "model"
    small_policy(vocab_size=VOCABULARY, tied=tied).config.save_pretrained(model)
    engine, request = subject.make(interruption=interruption), request_of("r")
    engine.add(request)
    for _ in range(6):
        engine.step()
    for version in (1, 2):
        expected = publish(run, subject, version)
        place, served = reader_of(run).load_with_hash(version)
        assert (type(place), served) == (CardTransfer, expected)
        engine.load_weights(place, version=version)
        engine.step()
    completions = run_all(engine)["r"]
    if interruption == "interrupt":
        assert {v for each in completions for v in versions_of(each)} == {0, 1, 2}
        assert_exact(subject, request, completions)
    after = run_all(engine, request_of("after"))["after"]
    assert {v for each in after for v in versions_of(each)} == {2}
    assert_exact(subject, request_of("after"), after)


@pytest.mark.parametrize("joins", [False, True])
def test_generator_that_leaves_a_transfer_holds_up_nobody(
    run: BroadcastWriter,
    joins: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(card_transfer, "TRANSFER_TIMEOUT_S", 0.5)
    subject = vllm_subject()
    publish(run, subject, 1)
    place, _ = reader_of(run).load_with_hash(1)  # and is never handed to an engine
    engine = subject.make()
    if joins:
        port = pickle.loads(place.message("init"))[1]["master_port"]
        Queue.joined[port].set()
        assert Queue.destroyed[port].wait(10), "the trainer's end was not closed"
        assert "a generator left while weights went to its card" in caplog.text
    monkeypatch.setattr(card_transfer, "TRANSFER_TIMEOUT_S", 30)
    engine.load_weights(reader_of(run).load_with_hash(1)[0], version=1)
    completions = run_all(engine, request_of())["r"]
    assert {v for each in completions for v in versions_of(each)} == {1}
    assert_exact(subject, request_of(), completions)


def test_weights_of_another_hash_are_refused() -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2)}

    class Model(torch.nn.Module):
        def load_weights(self, weights: Any) -> None: ...

    class Received:
        model: Any

        def update_weights(self, update_info: dict[str, Any]) -> None:
            for name in sorted(update_info):
                self.model.load_weights(iter([(name, update_info[name])]))

    engine = TransferEngine.__new__(TransferEngine)
    engine.model, engine._by_card, engine._tied = Model(), Received(), {}
    content_hash = hash_tensors(tensors)
    engine._receive_by_card(content_hash, tensors)
    changed = {**tensors, "b": torch.ones(2) * 2}
    with pytest.raises(WeightsError, match=f"expected weights with hash {content_hash} by card"):
        engine._receive_by_card(content_hash, changed)


@pytest.mark.parametrize(("rank", "offset"), [(1, 1), (3, 9)])
def test_each_generator_has_ranks_of_its_own(
    rank: int, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", lambda info, _: told.append(info))
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=4), model_config=None)
    engine = TransferEngine(None, config, torch.device("cpu"), torch.nn.Module())  # type: ignore[arg-type]
    sent = {"master_address": HOST, "master_port": 1, "rank_offset": 1, "world_size": 13}
    message = pickle.dumps(("nccl", sent))
    engine.init_transfer_engine(SimpleNamespace(message=message, rank=rank))
    assert [info.rank_offset for info in told] == [offset]


def test_trainer_s_client_is_what_vllm_calls() -> None:
    client = StoreClient(None, "", b"", "nccl", num_readers=1, num_workers=1)
    assert isinstance(client, VLLMWeightSyncClient)


@pytest.mark.parametrize("carrier", ["nccl", "ipc"])
def test_init_info_is_of_its_carrier(carrier: str) -> None:
    info = init_info(carrier, HOST, num_ranks=5)
    assert (info.backend, info.is_sender) == (carrier, True)
    assert getattr(info, "world_size", 5) == 5
