"""Installation instructions never name a stranger's package."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from areal_flow.core.program import how_to_install

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OURS = ("README.md", "docs", "examples", "areal_flow", "pipelines")
OF_OUR_NAME = re.compile(r"pip\s+install\s+[\"']?areal-flow(?!\S* @ )")


def test_no_text_installs_our_name_from_an_index() -> None:
    listed = subprocess.run(
        ["git", "ls-files", *OURS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split():
        try:
            text = (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue
        assert not OF_OUR_NAME.search(text), name


@pytest.mark.parametrize("extra", sorted({*EXTRAS} - {"dev"}))
def test_every_extra_is_in_the_readme_and_its_message_installs_it(extra: str) -> None:
    assert how_to_install(extra).startswith(f"pip install '.[{extra}]' in a clone")
    assert f"areal-flow[{extra}] @ git+URL" in how_to_install(extra)
    install = (ROOT / "README.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    assert extra in install


def test_constraints_are_named_only_with_extras_that_they_allow() -> None:
    readme = (ROOT / "README.md").read_text()
    (constrained,) = [line for line in readme.splitlines() if "'.[view]' -c" in line]
    pinned = (ROOT / "constraints.txt").read_text()
    assert re.search("^openai==3", pinned, re.MULTILINE), "verifiers 0.4 wants openai<3"
    assert "verifiers" not in constrained
    torch = re.search(r"pip install (torch==[0-9.]+)", readme)
    assert torch is not None
    assert torch[1] in pinned.splitlines()


def test_every_dependency_is_justified() -> None:
    page = (ROOT / "docs" / "decisions" / "0001-dependencies.md").read_text()
    required = [*PROJECT["dependencies"], *(name for extra in EXTRAS.values() for name in extra)]
    names = {re.split(r"[\[><=]", each)[0] for each in required} - {"areal-flow"}
    missing = {name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", page)}
    assert len(names) > 60
    assert not missing
