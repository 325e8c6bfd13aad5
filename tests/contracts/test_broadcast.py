"""A broadcast: readers come, leave, die and hang, and the others have the published bits."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from subprocess import PIPE
from time import monotonic

import pytest
import torch
from torch import Tensor

from areal_flow.audit.files import listed_weights
from areal_flow.errors import WeightsError
from areal_flow.models.hashing import hash_tensors
from areal_flow.run.layout import RunLayout
from areal_flow.weights import broadcast, broadcast_sender, gloo
from areal_flow.weights.broadcast import KEY_BYTES, BroadcastReader, BroadcastWriter
from areal_flow.weights.directory import KEEP_VERSIONS, DirectoryWriter

HOST = "127.0.0.1"
PIECE_BYTES = 1 << 12

READER = f"""
import signal, sys
from pathlib import Path
from areal_flow.models.hashing import hash_tensors
from areal_flow.weights import gloo
from areal_flow.weights.broadcast import BroadcastReader

pieces = gloo._pieces
def two_pieces(tensors):
    for number, piece in enumerate(pieces(tensors)):
        if number == 2 and how == "stops":
            print("stopped", flush=True)
            signal.pause()
        yield piece

gloo.PIECE_BYTES, gloo._pieces = {PIECE_BYTES}, two_pieces
reader = BroadcastReader(Path(sys.argv[1]), host="{HOST}")
for line in sys.stdin:
    how = line.strip()
    print("asks", flush=True)
    print(hash_tensors(reader.load(reader.newest())), flush=True)
"""

Weights = dict[str, Tensor]


def weights(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "matrix": torch.randn(300, 400, generator=generator),
        "half": torch.randn(1000, generator=generator).bfloat16(),
        "scalar": torch.tensor(version),
        "none": torch.zeros(0, 4),
    }


def small_steps(count: int, share: float = 0.03) -> list[Weights]:
    """Return versions of which each changes little of the one before it."""
    generator = torch.Generator().manual_seed(0)
    made = [{"matrix": torch.randn(300, 700, generator=generator).bfloat16()}]
    for _ in range(1, count):
        moved = torch.rand(300, 700, generator=generator) < share
        before = made[-1]["matrix"]
        made.append({"matrix": torch.where(moved, before * 1.01, before)})
    return made


def publish(writer: BroadcastWriter, *versions: int) -> None:
    for version in versions:
        publish_weights(writer, version, weights(version))


def publish_weights(writer: BroadcastWriter, version: int, tensors: Weights) -> None:
    writer.stage(version, tensors)
    writer.publish(version)


def reader_of(root: Path) -> BroadcastReader:
    return BroadcastReader(root, host=HOST)


def process_that_reads(root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", READER, str(root)]
    return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)


def tell(process: subprocess.Popen[str], how: str) -> str:
    """Have a process read the newest version; return the first line that it answers then."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{how}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "asks\n"
    return process.stdout.readline().strip()


def sent_bytes(writer: BroadcastWriter) -> int:
    """Return what was sent since the last call."""
    assert writer.sender is not None
    num_bytes, writer.sender.num_sent_bytes = writer.sender.num_sent_bytes, 0
    return num_bytes


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BroadcastWriter:
    monkeypatch.setattr(gloo, "PIECE_BYTES", PIECE_BYTES)
    return BroadcastWriter(tmp_path, host=HOST)


def test_readers_that_ask_together_come_late_or_want_another_version_are_answered(
    writer: BroadcastWriter, tmp_path: Path
) -> None:
    publish(writer, 0, 1)
    with process_that_reads(tmp_path) as elsewhere, ThreadPoolExecutor(4) as threads:
        told = threads.submit(tell, elsewhere, "reads")
        wanted = (1, 0, 1)
        loads = [threads.submit(reader_of(tmp_path).load, version) for version in wanted]
        for version, load in zip(wanted, loads, strict=True):
            assert hash_tensors(load.result()) == hash_tensors(weights(version))
        assert told.result() == hash_tensors(weights(1))
        elsewhere.communicate()
    assert elsewhere.returncode == 0
    publish(writer, 2)
    assert hash_tensors(reader_of(tmp_path).load(2)) == hash_tensors(weights(2))


def test_what_was_answered_does_not_stay_in_the_store(
    writer: BroadcastWriter, tmp_path: Path
) -> None:
    publish(writer, 0)
    for _ in range(8):
        reader_of(tmp_path).load(0)
    assert writer.sender is not None
    keys = writer.sender.store.list_keys()
    assert len(keys) <= 1 + 3 * (1 + 1 + 2), "the count, and of three broadcasts: question, place"


