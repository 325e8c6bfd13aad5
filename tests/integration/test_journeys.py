"""The page on the architecture lists the files on the way of a group and of a trajectory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import ROOT
from tests.integration.runs import ENVIRONMENT

PAGE = ROOT / "docs" / "architecture.md"
MAX_FILES = [22, 28]
"""Of a group's journey, and of a trajectory's tokens."""


def journeys_in(page: Path) -> list[set[str]]:
    """Return the files of each journey that a page lists."""
    section = page.read_text().partition("<!-- journeys -->")[2].partition("<!-- end")[0]
    return [set(re.findall("`(.+?)`", part)) for part in section.split("crosses")[1:]]


@pytest.mark.slow
def test_page_lists_the_files_that_a_run_crosses(tmp_path: Path) -> None:
    page = shutil.copy(PAGE, tmp_path)
    command = (sys.executable, "-m", "tests.journeys", str(page))
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)
    assert journeys_in(Path(page)) == journeys_in(PAGE), f"{command[2]} {PAGE}"
    nums = [len(files) for files in journeys_in(PAGE)]
    assert all(num <= limit for num, limit in zip(nums, MAX_FILES, strict=True)), nums
