"""The engines under test in the contract suites of cores and threads."""

from __future__ import annotations

import pytest

from tests.engines import SUBJECTS, Subject


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]()
