"""Deltas in a directory: every reader has the published bits, whichever versions it has missed."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from areal_flow.core.errors import WeightsError
from areal_flow.core.layout import RunLayout
from areal_flow.log.audit.files import listed_weights, read_directories
from areal_flow.log.audit.rules import Finding
from areal_flow.policy.models.hashing import hash_tensors
from areal_flow.policy.weights.channel import StreamedTensors
from areal_flow.policy.weights.directory import (
    DELTA_FILE,
    KEEP_VERSIONS,
    DirectoryReader,
    DirectoryWriter,
)

NUM_VALUES = 40_000

Weights = dict[str, Tensor]


def first_weights(seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(NUM_VALUES, generator=generator).view(200, 200).bfloat16(),
        "norm": torch.ones(16, dtype=torch.bfloat16),
        "none": torch.zeros(0, dtype=torch.bfloat16),
    }


def changed(weights: Weights, seed: int, share: float = 0.02) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    moved = torch.rand(200, 200, generator=generator) < share
    return {**weights, "matrix": torch.where(moved, weights["matrix"] * 1.02, weights["matrix"])}


def versions(count: int, share: float = 0.02) -> list[Weights]:
    made = [first_weights()]
    for seed in range(1, count):
        made.append(changed(made[-1], seed, share))
    return made


def publish(writer: DirectoryWriter, version: int, weights: Mapping[str, Tensor]) -> None:
    writer.stage(version, weights)
    writer.publish(version)


def size_of(root: Path, version: int) -> int:
    """Return the size of the file with a version's tensors or its delta."""
    return max(file.stat().st_size for file in (root / f"{version:08d}").iterdir())


def is_whole(root: Path, version: int) -> bool:
    return not (root / f"{version:08d}" / DELTA_FILE).exists()


def test_all_readers_have_the_published_bits_and_few_bytes_are_written(tmp_path: Path) -> None:
    writer, follower = DirectoryWriter(tmp_path), DirectoryReader(tmp_path)
    sometimes, made = DirectoryReader(tmp_path), versions(12)
    for version, weights in enumerate(made):
        publish(writer, version, weights)
        readers = [follower, DirectoryReader(tmp_path), *([sometimes] if version % 5 == 0 else [])]
        for reader in readers:
            assert hash_tensors(reader.load(version)) == hash_tensors(weights)
        assert is_whole(tmp_path, version) == (version == 0)
    assert size_of(tmp_path, 11) < 0.06 * size_of(tmp_path, 0)
    for version in range(12 - KEEP_VERSIONS, 12):
        assert hash_tensors(sometimes.load(version)) == hash_tensors(made[version])


def test_caller_may_change_tensors_after_staging(tmp_path: Path) -> None:
    writer, weights = DirectoryWriter(tmp_path), first_weights()
    for version in range(3):
        publish(writer, version, weights)
        assert hash_tensors(DirectoryReader(tmp_path).load(version)) == hash_tensors(weights)
        weights["matrix"][version] *= 1.5


def test_version_is_whole_again_before_its_deltas_outweigh_it_and_older_ones_go(
    tmp_path: Path,
) -> None:
    writer, full_versions = DirectoryWriter(tmp_path), []
    for version, weights in enumerate(versions(24, share=0.1)):
        publish(writer, version, weights)
        if is_whole(tmp_path, version):
            full_versions.append(version)
        kept = sorted(int(entry.name) for entry in tmp_path.iterdir())
        newest_needed = max(0, version - KEEP_VERSIONS + 1)
        assert kept[0] == max(each for each in full_versions if each <= newest_needed)
        last = range(full_versions[-1], version + 1)
        assert sum(size_of(tmp_path, each) for each in last) < 2.1 * size_of(
            tmp_path, full_versions[-1]
        )
        assert hash_tensors(DirectoryReader(tmp_path).load(newest_needed))
    assert len(full_versions) > 2


def test_streamed_weights_are_the_files_that_weights_in_memory_are(tmp_path: Path) -> None:
    roots = [tmp_path / "held", tmp_path / "streamed"]
    writers = [DirectoryWriter(root) for root in roots]
    for version, weights in enumerate([*versions(5), first_weights(seed=7)]):
        like = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}
        publish(writers[0], version, weights)
        publish(writers[1], version, StreamedTensors(like, read=weights.__getitem__))
        held, streamed = (sorted((root / f"{version:08d}").iterdir()) for root in roots)
        assert [file.name for file in held] == [file.name for file in streamed]
        assert [file.read_bytes() for file in held] == [file.read_bytes() for file in streamed]
    assert [is_whole(roots[1], version) for version in range(6)] == [True, *4 * [False], True]


@pytest.mark.parametrize(("dtype", "num_kept"), [(torch.bfloat16, 1), (torch.float32, 0)])
def test_writer_keeps_a_copy_only_of_weights_that_may_change_little(
    tmp_path: Path, dtype: torch.dtype, num_kept: int
) -> None:
    writer, shape = DirectoryWriter(tmp_path), (7, 1009)
    for version in range(3):
        publish(writer, version, {"a": torch.rand(shape).to(dtype)})
        tensors = [each for each in gc.get_objects() if type(each) is Tensor]
        assert sum(tensor.shape == shape for tensor in tensors) == num_kept


