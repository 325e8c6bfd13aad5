"""The engines that the contracts of cores and of their threads hold."""

from __future__ import annotations

import pytest

from tests.engines import SUBJECTS, Subject


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]()
