"""The engines that the contracts of cores and of their threads hold."""

from __future__ import annotations

import pytest

from tests.engines import (
    Subject,
    bigram_subject,
    torch_subject,
)


@pytest.fixture(scope="module", params=[torch_subject, bigram_subject], ids=["torch", "bigram"])
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.param()  # type: ignore[no-any-return]
