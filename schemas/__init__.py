"""The storage contract: pandera models, the one source of every Arrow schema in the project."""

from schemas.arrow import arrow_schema, validate, violations
from schemas.rows import EvaluationRow, PromptRow, StepRow, TrajectoryRow

__all__ = [
    "EvaluationRow",
    "PromptRow",
    "StepRow",
    "TrajectoryRow",
    "arrow_schema",
    "validate",
    "violations",
]
