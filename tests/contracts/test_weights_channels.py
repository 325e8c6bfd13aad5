"""The contract of every weights medium: readers get what was published."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from areal_flow.core.errors import WeightsError
from areal_flow.policy.models.hashing import MAX_RAW_BYTES, hash_tensors
from areal_flow.policy.models.policy import assign_tensors, policy_tensors
from areal_flow.policy.weights.channel import (
    HashingWriter,
    StreamedTensors,
    WeightsReader,
    WeightsWriter,
    described,
)
from areal_flow.policy.weights.directory import KEEP_VERSIONS, DirectoryReader, DirectoryWriter
from areal_flow.policy.weights.shared_memory import ChosenChannel, free_segments
from tests.fakes import MemoryReader, MemoryWriter
from tests.policies import small_policy


@dataclass(frozen=True)
class Medium:
    """Both ends of a medium; `memory` pushes, the others are pulled from."""

    writer: WeightsWriter
    reader: WeightsReader


@pytest.fixture(params=["directory", "shared_memory", "memory"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Medium]:
    root = tmp_path / "weights"
    if request.param == "memory":
        writer = MemoryWriter()
        yield Medium(writer, MemoryReader(writer))
    else:
        yield Medium(ChosenChannel(root, request.param), ChosenChannel(root, request.param))
        free_segments(root)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 2), value), "b": torch.full((4,), value, dtype=torch.bfloat16)}


def test_published_weights_come_back_exactly(medium: Medium) -> None:
    served_hash = medium.writer.stage(3, weights(0.1))
    medium.writer.publish(3)
    loaded = medium.reader.load(3)
    assert medium.reader.newest() == 3
    assert hash_tensors(loaded) == served_hash == hash_tensors(weights(0.1))


def test_driver_knows_the_size_of_published_weights(medium: Medium) -> None:
    if not isinstance(medium.writer, ChosenChannel):
        pytest.skip("memory is a test's medium, without a driver")
    medium.writer.stage(3, weights(0.1))
    medium.writer.publish(3)
    assert medium.writer.num_bytes(3) == 3 * 2 * 4 + 4 * 2
    assert medium.writer.num_bytes(4) == 0


class GatheredTensors:
    """Tensors of a sharded trainer: gathered on each read, which is recorded."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, lost_at: str = "") -> None:
        self.tensors = tensors
        self.names_read: list[str] = []
        self.most_alive = 0
        self._lost_at = lost_at
        self._made: list[weakref.ref[object]] = []

    def streamed(self) -> StreamedTensors:
        names = sorted(self.tensors, reverse=True)
        like = {name: torch.empty_like(self.tensors[name], device="meta") for name in names}
        return StreamedTensors(like, read=self.read)

    def read(self, name: str) -> torch.Tensor:
        self.names_read.append(name)
        if name == self._lost_at:
            raise RuntimeError("a rank left")
        tensor = self.tensors[name]
        content = tensor.flatten().view(torch.uint8).numpy().copy()
        self._made.append(weakref.ref(content))  # it lives as long as any view of the tensor
        self.most_alive = max(self.most_alive, sum(made() is not None for made in self._made))
        return torch.from_numpy(content).view(tensor.dtype).view(tensor.shape)


def half_weights(version: int) -> dict[str, torch.Tensor]:
    """Return weights that change little after the first version."""
    tensors = {name: torch.ones(3, 400, dtype=torch.bfloat16) for name in "abc"}
    tensors["b"][0, :version] = 2.0
    return tensors


