"""What README.md and docs/ tell a user to type, and where README.md leads."""

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
MISTYPED = {"--trainer.learning-rte"}
"""The quickstart shows what the command says to it."""


@cache
def options_of(command: str) -> set[str]:
    subcommands = ["list", "add", "remove"]
    found = [app[command], *(app[command][name] for name in subcommands if name in app[command])]
    collections = [each.assemble_argument_collection() for each in found if each.default_command]
    return SHARED | {name for each in collections for argument in each for name in argument.names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_commands_exist_with_their_options(page: Path) -> None:
    for typed in TYPED.findall(page.read_text()):
        words = shlex.split(typed.replace("[", " ").replace("]", " ").replace("'", " "))
        commands = [words[0], *(words[i + 1] for i, word in enumerate(words[:-1]) if word == "|")]
        assert {*commands} <= {*app}, typed
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        for command in commands:
            assert {*options} - MISTYPED <= options_of(command), typed


def test_links_of_the_readme_lead_somewhere() -> None:
    for text in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / text).read_text()):
            assert target.startswith("https://") or (ROOT / target.partition("#")[0]).exists(), (
                target
            )
