"""The packages: their picture matches the code, and core stays small."""

from __future__ import annotations

from benchmarks.harness import ROOT
from benchmarks.package_picture import (
    draw,
    imports_between_packages,
    levels_of,
    without_implied,
)

MAX_CORE_LINES = 2500
CHAIN = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}}


def test_picture_of_the_packages_is_drawn_from_the_code() -> None:
    drawn = draw(imports_between_packages())
    picture = ROOT / "docs" / "images" / "packages.svg"
    assert picture.read_text() == drawn, f"python -m benchmarks.package_picture {picture}"


def test_arrows_that_follow_from_others_are_left_out() -> None:
    assert without_implied(CHAIN) == {"a": {"b"}, "b": {"c"}, "c": {"d"}}
    assert levels_of(CHAIN) == {"d": 0, "c": 1, "b": 2, "a": 3}


def test_core_stays_small() -> None:
    files = (ROOT / "areal_flow" / "core").glob("*.py")
    assert sum(len(file.read_text().splitlines()) for file in files) <= MAX_CORE_LINES
