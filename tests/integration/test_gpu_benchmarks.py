"""The GPU benchmarks work on a CPU: every part, in small."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_flow.rollout.engines.protocol import VLLMSettings
from benchmarks import gpu, gpu_generation, harness


def measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *parts: str
) -> tuple[str, dict[str, Any]]:
    docs, report = tmp_path / "benchmarks.md", tmp_path / "report.json"
    docs.write_text(f"before\n<!-- {gpu.MARKER} -->\nold\n<!-- end of {gpu.MARKER} -->\nafter\n")
    chosen = ["--tiny", "--parts", *parts, "--docs", str(docs), "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["gpu", *chosen])
    gpu.main()
    return docs.read_text(), json.loads(report.read_text())["tables"]


@pytest.mark.walk
def test_parts_fill_the_table_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, tables = measured(
        tmp_path, monkeypatch, "tests", "step", "long_step", "memory", "generation"
    )
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    rows = [row for table in tables.values() for row in table]
    assert {"tokens_per_s", "of_matrix_rate", "ratio", "stall_ms", "load_gb_per_s"} <= {
        name for row in rows for name in row
    }
    assert not any("failed" in row for row in rows)
    assert "skipped" in tables["`tests/gpu`"][0]["result"]
    heads = [line for line in text.splitlines() if line.startswith("| --- |")]
    assert len(heads) == len(tables)


@pytest.mark.walk
def test_a_run_is_killed_resumed_audited_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tables = measured(tmp_path, monkeypatch, "run")
    (rows,) = tables.values()
    assert [row["part"] for row in rows] == ["train", "resume", "audit", "replay", "a step"]
    assert "bit for bit" in rows[3]["result"]


def test_a_part_that_fails_or_hangs_is_reported_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = gpu.Part("benchmarks.nothing", 60)
    monkeypatch.setitem(gpu.PARTS, "step", failing)
    tables, worked = gpu.run_part("step", tiny=True)
    assert not worked
    assert "nothing" in tables["step"][0]["failed"]
    monkeypatch.setitem(gpu.PARTS, "step", gpu.Part("timeit", 1, tiny="while(1):pass", title="x"))
    tables, worked = gpu.run_part("step", tiny=True)
    assert (tables, worked) == ({"step": [{"failed": "not done after 1 s"}]}, False)


def test_each_part_is_in_the_docs_before_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is taken away leaves its results so far; the most important come first."""
    assert [*gpu.PARTS][:3] == ["step", "generation", "run"]
    seen: list[str] = []

    def run_part(name: str, **_: Any) -> Any:
        if seen:
            assert seen[-1] in (tmp_path / "benchmarks.md").read_text()
        seen.append(f"table of {name}")
        return {seen[-1]: [{"result": 1}]}, True

    monkeypatch.setattr(gpu, "run_part", run_part)
    text, _ = measured(tmp_path, monkeypatch, "step", "generation", "run")
    assert all(title in text for title in seen)


def test_vllm_s_settings_are_of_vllm_on_a_gpu_alone() -> None:
    """The engine `torch` refused them, so that it could not be measured on a GPU."""
    chosen = argparse.Namespace(
        device="cuda", dtype="bfloat16", groups=2, members=2, tokens=8, engine="torch"
    )
    assert gpu_generation.settings_of(chosen).vllm == VLLMSettings()
    chosen.engine = "vllm"
    assert gpu_generation.settings_of(chosen).vllm.gpu_memory_utilization == 0.7


def test_all_parts_together_end_within_25_minutes() -> None:
    assert sum(part.limit_s for part in gpu.PARTS.values()) <= 25 * 60


def test_the_docs_have_the_place_of_the_tables(tmp_path: Path) -> None:
    copy = tmp_path / "benchmarks.md"
    copy.write_text((harness.ROOT / "docs" / "benchmarks.md").read_text())
    harness.write_between(copy, gpu.MARKER, "the tables")
    assert "the tables" in copy.read_text()