def test_version_is_whole_where_a_delta_is_no_smaller(tmp_path: Path) -> None:
    writer = DirectoryWriter(tmp_path)
    for version, weights in enumerate([*versions(3, share=1.0), *[{"a": torch.zeros(1000)}] * 2]):
        publish(writer, version, weights)
        assert is_whole(tmp_path, version)


def test_writer_that_was_started_anew_begins_whole_and_readers_follow(tmp_path: Path) -> None:
    made, reader = versions(6), DirectoryReader(tmp_path)
    for begin in (0, 3):
        writer = DirectoryWriter(tmp_path)
        for version in range(begin, begin + 3):
            publish(writer, version, made[version])
            assert hash_tensors(reader.load(version)) == hash_tensors(made[version])
            assert is_whole(tmp_path, version) == (version == begin)


def test_replayed_versions_change_nothing_and_the_next_one_follows(tmp_path: Path) -> None:
    made, writer, reader = versions(6), DirectoryWriter(tmp_path), DirectoryReader(tmp_path)
    for version in range(5):
        publish(writer, version, made[version])
    reader.load(4)
    for version in (2, 3, 4):
        writer.stage(version, made[version])
    writer.publish(4)
    publish(writer, 5, made[5])
    assert not is_whole(tmp_path, 5)
    for each in (reader, DirectoryReader(tmp_path)):
        assert hash_tensors(each.load(5)) == hash_tensors(made[5])


def test_fork_takes_the_place_of_a_version_that_readers_have(tmp_path: Path) -> None:
    made, writer, reader = versions(4), DirectoryWriter(tmp_path), DirectoryReader(tmp_path)
    for version in range(3):
        publish(writer, version, made[version])
    reader.load(2)
    forked = [changed(made[1], 77), changed(made[2], 78), changed(made[2], 79)]
    for version, weights in enumerate(forked, 1):
        writer.stage(version, weights)
        if version > 1:
            writer.publish(version)
    for each in (reader, DirectoryReader(tmp_path)):
        for version in (2, 3):
            assert hash_tensors(each.load(version)) == hash_tensors(forked[version - 1])


def test_writer_that_dies_while_it_stages_is_not_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, writer, reader = versions(3), DirectoryWriter(tmp_path), DirectoryReader(tmp_path)
    for version in range(2):
        publish(writer, version, made[version])

    def write_half(tensors: Weights, file: Path) -> None:
        file.write_bytes(safetensors.torch.save(tensors)[:-100])
        raise SystemExit

    with monkeypatch.context() as dying:
        dying.setattr(safetensors.torch, "save_file", write_half)
        with pytest.raises(SystemExit):
            writer.stage(2, made[2])
    assert (tmp_path / ".staged-00000002" / DELTA_FILE).exists()
    for each_writer in (writer, DirectoryWriter(tmp_path)):
        with pytest.raises(WeightsError, match="never staged"):
            each_writer.publish(2)
    assert hash_tensors(reader.load(reader.newest())) == hash_tensors(made[1])
    publish(writer, 2, made[2])
    assert hash_tensors(reader.load(2)) == hash_tensors(made[2])


def test_damaged_delta_is_refused_by_all_that_need_it(tmp_path: Path) -> None:
    made, writer, follower = versions(3), DirectoryWriter(tmp_path), DirectoryReader(tmp_path)
    for version in range(2):
        publish(writer, version, made[version])
    follower.load(1)
    file = tmp_path / "00000001" / DELTA_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    publish(writer, 2, made[2])
    with pytest.raises(WeightsError, match="version 2: expected weights with hash"):
        DirectoryReader(tmp_path).load(2)
    assert hash_tensors(follower.load(2)) == hash_tensors(made[2])
    file.unlink()
    with pytest.raises(WeightsError, match="version 2 cannot be read"):
        DirectoryReader(tmp_path).load(2)


def test_engine_that_changes_what_it_was_given_still_gets_the_next_version(tmp_path: Path) -> None:
    made, writer, reader = versions(2), DirectoryWriter(tmp_path), DirectoryReader(tmp_path)
    publish(writer, 0, made[0])
    reader.load(0)["matrix"].zero_()
    publish(writer, 1, made[1])
    assert hash_tensors(reader.load(1)) == hash_tensors(made[1])


def test_audit_reads_versions_through_their_deltas(tmp_path: Path) -> None:
    layout, made = RunLayout(tmp_path), versions(4)
    writer = DirectoryWriter(layout.weights_of(0))
    hashes = [hash_tensors(weights) for weights in made]
    for version, weights in enumerate(made):
        publish(writer, version, weights)
    (layout.weights_of(0) / "00000002" / DELTA_FILE).unlink()
    listed = listed_weights(layout)
    first, second, *unreadable = read_directories(layout, "weights", listed)
    assert not isinstance(first, Finding)
    assert not isinstance(second, Finding)
    assert [first["tensors_hash"], second["tensors_hash"]] == hashes[:2]
    assert [getattr(finding, "rule", "") for finding in unreadable] == ["weights-unreadable"] * 2
