"""`areal-flow`: arguments in, an exit code out. Heavy imports wait for the command that needs them.

Exit codes: 0 done; 1 an error, said in one message; 2 wrong usage or settings; 130 and 143 stopped
by SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

from areal_flow.checkpoints import list_checkpoints
from areal_flow.config import Recipe, build_recipe, load_recipe, parse_overrides
from areal_flow.errors import ArealFlowError, ConfigError
from areal_flow.layout import RunLayout, run_layout

RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = RECIPES / "arithmetic.toml"
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors of ours become one message and an exit code."""
    began = monotonic()
    plain, dotted = split_dotted(sys.argv[1:] if arguments is None else arguments)
    known = build_parser().parse_args(plain)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a verifier by import path may lie beside the recipe
    try:
        return int(known.run(known, dotted, began))
    except ConfigError as error:
        print(f"areal-flow: {error}", file=sys.stderr)
        return 2
    except ArealFlowError as error:
        print(f"areal-flow: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        print("areal-flow: stopped", file=sys.stderr)
        return EXIT_CODES.get(str(stop), EXIT_CODES["SIGINT"])


def split_dotted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `--SECTION.SETTING VALUE` from everything else, which argparse understands."""
    plain: list[str] = []
    dotted: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        option, equals, _ = argument.partition("=")
        if not (option.startswith("--") and "." in option):
            plain.append(argument)
            continue
        dotted.append(argument)
        if not equals and remaining:
            dotted.append(remaining.pop(0))
    return plain, dotted


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    parser = argparse.ArgumentParser(prog="areal-flow", allow_abbrev=False)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs")
    parser.add_argument("--registry", metavar="URI", help="MLflow's address, for models:/...")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_evaluate(commands)
    _add_export(commands)
    doctor = commands.add_parser("doctor", help="what this machine has and what will work")
    doctor.set_defaults(run=_doctor)
    runs = commands.add_parser("runs", help="list runs with their state")
    runs.set_defaults(run=_runs)
    return parser


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        allow_abbrev=False,
        help="train a policy",
        epilog="Any setting by its dotted name: --trainer.learning-rate 1e-5",
    )
    train.add_argument("recipe", nargs="?", type=Path, help="a TOML recipe (default: arithmetic)")
    train.add_argument("--name", help="of the run's directory (default: recipe and time)")
    train.add_argument("--resume", metavar="NAME", help="continue a run from its log")
    train.add_argument("--model", help="'tiny', a model directory or a hub name")
    train.add_argument("--num-steps", type=int)
    train.add_argument("--seed", type=int)
    train.add_argument("--schedule", choices=["async", "sync"])
    train.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL or Parquet")
    train.add_argument("--max-minutes", type=float, help="stop training after this long")
    train.add_argument("--skip-bad-rows", action="store_true", default=None)
    train.set_defaults(run=_train)


def _add_evaluate(commands: Any) -> None:
    evaluate = commands.add_parser("evaluate", help="answer held-out prompts with a policy")
    evaluate.add_argument("model", help="a run's name, models:/NAME@ALIAS, or a model directory")
    evaluate.add_argument("--prompts", type=Path, metavar="FILE", help="instead of the run's own")
    evaluate.add_argument("--num-prompts", type=int, help="answer only the first ones")
    evaluate.set_defaults(run=_evaluate)


def _add_export(commands: Any) -> None:
    export = commands.add_parser("export", help="write a plain Hugging Face directory")
    export.add_argument("model", help="a run's name, models:/NAME@ALIAS, or a checkpoint directory")
    export.add_argument("directory", type=Path)
    export.set_defaults(run=_export)


def _train(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    from pipelines.run_directory import create_run, existing_run, hold_run

    if known.resume:
        layout = existing_run(known.runs, known.resume)
        recipe = _resumed_recipe(known, dotted, layout)
        with hold_run(layout) as epoch:
            return _drive(layout, recipe, epoch, resume=True, began=began)
    recipe_path = known.recipe or DEFAULT_RECIPE
    recipe = load_recipe(recipe_path, _overrides(known, dotted))
    name = known.name or f"{recipe_path.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    layout = run_layout(known.runs, name)
    create_run(layout, recipe)
    with hold_run(layout) as epoch:
        return _drive(layout, recipe, epoch, resume=False, began=began)


def _drive(layout: RunLayout, recipe: Recipe, epoch: int, *, resume: bool, began: float) -> int:
    from pipelines.run_directory import leave_run
    from pipelines.train import run_training

    print(f"Run {layout.name} in {layout.root}", flush=True)
    if not resume:
        _prepare(layout, recipe)
    try:
        outcome = asyncio.run(
            run_training(layout, recipe, writer_epoch=epoch, resume=resume, began=began)
        )
    except BaseException as error:
        forced = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
        leave_run(
            layout,
            "stopped" if forced else "failed",
            seconds=monotonic() - began,
            reason=str(error)[:500],
        )
        print(_how_to_go_on(layout), file=sys.stderr, flush=True)
        raise
    leave_run(
        layout,
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


def _evaluate(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    _refuse_dotted(dotted)
    from pipelines.evaluate import evaluate
    from pipelines.models import find_model

    model = find_model(known.runs, known.model, registry=known.registry)
    return evaluate(model, prompts=known.prompts, limit=known.num_prompts)


def _export(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    _refuse_dotted(dotted)
    from pipelines.export import export
    from pipelines.models import find_model

    export(find_model(known.runs, known.model, registry=known.registry), known.directory)
    return 0


def _doctor(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    _refuse_dotted(dotted)
    from pipelines.doctor import doctor

    return doctor(known.runs)


def _runs(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    _refuse_dotted(dotted)
    from pipelines.runs import print_runs

    print_runs(known.runs)
    return 0


def _refuse_dotted(dotted: list[str]) -> None:
    if dotted:
        raise ConfigError(f"settings are for `train` only, found: {' '.join(dotted)}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
