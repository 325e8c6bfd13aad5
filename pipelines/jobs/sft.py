"""Supervised fine-tuning: what `sft` does, and `train` first if its recipe has the stage."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import numpy as np

from areal_flow.cluster.launch import launch_cluster
from areal_flow.cluster.launchers.fork_server import ForkServer
from areal_flow.cluster.placement import WorkerPlacement, place_workers, trainer_name
from areal_flow.cluster.trainer_replicas import TrainerReplicas
from areal_flow.cluster.worker import WorkerContext
from areal_flow.config import Recipe, dump_recipe
from areal_flow.core.errors import ConfigError, TrainerLost
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.log.inputs import Verifier, record_inputs
from areal_flow.policy.checkpoints import checkpoint_path
from areal_flow.policy.tokenizer.auto_tokenizer import NUM_COMPARED, warn_of_other_tokens
from areal_flow.policy.tokenizer.directory import (
    chat_template_of,
    stop_token_ids,
    texts_of,
    tokenizer_of,
)
from areal_flow.rollout.prompts.completions import (
    RowEncoder,
    check_first_completions,
    tokenise_completions,
)
from areal_flow.training.supervised import OBJECTIVES
from pipelines.cluster_address import dashboard_text
from pipelines.console.progress import Progress, make_progress
from pipelines.jobs.built_in import (
    initial_model,
    prepare_model,
    rows_wanted,
    with_fetched_sft,
    with_files,
)
from pipelines.jobs.defaults import (
    completion_facts,
    describe_choices,
    model_facts,
    smallest_gpu_bytes,
    supervised_settings,
    with_choices,
)
from pipelines.jobs.stop_signals import Outcome, StopSignals

MAX_LOST_TRAINERS = 3
"""The run ends when this many trainers in a row die without progress."""

SHOWN = {
    "loss": "loss",
    "pair_accuracy": "accuracy",
    "pair_margin": "margin",
    "held_out_loss": "held-out loss",
    "held_out_pair_accuracy": "held-out accuracy",
}
"""Metrics shown during fine-tuning, and their labels."""

logger = logging.getLogger(__name__)


def check_first_sft_rows(recipe: Recipe) -> None:
    if recipe.sft.num_steps and recipe.sft.path:
        check_first_completions(recipe.sft.path, OBJECTIVES[recipe.sft.objective].fields)


def prepare_sft(layout: RunLayout, recipe: Recipe) -> int:
    """Tokenize the rows of supervised fine-tuning; return their number, 0 without the stage."""
    sft = recipe.sft
    if not (sft.num_steps and sft.path):
        return 0
    objective = OBJECTIVES[sft.objective]
    num_rows = tokenise_completions(
        sft.path,
        layout.sft_rows,
        encoder=_encoder(layout, recipe),
        max_tokens=recipe.trainer.tokens_per_micro_batch,
        fields=objective.fields,
    )
    if num_rows <= sft.num_held_out:
        raise ConfigError(
            f"sft.num_held_out ({sft.num_held_out}) leaves nothing to train of the {num_rows} rows "
            f"in {sft.path}: hold out fewer"
        )
    return num_rows


def _encoder(layout: RunLayout, recipe: Recipe) -> RowEncoder:
    return RowEncoder(
        tokenizer_of(layout.model),
        stop_token_ids=stop_token_ids(layout.model),
        chat=chat_template_of(layout.model),
        system=recipe.prompts.system_prompt,
        with_stop=not OBJECTIVES[recipe.sft.objective].makes_reward_model,
    )


def prepare_sft_run(layout: RunLayout, recipe: Recipe, given: Collection[str] | None = None) -> str:
    """Write what a run of supervised fine-tuning alone needs; return a summary to print.

    Args:
        given: names of settings that stay; other ones follow the model and the rows. None: all
            stay.
    """
    objective, notes = OBJECTIVES[recipe.sft.objective], list[str]()
    fill = with_fetched_sft if recipe.sft.path else with_files
    filled = fill(recipe, layout)
    if given is not None and recipe.sft.path:
        recipe, notes = _with_choices(layout, filled, given)
        filled = recipe
    if not (filled.sft.num_steps and filled.sft.path):
        raise ConfigError(
            f"expected sft.num_steps of 1 or more and {rows_wanted(filled)}: found "
            f"{recipe.sft.num_steps} and {recipe.sft.path}"
        )
    check_first_sft_rows(filled)
    prepare_model(recipe, layout)
    if objective.makes_reward_model:
        from areal_flow.policy.models.reward_model import describe_reward_model  # torch

        describe_reward_model(layout.model, pad_token_id=stop_token_ids(layout.model)[0])
    num_rows = prepare_sft(layout, filled)
    model = initial_model(recipe, layout)
    with np.load(layout.sft_rows) as arrays:
        first = np.split(arrays["tokens"], np.cumsum(arrays["lengths"][:NUM_COMPARED]))[:-1]
    warn_of_other_tokens(model, layout.model, texts_of(tokenizer_of(layout.model), first))
    record_inputs(layout, recipe, verifier=Verifier(), model=model)
    return "\n".join([f"{num_rows} rows to learn from", *notes])


def _with_choices(
    layout: RunLayout, recipe: Recipe, given: Collection[str]
) -> tuple[Recipe, list[str]]:
    """Return a recipe with settings that follow from its model and rows, and lines about them."""
    assert recipe.sft.path
    check_first_completions(recipe.sft.path, OBJECTIVES[recipe.sft.objective].fields)
    prepare_model(recipe, layout)
    model = model_facts(initial_model(recipe, layout), layout.model, max_tokens=0)
    rows = completion_facts(recipe, layout.model, _encoder(layout, recipe))
    gpu_bytes = smallest_gpu_bytes(recipe)
    choices = supervised_settings(model, rows, recipe, given, gpu_bytes=gpu_bytes)
    recipe = with_choices(recipe, choices)
    layout.config.write_text(dump_recipe(recipe))
    return recipe, describe_choices(model, choices, given)


def sft_workers(recipe: Recipe) -> list[WorkerPlacement]:
    names = set(map(trainer_name, range(recipe.cluster.num_trainers)))
    return [placed for placed in place_workers(recipe) if placed.name in names]


async def run_sft(
    layout: RunLayout,
    recipe: Recipe,
    *,
    writer: Writer,
    fork_server: ForkServer | None = None,
    **_: object,
) -> Outcome:
    """Fine-tune on trainers alone; the policy is then the newest sft checkpoint."""
    progress = make_progress(num_steps=recipe.sft.num_steps, num_generators=0)
    workers = sft_workers(recipe)
    context = WorkerContext(layout.root, writer.writer_epoch)
    try:
        progress.phase(f"Starting {len(workers)} worker{'s' * (len(workers) > 1)}")
        with StopSignals() as signals:
            async with launch_cluster(
                workers, recipe.cluster, context, fork_server=fork_server
            ) as cluster:
                progress.phase(dashboard_text(cluster.dashboard))
                replicas = TrainerReplicas(
                    cluster.client, num_ranks=len(workers), replace=cluster.pool.replace
                )
                result = await cluster.pool.guard(
                    first_policy(replicas, layout, recipe, progress, signals)
                )
    finally:
        progress.close()
    return Outcome(True) if result else Outcome(False, signals.received[0])


async def first_policy(
    replicas: TrainerReplicas,
    layout: RunLayout,
    recipe: Recipe,
    progress: Progress,
    signals: StopSignals,
) -> Path | None:
    """Fine-tune or initialize version 0 if needed; return its directory, or None if stopped.

    The pool restarts a trainer that dies, which continues from the newest checkpoint.
    """
    source = initial_model(recipe, layout)
    num_steps = recipe.sft.num_steps if layout.sft_rows.is_file() else 0
    if not num_steps and any(source.glob("*.safetensors")):
        return source
    num_done, num_lost = -1, 0
    with signals.finishing_steps(lambda: None):
        while num_done < num_steps and not signals.received:
            try:
                num_done, metrics = await replicas.fine_tune(source)
                if num_steps:
                    shown = [name for name in SHOWN if name in metrics]
                    note = "".join(f", {SHOWN[name]} {metrics[name]:.3f}" for name in shown)
                    progress.count("supervised fine-tuning", num_done, num_steps, note)
                num_lost = 0
            except TrainerLost as error:
                num_lost += 1
                if num_lost == MAX_LOST_TRAINERS:
                    raise
                logger.warning("%s: going on from the newest checkpoint", error)
        if num_done < num_steps:
            await replicas.save_fine_tuned()
            return None
    return checkpoint_path(layout.sft_checkpoints, num_steps)
