"""Shared memory: no reader sees half a version, and an ended run leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError, StorageError, WeightsError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import hold_lease
from areal_flow.log.run_log import create_logs, take_over
from areal_flow.policy.models.hashing import hash_tensors
from areal_flow.policy.weights import shared_memory
from areal_flow.policy.weights.directory import KEEP_VERSIONS, DirectoryReader
from areal_flow.policy.weights.shared_memory import (
    SHARED_MEMORY,
    ChosenChannel,
    check_medium,
    create_segments,
    free_segments,
    segments_of,
)
from areal_flow.policy.weights.tensor_file import map_tensors, write_tensors

NUM_VALUES = 4_000_000

DIES_WHILE_IT_STAGES = f"""
import sys, threading, torch
from pathlib import Path
from areal_flow.policy.weights import tensor_file
from areal_flow.policy.weights.shared_memory import ChosenChannel

def copy_half(target, content):
    target[: len(content) // 2] = content[: len(content) // 2]
    print("half", flush=True)
    threading.Event().wait()

tensor_file.np.copyto = copy_half
channel = ChosenChannel(Path(sys.argv[1]), "shared_memory")
channel.stage(int(sys.argv[2]), {{"a": torch.full(({NUM_VALUES},), -1.0)}})
"""


def policy(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((NUM_VALUES,), float(version))}


@pytest.fixture(params=[2, 16], ids=["2 cores", "16 cores"])
def channel(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ChosenChannel]:
    """Threads copy where there are many cores."""
    monkeypatch.setattr("areal_flow.core.machine.usable_cores", lambda: request.param)
    root = tmp_path / "weights" / "00000001"
    yield ChosenChannel(root, "shared_memory")
    free_segments(root)


def write(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    with file.open("wb") as segment:
        write_tensors(tensors.items(), segment, like=tensors)


def publish(channel: ChosenChannel, *versions: int) -> None:
    for version in versions:
        channel.stage(version, policy(version))
        channel.publish(version)


@pytest.mark.parametrize("num_before", [1, 2 * KEEP_VERSIONS], ids=["new pages", "old pages"])
def test_writer_that_is_killed_while_it_stages_is_not_noticed(
    channel: ChosenChannel, num_before: int
) -> None:
    publish(channel, *range(num_before))
    last = num_before - 1
    held = channel.load(last)
    command = [sys.executable, "-c", DIES_WHILE_IT_STAGES, str(channel.root), str(num_before)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        assert hash_tensors(channel.load(last)) == hash_tensors(policy(last))
        writer.send_signal(signal.SIGKILL)
    assert channel.newest() == last
    for tensors in (held, channel.load(last)):
        assert hash_tensors(tensors) == hash_tensors(policy(last))
    with pytest.raises(WeightsError, match="never staged"):
        channel.publish(num_before)
    publish(channel, num_before)
    assert hash_tensors(channel.load(num_before)) == hash_tensors(policy(num_before))
    assert hash_tensors(held) == hash_tensors(policy(last))


def test_retired_version_is_written_again_in_its_own_pages_once_no_reader_has_it(
    channel: ChosenChannel,
) -> None:
    publish(channel, 0)
    held = channel.load(0)
    inodes = []
    for version in range(1, KEEP_VERSIONS + 4):
        publish(channel, version)
        inodes.append((channel.root / f"{version:08d}" / "model.safetensors").stat().st_ino)
        if version == KEEP_VERSIONS + 1:
            assert hash_tensors(held) == hash_tensors(policy(0))
            del held
    assert len(set(inodes)) == KEEP_VERSIONS + 1  # with the spare one
    assert inodes[0] == inodes[-1 - (len(inodes) - KEEP_VERSIONS - 2)]
    assert len(list(segments_of(channel.root).iterdir())) == KEEP_VERSIONS + 1


def test_version_that_is_retired_while_it_is_opened_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write(file, policy(0))
    moved = tmp_path / "another"
    file.rename(moved)
    with pytest.raises(FileNotFoundError):
        map_tensors(file)


def test_successor_frees_what_a_killed_run_left_and_nothing_else(tmp_path: Path) -> None:
    layouts = [RunLayout(tmp_path / name) for name in ("killed", "other")]
    roots = [layout.weights_of(1) for layout in layouts]
    for layout, root in zip(layouts, roots, strict=True):
        create_logs(layout)
        with hold_lease(layout.writers):
            publish(ChosenChannel(root, "shared_memory"), 0)
    copied = RunLayout(tmp_path / "copied")
    shutil.copytree(layouts[1].root, copied.root, symlinks=True)
    for layout in (layouts[0], copied):
        with hold_lease(layout.writers) as writer:
            take_over(layout, writer)
    assert not segments_of(roots[0]).exists()
    assert not os.path.lexists(roots[0])
    assert not os.path.lexists(copied.weights_of(1))
    assert ChosenChannel(roots[1], "auto").newest() == 0
    moved = RunLayout(layouts[1].root.rename(tmp_path / "moved"))
    segments = segments_of(moved.weights_of(1))
    assert segments.exists()
    with hold_lease(moved.writers) as writer:
        take_over(moved, writer)
    assert not segments.exists()


def test_weights_are_not_written_over_another_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path in shared memory is predictable, and anybody may write there."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    root, theirs = tmp_path / "weights" / "1", tmp_path / "theirs"
    theirs.mkdir()
    channel = ChosenChannel(root, "shared_memory")
    create_segments(root)
    segments_of(root).symlink_to(theirs)
    with pytest.raises(StorageError, match=r"found a link.*weights\.medium to 'directory'"):
        channel.stage(0, {"a": torch.ones(3)})
    assert not [*theirs.iterdir()]
    segments_of(root).unlink()
    segments_of(root).mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StorageError, match="expected a directory of user 12345"):
        channel.stage(0, {"a": torch.ones(3)})
    monkeypatch.undo()
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    segments_of(root).rmdir()
    channel.stage(0, {"a": torch.ones(3)})
    assert segments_of(root).stat().st_mode & 0o777 == 0o700


def test_a_driver_keeps_the_medium_of_its_first_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "00000001"
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 0)
    publish(ChosenChannel(root, "auto"), 0)
    monkeypatch.undo()
    publish(ChosenChannel(root, "auto"), 1)
    assert not root.is_symlink()
    assert DirectoryReader(root).newest() == 1


def test_shared_memory_that_is_too_small_is_refused_or_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 20 * NUM_VALUES)
    with pytest.raises(StorageError, match=r"expected room for 6 copies.*0\.096 GB, found 0\.08"):
        publish(ChosenChannel(tmp_path / "must", "shared_memory"), 0)
    publish(ChosenChannel(tmp_path / "may", "auto"), 0)
    assert (tmp_path / "may").is_dir()
    assert not (tmp_path / "may").is_symlink()
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 0)
    with pytest.raises(ConfigError, match=f"expected free memory in {SHARED_MEMORY}"):
        check_medium("shared_memory")


def test_workers_of_other_machines_get_files() -> None:
    ssh = {"launcher": "ssh", "remote": {"hosts": ["localhost"]}}
    assert build_recipe({}, source="").weights_medium == "auto"
    assert build_recipe({"cluster": ssh}, source="").weights_medium == "directory"
    with pytest.raises(ConfigError, match="'shared_memory' reaches this machine"):
        build_recipe({"cluster": ssh, "weights": {"medium": "shared_memory"}}, source="")
