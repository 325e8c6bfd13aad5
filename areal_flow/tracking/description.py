"""What a run is, read from its own files: what a sink shows beside the numbers."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_flow.command import command
from areal_flow.config import Recipe, load_recipe
from areal_flow.rewards.protocol import part_names
from areal_flow.run.directory import recipe_name_of
from areal_flow.run.inputs import read_inputs
from areal_flow.run.layout import RunLayout
from areal_flow.run.lease import Lease, newest_lease
from areal_flow.settings import flatten
from areal_flow.workflows.agent import Agent


@dataclass(frozen=True, slots=True)
class InputPrompts:
    path: Path
    content_hash: str


@dataclass(frozen=True, slots=True)
class RunDescription:
    """What a run is made of and where; the newest driver's host and code."""

    parameters: Mapping[str, Any]
    """The recipe, by dotted name."""
    recipe: str
    """The recipe as TOML."""
    tags: Mapping[str, str]
    """To find runs by; none is empty."""
    text: str
    """Markdown, for a reader."""
    commit: str = ""
    """Of the code, where it is a clone's; a changed one's ends in `-dirty`."""
    prompts: InputPrompts | None = None


def describe_run(layout: RunLayout) -> RunDescription:
    toml, recipe = layout.config.read_text(), load_recipe(layout.config)
    lease = newest_lease(layout.writers) or Lease(0, 0, "", "")
    verifier, prompts = "", None
    if layout.inputs.is_file():
        inputs = read_inputs(layout)
        verifier = inputs.verifier
        for path in (layout.sft_rows, layout.train_prompts):
            if known := inputs.files.get(path.relative_to(layout.root).as_posix()):
                prompts = InputPrompts(path, known)
    tags = {
        "recipe": recipe_name_of(layout),
        "recipe_digest": recipe.digest(),
        "model": recipe.model,
        "algorithm": recipe.algorithm.name,
        "verifier": verifier,
        "code_version": lease.code,
        "host": lease.host,
    }
    return RunDescription(
        flatten(tomllib.loads(toml)),
        toml,
        {name: value for name, value in tags.items() if value},
        _text(layout, recipe),
        lease.commit,
        prompts,
    )


def _text(layout: RunLayout, recipe: Recipe) -> str:
    sft = recipe.sft
    if not layout.steps.exists():
        return (
            f"**{layout.name}** fine-tunes `{recipe.model}` (`{sft.objective}`): {sft.num_steps} "
            f"steps of {sft.batch_size} rows\n\n- run directory: `{layout.root}`"
        )
    rewards = [f"`{recipe.workflow.path}`"] if isinstance(recipe.workflow, Agent) else []
    rewards += [
        f"`{name}`" + (f" × {reward.weight:g}" if reward.weight != 1 else "")
        for reward, name in zip(recipe.rewards, part_names(recipe.rewards), strict=True)
    ]
    controller, runs = recipe.controller, layout.root.parent
    return "\n".join(
        [
            f"**{layout.name}** trains `{recipe.model}` with `{recipe.algorithm.name}`, "
            f"{'asynchronously' if recipe.schedule == 'async' else 'synchronously'}.",
            "",
            f"- {recipe.num_steps} steps of {controller.batch_size} completions, "
            f"{controller.group_size} a prompt; staleness up to {controller.max_staleness}",
            f"- rewards: {', '.join(rewards)}; a completion passes above {recipe.pass_threshold:g}",
            f"- run directory: `{layout.root}`",
            "",
            f"`{command('report', layout.name, runs=runs)}` draws it; "
            f"`{command('trajectories', layout.name, runs=runs)}` shows what the policy wrote.",
        ]
    )
