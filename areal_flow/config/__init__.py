"""The settings of a recipe, each with its type, default and meaning, and how a recipe is read.

A component whose interface needs no vendor keeps its section beside it. Unknown keys, wrong types
and impossible combinations fail, naming field, value and rule. The line under a field is its
meaning, which `areal-flow train --help` and docs/settings.md show.
"""

from areal_flow.config.files import build_recipe, dump_recipe, load_recipe
from areal_flow.config.recipe import Recipe
from areal_flow.config.sections import (
    AdamWSettings,
    EvaluationSettings,
    LoraSettings,
    ParallelSettings,
    SftSettings,
    SupervisedObjective,
    TrackingSettings,
    TrainerSettings,
)

__all__ = [
    "AdamWSettings",
    "EvaluationSettings",
    "LoraSettings",
    "ParallelSettings",
    "Recipe",
    "SftSettings",
    "SupervisedObjective",
    "TrackingSettings",
    "TrainerSettings",
    "build_recipe",
    "dump_recipe",
    "load_recipe",
]
