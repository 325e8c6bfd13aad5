"""What a sink shows of a run and must do for it; doing it twice is as doing it once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from areal_flow.config import Recipe, load_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Lease, newest_lease
from areal_flow.core.program import command
from areal_flow.core.settings import flatten
from areal_flow.log.directory import recipe_name_of
from areal_flow.log.inputs import read_inputs
from areal_flow.rewards.protocol import part_names

TRAINED_AT_TAG = "trained_at"
"""Of a registered version: when the ledger had its step, as text that sorts by time."""
PASS_RATE_TAG = "held_out_pass_rate"
"""Of a registered version: what its newest held-out evaluation found, if there was one."""
BATCH_PASS_RATE_TAG = "rollout_pass_rate"
"""Of a registered version: that of the batch of which it was made."""


@dataclass(frozen=True, slots=True)
class InputPrompts:
    """The prompts that a run is trained on."""

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
    max_new_tokens: int
    """The longest completion in training."""
    commit: str = ""
    """Of the code, where it is a clone's; a changed one's ends in `-dirty`."""
    prompts: InputPrompts | None = None


class StepMetrics(NamedTuple):
    """The numbers of a step, and when it was committed."""

    step: int
    metrics: Mapping[str, float]
    timestamp_ms: int


class Tracker(Protocol):
    """One sink of one run. One thread calls it; it may block, and raise while it cannot be reached.

    Whatever was delivered may be delivered again after a crash: the result must be the same.
    """

    model_version: str | None
    """The registered version of the newest checkpoint, once there is one."""
    alias: str | None
    """The run's own alias, which follows that version."""

    def begin(self) -> int:
        """Find this run in the sink, or make it there; return the last step delivered, or 0."""

    def describe(self, description: RunDescription) -> None:
        """Show what the run is; parameters that are there already may stay, all else is
        replaced."""

    def show_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show a table of sample answers, instead of the one shown before."""

    def show_report(self, page: Path) -> None:
        """Keep the page of a run that was delivered, instead of the one kept before."""

    def log_steps(self, steps: Sequence[StepMetrics]) -> None:
        """Log the numbers of some steps, ascending, and remember the last as delivered."""

    def log_evaluation(
        self, policy_version: int, metrics: Mapping[str, float], *, timestamp_ms: int
    ) -> None:
        """Log what was measured of a policy outside its training."""

    def register_checkpoints(self, present: Mapping[Path, Mapping[str, str]]) -> None:
        """Register these checkpoints, without a copy, and no others of this run.

        The newest gets the run's alias. `best` goes to the highest pass rate of all runs. A sink
        without a registry does nothing.

        Args:
            present: the tags of each directory, ascending by step. Those of a registered one may
                have changed.
        """

    def protected(self) -> frozenset[Path] | None:
        """Return the checkpoints that must not be pruned: those with `best`, or a user's alias.

        None: the sink has no registry.
        """

    def remove(self) -> int:
        """Remove the run with its versions and their aliases; return how many versions it had.

        A sink that never had the run is left as it is.
        """

    def is_reachable(self) -> bool:
        """Return whether the sink answers at all; asked after an error."""

    def end(self, status: str) -> None:
        """Mark the run ended: FINISHED, which gives its newest version the alias `current`, KILLED
        or FAILED."""


def describe_run(layout: RunLayout) -> RunDescription:
    """Read the description from a run's own files."""
    toml, recipe = layout.config.read_text(), load_recipe(layout.config)
    lease = newest_lease(layout.writers) or Lease(0, 0, "", "")
    verifier, prompts = "", None
    if layout.inputs.is_file():
        inputs = read_inputs(layout)
        verifier = inputs.verifier
        for path in (layout.sft_rows, layout.train_prompts):
            if content_hash := inputs.files.get(path.relative_to(layout.root).as_posix()):
                prompts = InputPrompts(path, content_hash)
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
        recipe.generation.max_new_tokens,
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
    rewards = [f"`{each}`" for each in (recipe.rewarding_agent, recipe.environment) if each]
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
