"""Safetensors files written one tensor at a time equal those of other writers."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from areal_flow.core.errors import WeightsError
from areal_flow.policy.models.hashing import hash_files, hash_tensors
from areal_flow.policy.weights import tensor_file
from areal_flow.policy.weights.tensor_file import (
    DTYPES,
    MappedPages,
    map_tensors,
    read_shared_files,
    shared_files,
    write_tensors,
)


def every_type() -> dict[str, torch.Tensor]:
    """Return a tensor of each type, of an odd number of values, and some of other shapes."""
    bits = torch.arange(24, dtype=torch.uint8)
    types = {of_file: getattr(torch, of_torch) for of_file, of_torch in DTYPES.items()}
    tensors = {
        f"a.{of_file}": (bits[:3].bool() if dtype == torch.bool else bits.view(dtype)[:3])
        for of_file, dtype in types.items()
    }
    return {**tensors, "matrix": torch.rand(5, 3), "scalar": torch.tensor(2.5), "none": bits[:0]}


@pytest.mark.parametrize("pages", [None, MappedPages()])
@pytest.mark.parametrize("reverse", [False, True])
def test_tensors_of_every_type_come_back_whatever_their_order(
    tmp_path: Path, reverse: bool, pages: MappedPages | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 7)
    monkeypatch.setattr(tensor_file, "copying_threads", lambda: 3)
    tensors = every_type()
    (tmp_path / "file").write_bytes(bytes(100_000))  # of a larger version
    with (tmp_path / "file").open("r+b") as file:
        in_order = sorted(tensors.items(), reverse=reverse)
        write_tensors(in_order, file, like=tensors, pages=pages)
    expected = hash_tensors(tensors)
    assert hash_tensors(load_file(tmp_path / "file")) == hash_files(tmp_path / "file") == expected
    assert hash_tensors(map_tensors(tmp_path / "file")) == expected


@pytest.mark.parametrize("pages", [None, MappedPages()])
def test_a_file_is_replaced_completely(tmp_path: Path, pages: MappedPages | None) -> None:
    all_tensors, part = every_type(), {"scalar": torch.tensor(1.5)}
    (tmp_path / "file").touch()
    for tensors in (all_tensors, part):
        with (tmp_path / "file").open("r+b") as file:
            write_tensors(tensors.items(), file, like=tensors, pages=pages)
    assert load_file(tmp_path / "file") == part


def test_pages_stay_mapped_while_their_file_is_there_and_leave_it_unlocked(tmp_path: Path) -> None:
    pages, path = MappedPages(), tmp_path / "file"

    def written() -> Any:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return pages.of(file, 100)

    first = written()
    assert written() is first, "mapped once"
    path.rename(tmp_path / "renamed")
    assert written() is not first
    with (tmp_path / "renamed").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (tmp_path / "renamed").unlink()
    written()
    assert len(pages._mapped) == 1, "what was removed is forgotten"


def test_threads_write_into_the_pages_of_a_file_that_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room they would die of it."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    tensors = every_type()
    with (tmp_path / "file").open("w+b") as file, pytest.raises(OSError, match="No space left"):
        write_tensors(tensors.items(), file, like=tensors, pages=MappedPages())


def test_values_begin_where_a_mapped_view_of_their_type_may(tmp_path: Path) -> None:
    tensors = every_type()
    with (tmp_path / "file").open("wb") as file:
        write_tensors(tensors.items(), file, like=tensors)
    content = (tmp_path / "file").read_bytes()
    num_header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + num_header_bytes])
    for name, tensor in tensors.items():
        begin = 8 + num_header_bytes + header[name]["data_offsets"][0]
        assert begin % tensor.element_size() == 0


def test_type_that_safetensors_does_not_name_is_refused(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, dtype=torch.complex128)}
    with (
        (tmp_path / "file").open("wb") as file,
        pytest.raises(WeightsError, match=r"a: expected one of the types .* found complex128"),
    ):
        write_tensors(tensors.items(), file, like=tensors)


def test_another_process_reads_a_mapped_file_in_place_and_the_rest_from_memory(
    tmp_path: Path,
) -> None:
    """Also when the file was renamed, as one that is retired is."""
    tensors = every_type()
    with (tmp_path / "file").open("wb") as file:
        write_tensors(tensors.items(), file, like=tensors)
    mapped = map_tensors(tmp_path / "file")
    (tmp_path / "file").rename(tmp_path / "retired")
    shown = {"renamed": mapped["matrix"], "across": mapped["matrix"].mT, "new": torch.rand(3)}
    program = """
import json, sys
from areal_flow.policy.weights.tensor_file import read_shared_files
tensors = read_shared_files(json.load(sys.stdin))
print(json.dumps({name: tensor.tolist() for name, tensor in tensors.items()}))
"""
    with shared_files(shown, mapped) as files:
        in_file, in_memory = files
        assert in_file[1] == {"renamed": "matrix"}
        assert set(in_memory[1]) == {"across", "new"}
        command = [sys.executable, "-c", program]
        read = subprocess.run(
            command, input=json.dumps(files), capture_output=True, text=True, check=True
        )
    assert json.loads(read.stdout) == {name: tensor.tolist() for name, tensor in shown.items()}
    with shared_files(mapped, mapped) as files:
        assert len(files) == 1 + any(not tensor.nbytes for tensor in mapped.values())
    with shared_files(tensors, tensors) as files:
        assert hash_tensors(read_shared_files(files)) == hash_tensors(tensors)


def test_a_mapped_file_is_closed_and_unlocked_with_its_last_tensor(tmp_path: Path) -> None:
    tensors = every_type()
    with (tmp_path / "file").open("wb") as file:
        write_tensors(tensors.items(), file, like=tensors)
    descriptors = Path("/proc/self/fd")
    num_open = len([*descriptors.iterdir()])
    mapped = map_tensors(tmp_path / "file")
    with shared_files(mapped, mapped):
        last = mapped["matrix"]
    del mapped
    with (tmp_path / "file").open("rb") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        del last
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert len([*descriptors.iterdir()]) == num_open
