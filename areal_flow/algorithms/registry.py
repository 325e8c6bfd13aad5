"""The algorithms, by the name that recipes use. The next is a file, a name here and its tests."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field

from areal_flow.algorithms.clipped import GSPO, PPO, DecoupledPPO

AnyAlgorithm = DecoupledPPO | PPO | GSPO

ALGORITHMS = {
    algorithm.model_fields["name"].default: algorithm for algorithm in get_args(AnyAlgorithm)
}


def _with_name(value: Any) -> Any:
    """Return the settings of a recipe that names no algorithm as those of decoupled PPO."""
    return {"name": "decoupled_ppo", **value} if isinstance(value, dict) else value


AlgorithmSettings = Annotated[
    AnyAlgorithm, Field(discriminator="name"), BeforeValidator(_with_name)
]
"""What a recipe's `[algorithm]` accepts: the settings of the algorithm that it names, no others."""
