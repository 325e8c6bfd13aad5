"""`areal-flow train`: a new run, or an old one continued; its state recorded when it is left."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

from areal_flow.config import Recipe, build_recipe, load_recipe, parse_overrides
from areal_flow.errors import ConfigError
from areal_flow.layout import RunLayout, run_layout
from areal_flow.recovery.checkpoints import list_checkpoints
from areal_flow.recovery.lease import Writer

RECIPES = Path(__file__).parents[2] / "recipes"
DEFAULT_RECIPE = RECIPES / "arithmetic.toml"
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


def add_to(commands: Any) -> None:
    """Add `train` to the command line's grammar."""
    train = commands.add_parser(
        "train",
        allow_abbrev=False,
        help="train a policy",
        epilog="Any setting by its dotted name: --trainer.learning-rate 1e-5",
    )
    train.add_argument("recipe", nargs="?", type=Path, help="a TOML recipe (default: arithmetic)")
    train.add_argument("--name", help="of the run's directory (default: recipe and time)")
    train.add_argument("--resume", metavar="NAME", help="continue a run from its log")
    train.add_argument(
        "--take-over", action="store_true", help="with --resume: even if its driver hangs"
    )
    train.add_argument("--model", help="'tiny', a model directory or a hub name")
    train.add_argument("--num-steps", type=int)
    train.add_argument("--seed", type=int)
    train.add_argument("--schedule", choices=["async", "sync"])
    train.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL or Parquet")
    train.add_argument("--max-minutes", type=float, help="stop training after this long")
    train.add_argument("--skip-bad-rows", action="store_true", default=None)
    train.set_defaults(run=run)


def run(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    """Make or resume a run and drive it to its end."""
    from areal_flow.recovery.run_directory import create_run, existing_run, hold_run

    if known.resume:
        layout = existing_run(known.runs, known.resume)
        recipe = _resumed_recipe(known, dotted, layout)
        with hold_run(layout, take_over=known.take_over) as writer:
            return _drive(layout, recipe, writer, resume=True, began=began)
    recipe_path = known.recipe or DEFAULT_RECIPE
    recipe = load_recipe(recipe_path, _overrides(known, dotted))
    name = known.name or f"{recipe_path.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    layout = run_layout(known.runs, name)
    create_run(layout, recipe)
    with hold_run(layout) as writer:
        return _drive(layout, recipe, writer, resume=False, began=began)


def _drive(layout: RunLayout, recipe: Recipe, writer: Writer, *, resume: bool, began: float) -> int:
    from areal_flow.recovery.run_directory import leave_run
    from pipelines.train import run_training

    print(f"Run {layout.name} in {layout.root}", flush=True)
    if not resume:
        _prepare(layout, recipe)
    try:
        outcome = asyncio.run(
            run_training(layout, recipe, writer=writer, resume=resume, began=began)
        )
    except BaseException as error:
        forced = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
        leave_run(
            layout,
            writer,
            "stopped" if forced else "failed",
            seconds=monotonic() - began,
            reason=str(error)[:500],
        )
        print(_how_to_go_on(layout), file=sys.stderr, flush=True)
        raise
    leave_run(
        layout,
        writer,
        "finished" if outcome.finished else "stopped",
        seconds=monotonic() - began,
        reason=outcome.stopped_by,
    )
    if outcome.finished:
        return 0
    print(_how_to_go_on(layout), flush=True)
    return EXIT_CODES[outcome.stopped_by]


def _prepare(layout: RunLayout, recipe: Recipe) -> None:
    """Prepare a new run; a mistake found here leaves nothing behind, so the name stays free."""
    from pipelines.train import prepare_run

    try:
        _say_prepared(prepare_run(layout, recipe), layout)
    except BaseException:
        shutil.rmtree(layout.root, ignore_errors=True)
        raise


def _how_to_go_on(layout: RunLayout) -> str:
    if list_checkpoints(layout.checkpoints):
        again = f"areal-flow train --resume {layout.name}"
        return f"Everything committed is safe. Continue with: {again}"
    return (
        f"Training had not begun: there is nothing to resume. Remove {layout.root} to start again"
    )


def _say_prepared(prepared: Any, layout: RunLayout) -> None:
    print(f"{prepared.num_train} prompts to train on, {prepared.num_held_out} held out", flush=True)
    if prepared.bad_rows:
        print(f"{len(prepared.bad_rows)} bad rows skipped, listed in {layout.bad_rows}:")
        for row in prepared.bad_rows[:5]:
            print(f"  {row}")


def _overrides(known: argparse.Namespace, dotted: list[str]) -> dict[str, Any]:
    overrides = parse_overrides(dotted)
    for name in ("model", "num_steps", "seed", "schedule", "max_minutes"):
        if (value := getattr(known, name)) is not None:
            overrides[name] = value
    prompts = overrides.setdefault("prompts", {})
    if known.prompts is not None:
        prompts |= {"source": "file", "path": str(known.prompts)}
    if known.skip_bad_rows:
        prompts["skip_bad_rows"] = True
    return overrides


def _resumed_recipe(known: argparse.Namespace, dotted: list[str], layout: RunLayout) -> Recipe:
    overrides = _overrides(known, dotted)
    overrides.pop("prompts")
    changed = sorted(set(overrides) - {"num_steps", "max_minutes"})
    if known.recipe or known.prompts or known.name or changed:
        raise ConfigError(
            "a resumed run keeps its recipe; only --num-steps and --max-minutes may change"
        )
    recipe = load_recipe(layout.config)
    return build_recipe({**recipe.model_dump(mode="json"), **overrides}, source=str(layout.config))