@pytest.mark.parametrize(
    ("end", "held"),
    [(signal.SIGKILL, True), pytest.param(None, False, marks=pytest.mark.slow)],
    ids=["dies, sent what changed", "hangs, sent everything"],
)
def test_reader_that_stops_in_mid_transfer_holds_up_neither_trainer_nor_readers(
    end: signal.Signals | None,
    held: bool,
    writer: BroadcastWriter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(broadcast_sender, "PIECE_TIMEOUT_S", 3.0)
    made, reader = small_steps(3), reader_of(tmp_path)
    publish_weights(writer, 0, made[0])
    with process_that_reads(tmp_path) as stopped, ThreadPoolExecutor(1) as threads:
        if held:
            assert tell(stopped, "reads") == hash_tensors(reader.load(0))
            publish_weights(writer, 1, made[1])
        version = reader.newest()
        monkeypatch.setattr(broadcast_sender, "GATHER_S", 1.0)
        other = threads.submit(reader.load, version)
        assert tell(stopped, "stops") == "stopped"
        began = monotonic()
        publish_weights(writer, 2, made[2])
        assert monotonic() - began < 1
        if end:
            stopped.send_signal(end)
        assert hash_tensors(other.result(timeout=20)) == hash_tensors(made[version])
        assert hash_tensors(reader_of(tmp_path).load(2)) == hash_tensors(made[2])
        assert "the others ask again" in caplog.text
        stopped.kill()


@pytest.mark.slow
def test_reader_is_sent_what_changed_since_what_it_holds_if_that_is_less(
    writer: BroadcastWriter, tmp_path: Path
) -> None:
    made, follower = small_steps(KEEP_VERSIONS + 3), reader_of(tmp_path)
    missed_two, missed_too_many = reader_of(tmp_path), reader_of(tmp_path)
    whole = made[0]["matrix"].nbytes
    with process_that_reads(tmp_path) as elsewhere:
        for version, tensors in enumerate(made):
            publish_weights(writer, version, tensors)
            expected = hash_tensors(tensors)
            assert hash_tensors(follower.load(version)) == expected
            assert (
                sent_bytes(writer) == whole if version == 0 else sent_bytes(writer) < 0.05 * whole
            )
            assert tell(elsewhere, "reads") == expected
            sent_bytes(writer)
            if version % 3 == 0:
                assert hash_tensors(missed_two.load(version)) == expected
                assert (sent_bytes(writer) < 0.15 * whole) == (version > 0)
            if version in (0, KEEP_VERSIONS + 2):
                assert hash_tensors(missed_too_many.load(version)) == expected
                assert sent_bytes(writer) == whole
        elsewhere.communicate()


def test_reader_is_sent_everything_where_what_changed_is_no_less(
    writer: BroadcastWriter, tmp_path: Path
) -> None:
    reader, made = reader_of(tmp_path), small_steps(2, share=1.0)
    for version, tensors in enumerate([*made, {"a": torch.ones(9, dtype=torch.bfloat16)}]):
        publish_weights(writer, version, tensors)
        assert hash_tensors(reader.load(version)) == hash_tensors(tensors)
        assert sent_bytes(writer) == sum(tensor.nbytes for tensor in tensors.values())


def test_readers_that_hold_different_versions_ask_together(
    writer: BroadcastWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, readers = small_steps(3), [reader_of(tmp_path) for _ in range(4)]
    for version in (0, 1):
        publish_weights(writer, version, made[version])
        readers[version].load(version)
    readers[2].load(1)
    publish_weights(writer, 2, made[2])
    sent_bytes(writer)
    monkeypatch.setattr(broadcast_sender, "GATHER_S", 0.5)
    with ThreadPoolExecutor(4) as threads:
        loads = threads.map(lambda reader: hash_tensors(reader.load(2)), readers)
        assert set(loads) == {hash_tensors(made[2])}
    whole = made[0]["matrix"].nbytes
    assert whole < sent_bytes(writer) < 1.2 * whole  # everything once, and two small deltas


def test_reader_whose_weights_are_not_those_of_the_trainer_is_sent_everything(
    writer: BroadcastWriter, tmp_path: Path
) -> None:
    """An engine changed what it was given; a trainer that was restored made another version."""
    made, reader = small_steps(3), reader_of(tmp_path)
    publish_weights(writer, 0, made[0])
    reader.load(0)["matrix"].zero_()
    publish_weights(writer, 1, made[1])
    assert hash_tensors(reader.load(1)) == hash_tensors(made[1])
    successor, forked = BroadcastWriter(tmp_path, host=HOST), small_steps(3, share=0.04)
    for version in (0, 1, 2):
        successor.stage(version, forked[version])
    successor.publish(2)
    assert hash_tensors(reader.load(2)) == hash_tensors(forked[2])


def test_trainer_that_was_started_anew_answers_who_asked_the_old_one(
    writer: BroadcastWriter, tmp_path: Path
) -> None:
    publish(writer, 0, 1)
    reader = reader_of(tmp_path)
    reader.load(1)
    (tmp_path / broadcast.ADDRESS_FILE).unlink()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(reader.load, 1)
        successor = BroadcastWriter(tmp_path, host=HOST)
        successor.stage(0, weights(0))
        assert not wait([asked], timeout=0.5).done
        successor.stage(1, weights(1))
        successor.publish(1)
        assert hash_tensors(asked.result(timeout=20)) == hash_tensors(weights(1))


def test_version_that_the_trainer_no_longer_has_is_refused_at_once(
    writer: BroadcastWriter, tmp_path: Path
) -> None:
    publish(writer, *range(KEEP_VERSIONS + 1))
    del writer._held[0]
    (tmp_path / "00000001").rename(tmp_path / "00000000")
    with pytest.raises(WeightsError, match=f"keeps the last {KEEP_VERSIONS}"):
        reader_of(tmp_path).load(0)


def test_reader_gives_up_on_a_trainer_that_does_not_come_back(
    writer: BroadcastWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That its process is gone is found at once, as often as the reader asks."""
    monkeypatch.setattr(broadcast, "LOAD_TIMEOUT_S", 0.3)
    publish(writer, 0)
    with socket.create_server((HOST, 0)) as listener:
        address = json.dumps([*listener.getsockname(), bytes(KEY_BYTES).hex()])
    (tmp_path / broadcast.ADDRESS_FILE).write_text(address)
    began = monotonic()
    with pytest.raises(WeightsError, match=r"expected it from the trainer within .* refused"):
        reader_of(tmp_path).load(0)
    assert monotonic() - began < 5


class Wire:
    """A group of two processes of which this one sends or receives; it keeps what was sent."""

    def __init__(self, rank: int, sent: list[torch.Tensor]) -> None:
        self.rank = lambda: rank
        self._sent = sent

    def broadcast(self, tensors: list[torch.Tensor]) -> Wire:
        if self.rank() == 0:
            self._sent.append(tensors[0].clone())
        else:
            tensors[0].copy_(self._sent.pop(0))
        return self

    def wait(self) -> None: ...


def test_weights_are_sent_encrypted_and_only_with_the_key_received() -> None:
    tensors, sent = {"a": torch.arange(1000), "b": torch.ones(3).bfloat16()}, []
    gloo.broadcast_tensors(Wire(0, sent), tensors, key=bytes(KEY_BYTES))
    assert tensors["a"].numpy().tobytes()[:100] not in b"".join(t.numpy().tobytes() for t in sent)
    received = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    gloo.broadcast_tensors(Wire(1, [*sent]), received, key=bytes(KEY_BYTES))
    assert hash_tensors(received) == hash_tensors(tensors)
    with pytest.raises(ConnectionError, match="not sent with this run's key"):
        gloo.broadcast_tensors(Wire(1, [*sent]), received, key=b"1" * KEY_BYTES)


def test_only_its_user_reads_the_key(writer: BroadcastWriter, tmp_path: Path) -> None:
    publish(writer, 0)
    assert (tmp_path / broadcast.ADDRESS_FILE).stat().st_mode & 0o777 == 0o600


def test_what_arrives_changed_is_refused(writer: BroadcastWriter, tmp_path: Path) -> None:
    publish(writer, 0)
    writer._held[0].tensors["half"][3] += 1
    with pytest.raises(WeightsError, match="expected weights with hash"):
        reader_of(tmp_path).load(0)


def test_policy_that_nobody_trains_is_read_from_its_file(tmp_path: Path) -> None:
    """As when a model of such a run is evaluated."""
    writer = DirectoryWriter(tmp_path)
    writer.stage(0, weights(0))
    writer.publish(0)
    assert hash_tensors(reader_of(tmp_path).load(0)) == hash_tensors(weights(0))


def test_audit_leaves_out_what_is_nowhere_on_disk(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    publish(BroadcastWriter(layout.weights_of(0), host=HOST), 0)
    assert (layout.weights_of(0) / "00000000").is_dir()
    assert not listed_weights(layout)
