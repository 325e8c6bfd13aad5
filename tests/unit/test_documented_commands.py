"""Commands in README.md, infra/ and docs/ are valid, and so are README.md's links."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from pipelines.cli.main import app
from tests.markdown import DOCS

ROOT = DOCS.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("infra/*/*.md")), *sorted(DOCS.rglob("*.md"))]
TYPED = re.compile(r"(?:^|\s|`|\| )areal-flow ([a-z][^`#\n;]*)", re.MULTILINE)
SHARED = {"--runs", "--registry", "--json", "--help"}
MISTYPED = {"--trainer.learning-rte"}  # in the quickstart, on purpose


@cache
def options_of(command: str) -> set[str]:
    below = [app[command][name] for name in ("list", "add", "remove") if name in app[command]]
    apps = [each for each in (app[command], *below) if each.default_command]
    arguments = (argument for each in apps for argument in each.assemble_argument_collection())
    return SHARED | {name for argument in arguments for name in argument.names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_commands_exist_with_their_options(page: Path) -> None:
    for typed in TYPED.findall(page.read_text()):
        words = shlex.split(re.sub(r"[\[\]']", " ", typed))
        options = {word.partition("=")[0] for word in words if word.startswith("--")} - MISTYPED
        for before, command in zip(["|", *words], words, strict=False):
            if before == "|":
                assert options <= options_of(command), typed


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("https://") or (ROOT / target.partition("#")[0]).exists(), target
