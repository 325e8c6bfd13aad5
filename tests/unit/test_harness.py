"""Benchmarks measure the memory of their own process."""

from __future__ import annotations

from benchmarks import harness


def test_peak_memory_is_not_that_of_the_process_that_started_this_one() -> None:
    held = bytearray(600 * 2**20)
    (peak,) = harness.in_processes(harness.peak_gb, [()], {})
    assert peak < len(held) / 1e9
