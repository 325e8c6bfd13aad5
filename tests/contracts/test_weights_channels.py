"""Every weights channel: what is served is what was published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areal_flow.errors import WeightsError
from areal_flow.models.hashing import hash_tensors
from areal_flow.models.policy import assign_tensors, policy_tensors
from areal_flow.testing import MemoryChannel
from areal_flow.weights.channel import WeightsChannel
from areal_flow.weights.directory import KEEP_VERSIONS, DirectoryChannel
from tests.policies import small_policy


@pytest.fixture(params=["directory", "memory"])
def channel(request: pytest.FixtureRequest, tmp_path: Path) -> WeightsChannel:
    if request.param == "directory":
        return DirectoryChannel(tmp_path / "weights")
    return MemoryChannel()


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 2), value), "b": torch.full((4,), value, dtype=torch.bfloat16)}


def test_published_weights_come_back_exactly(channel: WeightsChannel) -> None:
    served_hash = channel.stage(3, weights(0.1))
    channel.publish(3)
    found = channel.load(3)
    assert channel.newest() == 3
    assert hash_tensors(found) == served_hash == hash_tensors(weights(0.1))


def test_staged_weights_are_invisible(channel: WeightsChannel) -> None:
    channel.stage(0, weights(1))
    with pytest.raises(WeightsError):
        channel.newest()
    with pytest.raises(WeightsError):
        channel.load(0)


def test_publishing_what_was_not_staged_is_refused(channel: WeightsChannel) -> None:
    with pytest.raises(WeightsError, match="never staged"):
        channel.publish(1)


def test_publishing_again_is_fine(channel: WeightsChannel) -> None:
    channel.stage(1, weights(1))
    channel.publish(1)
    channel.publish(1)
    assert channel.newest() == 1


def test_changed_file_is_found_at_load(tmp_path: Path) -> None:
    channel = DirectoryChannel(tmp_path)
    channel.stage(0, weights(1))
    channel.publish(0)
    file = tmp_path / "00000000" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(WeightsError, match="changed after they were published"):
        channel.load(0)


def test_old_versions_are_removed(tmp_path: Path) -> None:
    channel = DirectoryChannel(tmp_path)
    for version in range(KEEP_VERSIONS + 3):
        channel.stage(version, weights(version))
        channel.publish(version)
    assert len(list(tmp_path.iterdir())) == KEEP_VERSIONS
    assert channel.newest() == KEEP_VERSIONS + 2


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
    channel = DirectoryChannel(tmp_path)
    channel.stage(3, weights(3))
    channel.publish(3)
    served = (tmp_path / "00000003").stat().st_ino
    for version in (1, 2, 3):
        channel.stage(version, weights(version))
    channel.publish(3)
    assert (tmp_path / "00000003").stat().st_ino == served
    assert [entry.name for entry in tmp_path.iterdir()] == ["00000003"]
