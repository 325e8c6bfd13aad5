"""Prompts of other packages: reasoning-gym's tasks, Hugging Face datasets, verifiers' environments.

The only importer of the first two. Their rows are written into the run, so that a resume and a
replay need neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from areal_flow.config import Recipe
from areal_flow.core.code_version import how_to_install
from areal_flow.core.errors import ConfigError, PromptError
from areal_flow.rewards.reasoning_gym import scorer_of

Row = Mapping[str, Any]
Rows = list[dict[str, Any]]
Fetch = Callable[[str, Recipe, Mapping[str, Any]], tuple[Iterable[Row], Rows]]
"""Takes what stands behind the colon, the recipe of this source and the source's settings; returns
the rows to train on and those held out: none, if a part of the others shall be."""


def reasoning_gym_rows(
    task: str, recipe: Recipe, settings: Mapping[str, Any]
) -> tuple[Iterable[Row], Rows]:
    """Return entries of a task: a question, an answer, and metadata for the task's own scorer."""
    try:
        from reasoning_gym import create_dataset
    except ImportError:
        raise _missing("reasoning_gym", "reasoning-gym") from None
    if any(reward.verifier == "reasoning_gym" for reward in recipe.rewards):
        scorer_of(task)
    num_held_out = recipe.prompts.num_held_out
    size = num_held_out + recipe.prompts.num_prompts
    try:
        dataset = create_dataset(task, seed=recipe.seed, size=size, **settings)
        held_out = [dataset[index] for index in range(num_held_out)]
    except (ValueError, TypeError, AssertionError) as error:
        given = f" with the settings {dict(settings)}" if settings else ""
        raise ConfigError(f"source 'reasoning_gym:{task}'{given}: {error}") from None
    return (dataset[index] for index in range(num_held_out, size)), held_out


def dataset_rows(
    name: str, recipe: Recipe, settings: Mapping[str, Any]
) -> tuple[Iterable[Row], Rows]:
    """Return the rows of a Hugging Face dataset, of the hub or of a directory.

    Args:
        settings: `config`, `split` (`train`), `held_out_split` (none: a part of the split is held
            out) and `revision`.
    """
    known = ("config", "split", "held_out_split", "revision")
    if unknown := sorted(settings.keys() - set(known)):
        raise ConfigError(
            f"source 'datasets:{name}' has no setting {unknown[0]!r}: it takes {', '.join(known)}"
        )
    try:
        from datasets import load_dataset
    except ImportError:
        raise _missing("datasets", "datasets") from None

    def load(split: str) -> Any:
        of = {"name": settings.get("config"), "revision": settings.get("revision")}
        try:
            return load_dataset(name, split=split, **of)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise PromptError(
                f"source 'datasets:{name}', split {split!r}: {reason}. Without a network, save its "
                "rows elsewhere as JSONL or Parquet, and name the file as prompts.path"
            ) from error

    held_out_split = settings.get("held_out_split")
    held_out = islice(load(held_out_split), recipe.prompts.num_held_out) if held_out_split else ()
    return load(settings.get("split", "train")), [*held_out]


def verifiers_rows(
    environment: str, recipe: Recipe, settings: Mapping[str, Any]
) -> tuple[Iterable[Row], Rows]:
    """Return the first tasks of an environment, for the agent that plays them."""
    if settings:
        raise ConfigError(f"source 'verifiers:{environment}' takes no settings, found {settings}")
    try:
        from areal_flow.rollout.workflows.verifiers_agent import rows
    except ImportError:
        raise _missing("verifiers", "verifiers") from None
    return rows(environment, recipe.prompts.num_prompts + recipe.prompts.num_held_out), []


def _missing(package: str, extra: str) -> ConfigError:
    return ConfigError(
        f"prompts of {package!r} need the package of this name: {how_to_install(extra)}"
    )


FETCHED: dict[str, Fetch] = {
    "reasoning_gym": reasoning_gym_rows,
    "datasets": dataset_rows,
    "verifiers": verifiers_rows,
}
"""What makes rows, by what stands before the colon of a source's name."""
