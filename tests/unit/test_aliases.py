"""Each run has its own alias in a registry, whatever its name is."""

from __future__ import annotations

import pytest
from mlflow.utils.validation import (
    _validate_model_alias_name,
    _validate_model_alias_name_reserved,
)

from areal_flow.tracking.mlflow import BEST, CURRENT, run_alias

AWKWARD = ("a.b", "a_b", "a-b", "latest", "LATEST", "v1", "V12", "v1.5", "current", "best", "...")


@pytest.mark.parametrize("name", [*AWKWARD, "x" * 80, "." * 80])
def test_alias_of_any_run_is_one_that_the_registry_takes(name: str) -> None:
    _validate_model_alias_name(run_alias(name))
    _validate_model_alias_name_reserved(run_alias(name))


def test_name_that_can_be_an_alias_is_one() -> None:
    for name in ("sums", "arithmetic-20260101-120000", "a_b", "v1b", "latest-2"):
        assert run_alias(name) == name


def test_no_two_runs_have_the_same_alias_and_none_has_one_of_all_runs() -> None:
    aliases = {run_alias(name) for name in AWKWARD}
    assert len(aliases) == len(AWKWARD)
    assert not aliases & {CURRENT, BEST, "latest", "v1"}
    assert run_alias("sums.2") == "sums_2-ee0c0b"
