"""The algorithms, by the name that recipes use. The next is a file, a name here and its tests."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from areal_flow.algorithms.actor_critic import ActorCriticPPO
from areal_flow.algorithms.clipped import GSPO, PPO, DecoupledPPO, ReinforcePlusPlus
from areal_flow.algorithms.objectives import CISPO, DPPO, M2PO, SAPO
from areal_flow.core.settings import unnamed_is

AnyAlgorithm = (
    DecoupledPPO | PPO | GSPO | CISPO | SAPO | M2PO | DPPO | ReinforcePlusPlus | ActorCriticPPO
)

ALGORITHMS = {
    algorithm.model_fields["name"].default: algorithm for algorithm in get_args(AnyAlgorithm)
}

AlgorithmSettings = Annotated[
    AnyAlgorithm, Field(discriminator="name"), unnamed_is("decoupled_ppo")
]
"""What a recipe's `[algorithm]` accepts: the settings of the algorithm that it names, no others."""