def large_weights() -> dict[str, torch.Tensor]:
    """Return tensors that another thread hashes, and a small one amid them."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    large = {f"{n:02d}": torch.rand(1000, 700).to(dtypes[n % 3]) for n in range(9)}
    assert min(tensor.nbytes for tensor in large.values()) > MAX_RAW_BYTES
    return {**large, "04a": torch.rand(3)}


@pytest.mark.parametrize("weights_of", [weights, half_weights])
def test_streamed_weights_are_read_once_in_order_and_come_back_exactly(
    medium: Medium, weights_of: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    for version in range(4):
        gathered = GatheredTensors(weights_of(version))
        served_hash = medium.writer.stage(version, gathered.streamed())
        medium.writer.publish(version)
        assert gathered.names_read == sorted(gathered.tensors)
        loaded = medium.reader.load(version)
        assert hash_tensors(loaded) == served_hash == hash_tensors(weights_of(version))


@pytest.mark.parametrize("medium", ["directory", "shared_memory"], indirect=True)
def test_few_of_the_streamed_tensors_are_in_memory_at_a_time(
    medium: Medium, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_flow.core.machine.usable_cores", lambda: 2)  # one thread hashes
    for writer in (medium.writer, HashingWriter()):
        gathered = GatheredTensors(large_weights())
        served_hash = writer.stage(0, gathered.streamed())
        assert gathered.names_read == sorted(gathered.tensors)
        assert gathered.most_alive <= 3
        assert served_hash == hash_tensors(gathered.tensors)
        writer.publish(0)
    assert medium.reader.newest() == 0


@pytest.mark.parametrize("lost_at", ["a", "b", "c"])
def test_weights_of_which_a_read_fails_are_not_published_and_the_next_ones_are(
    medium: Medium, lost_at: str
) -> None:
    for version in (0, 1, 2):
        medium.writer.stage(version, half_weights(version))
        if version < 2:
            medium.writer.publish(version)
    with pytest.raises(RuntimeError, match="a rank left"):
        medium.writer.stage(2, GatheredTensors(half_weights(2), lost_at=lost_at).streamed())
    assert medium.reader.newest() == 1
    assert hash_tensors(medium.reader.load(1)) == hash_tensors(half_weights(1))
    for version in (2, 3):
        medium.writer.stage(version, GatheredTensors(half_weights(version)).streamed())
        medium.writer.publish(version)
        assert hash_tensors(medium.reader.load(version)) == hash_tensors(half_weights(version))


@pytest.mark.parametrize("medium", ["directory", "shared_memory"], indirect=True)
def test_failed_read_takes_the_place_of_what_was_staged_before(medium: Medium) -> None:
    medium.writer.stage(0, weights(0))
    with pytest.raises(RuntimeError, match="a rank left"):
        medium.writer.stage(0, GatheredTensors(weights(1), lost_at="b").streamed())
    with pytest.raises(WeightsError, match="never staged"):
        medium.writer.publish(0)


def test_names_types_and_sizes_of_streamed_weights_need_no_read() -> None:
    gathered = GatheredTensors(weights(1))
    streamed = gathered.streamed()
    assert (set(streamed), len(streamed)) == ({"a", "b"}, 2)
    assert "a" in streamed
    assert "c" not in streamed
    assert {name: tensor.nbytes for name, tensor in described(streamed).items()} == {
        "a": 48,
        "b": 8,
    }
    assert described(weights(1)).keys() == streamed.keys()
    assert gathered.names_read == []
    assert torch.equal(streamed["a"], weights(1)["a"])
    assert gathered.names_read == ["a"]


def test_tensor_that_is_not_as_it_was_described_is_refused(medium: Medium) -> None:
    like = {"a": torch.empty(3, 2, device="meta")}
    streamed = StreamedTensors(like, read=lambda name: torch.zeros(2, 3))
    with pytest.raises(WeightsError, match=r"a: expected .* \(3, 2\), found .* \(2, 3\)"):
        medium.writer.stage(0, streamed)
    with pytest.raises(WeightsError, match="never staged"):
        medium.writer.publish(0)


def test_staged_weights_are_invisible(medium: Medium) -> None:
    medium.writer.stage(0, weights(1))
    with pytest.raises(WeightsError):
        medium.reader.newest()
    with pytest.raises(WeightsError):
        medium.reader.load(0)


def test_publishing_what_was_not_staged_is_refused(medium: Medium) -> None:
    with pytest.raises(WeightsError, match="never staged"):
        medium.writer.publish(1)


def test_publishing_again_is_fine(medium: Medium) -> None:
    medium.writer.stage(1, weights(1))
    medium.writer.publish(1)
    medium.writer.publish(1)
    assert medium.reader.newest() == 1


@pytest.mark.parametrize("weights_of", [weights, half_weights])
def test_loaded_weights_do_not_change_with_later_versions(
    medium: Medium, weights_of: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    loaded = {}
    for version in range(3 * KEEP_VERSIONS):
        medium.writer.stage(version, weights_of(version))
        medium.writer.publish(version)
        assert medium.reader.newest() == version
        if version < KEEP_VERSIONS:
            loaded[version] = medium.reader.load(version)
    for version, tensors in loaded.items():
        assert hash_tensors(tensors) == hash_tensors(weights_of(version))


def test_another_policy_may_follow_in_the_place_of_a_retired_one(medium: Medium) -> None:
    for version in range(2 * KEEP_VERSIONS):
        tensors = {"c": torch.rand(2 + (version % 3) * 1000)}
        medium.writer.stage(version, tensors)
        medium.writer.publish(version)
        assert hash_tensors(medium.reader.load(version)) == hash_tensors(tensors)


def test_changed_file_is_detected_at_load(tmp_path: Path) -> None:
    writer, reader = DirectoryWriter(tmp_path), DirectoryReader(tmp_path)
    writer.stage(0, weights(1))
    writer.publish(0)
    file = tmp_path / "00000000" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(WeightsError, match="changed after they were published"):
        reader.load(0)


def test_old_versions_are_removed(tmp_path: Path) -> None:
    writer, reader = DirectoryWriter(tmp_path), DirectoryReader(tmp_path)
    for version in range(KEEP_VERSIONS + 3):
        writer.stage(version, weights(version))
        writer.publish(version)
    assert len(list(tmp_path.iterdir())) == KEEP_VERSIONS
    assert reader.newest() == KEEP_VERSIONS + 2


def test_tied_head_follows_the_embedding() -> None:
    source, target = small_policy(seed=1, tied=True), small_policy(seed=2, tied=True)
    tensors = policy_tensors(source)
    assert "lm_head.weight" not in tensors
    assign_tensors(target, tensors)
    assert torch.equal(target.lm_head.weight, source.model.embed_tokens.weight)


def test_weights_of_another_policy_are_refused() -> None:
    with pytest.raises(WeightsError, match="expected the policy's"):
        assign_tensors(small_policy(), {"a": torch.zeros(1)})


def test_publishing_again_leaves_readers_alone_and_clears_what_a_replay_staged(
    tmp_path: Path,
) -> None:
    writer = DirectoryWriter(tmp_path)
    writer.stage(3, weights(3))
    writer.publish(3)
    served = (tmp_path / "00000003").stat().st_ino
    for version in (1, 2, 3):
        writer.stage(version, weights(version))
    writer.publish(3)
    assert (tmp_path / "00000003").stat().st_ino == served
    assert [entry.name for entry in tmp_path.iterdir()] == ["00000003"]
