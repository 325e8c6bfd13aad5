"""`areal-flow train` and `sft`: a new run, or an old one continued."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from areal_flow.config import Recipe, build_recipe, load_recipe, merge
from areal_flow.errors import ConfigError
from areal_flow.layout import RunLayout, run_layout
from pipelines.cli.folders import EXIT_CODES, Given
from pipelines.cli.settings import Overrides

DEFAULT_RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic.toml"
MAY_CHANGE = {"num_steps", "max_minutes"}


def add_to(app: App) -> None:
    """Add the commands."""
    app.command(train)
    app.command(sft)


def train(
    recipe: Path | None = None,
    /,
    *,
    name: str | None = None,
    resume: str | None = None,
    take_over: Annotated[bool, Parameter(negative="")] = False,
    prompts: Path | None = None,
    skip_bad_rows: Annotated[bool, Parameter(negative="")] = False,
    settings: Overrides | None = None,
    folders: Given,
) -> int:
    """Train a policy: everything from prompts to a registered model.

    Args:
        recipe: A TOML recipe; the arithmetic one by default.
        name: Of the run's directory; recipe and time by default.
        resume: The run to continue from its log; only --num-steps and --max-minutes may change.
        take_over: With --resume: even if its driver hangs.
        prompts: JSONL or Parquet, instead of the recipe's.
        skip_bad_rows: Leave out and list rows that are wrong.
    """
    from pipelines.jobs import TRAINING, start
    from pipelines.jobs import resume as go_on

    overrides = dict(settings or {})
    if prompts is not None:
        overrides = merge(overrides, {"prompts": {"source": "file", "path": str(prompts)}})
    if skip_bad_rows:
        overrides = merge(overrides, {"prompts": {"skip_bad_rows": True}})
    if resume is not None:
        layout, changed = _resumed(folders, resume, (recipe, name), overrides)
        outcome = go_on(TRAINING, layout, changed, take_over=take_over, began=folders.began)
    else:
        layout, chosen = _new(folders, recipe, name, overrides)
        outcome = start(TRAINING, layout, chosen, began=folders.began)
    return 0 if outcome.finished else EXIT_CODES[outcome.stopped_by]


def sft(
    recipe: Path | None = None,
    /,
    *,
    name: str | None = None,
    resume: str | None = None,
    take_over: Annotated[bool, Parameter(negative="")] = False,
    settings: Overrides | None = None,
    folders: Given,
) -> int:
    """Fine-tune a policy on prompts with their completions; `train --model` goes on from it.

    Args:
        recipe: A TOML recipe with a section [sft]; the arithmetic one by default.
        name: Of the run's directory; recipe and time by default.
        resume: The run to continue from its newest checkpoint.
        take_over: With --resume: even if its driver hangs.
    """
    from pipelines.jobs import SFT, start
    from pipelines.jobs import resume as go_on
    from pipelines.models import newest_checkpoint

    overrides = dict(settings or {})
    if resume is not None:
        layout, changed = _resumed(folders, resume, (recipe, name), overrides)
        outcome = go_on(SFT, layout, changed, take_over=take_over, began=folders.began)
    else:
        layout, chosen = _new(folders, recipe, name, overrides)
        outcome = start(SFT, layout, chosen, began=folders.began)
    if not outcome.finished:
        return EXIT_CODES[outcome.stopped_by]
    print(f"Export it with: areal-flow export {layout.name} DIRECTORY")
    print(f"Train it further with: areal-flow train --model {newest_checkpoint(layout)}")
    return 0


def _new(
    folders: Given, path: Path | None, name: str | None, overrides: dict[str, Any]
) -> tuple[RunLayout, Recipe]:
    path = path or DEFAULT_RECIPE
    recipe = load_recipe(path, overrides)
    return run_layout(folders.runs, name or f"{path.stem}-{datetime.now():%Y%m%d-%H%M%S}"), recipe


def _resumed(
    folders: Given, name: str, given: tuple[object, ...], overrides: dict[str, Any]
) -> tuple[RunLayout, Recipe]:
    from areal_flow.recovery.run_directory import existing_run

    layout = existing_run(folders.runs, name)
    if any(given) or set(overrides) - MAY_CHANGE:
        raise ConfigError(
            "a resumed run keeps its recipe; only --num-steps and --max-minutes may change"
        )
    recipe = load_recipe(layout.config)
    table = merge(recipe.model_dump(mode="json"), overrides)
    return layout, build_recipe(table, source=str(layout.config))
