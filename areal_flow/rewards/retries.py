"""When a service that failed is asked again, and after how long."""

from __future__ import annotations

TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Of HTTP; what they say may have passed."""
FIRST_WAIT_S = 0.5


def wait_s(attempt: int) -> float:
    """Return how long to wait before an attempt, counted from 0; each time twice as long."""
    return FIRST_WAIT_S * 2 ** (attempt - 1) if attempt else 0.0
