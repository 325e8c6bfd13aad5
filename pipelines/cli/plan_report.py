"""`areal-flow plan --gpus N`: what a run would take on so many GPUs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from areal_flow.config import Recipe
from areal_flow.core.layout import RunLayout
from areal_flow.planning.costs import Policy, assumed_lengths, model_config
from areal_flow.planning.gpus import GIB, gpu_named
from areal_flow.planning.memory import MemoryPlan, plan_memory, trainer_memory
from areal_flow.planning.planner import Calibration, Job, Plan, generator_gpus, make_plan
from pipelines.console.tables import Report, Table
from pipelines.planning import calibrate_run, job_of_run, lengths_of_run


def report_plan(
    name: str,
    recipe: Recipe,
    *,
    gpus: int,
    gpu: str,
    lengths_of: RunLayout | None,
    calibrate_to: RunLayout | None,
    best_split: bool,
    price: float | None,
) -> Report:
    spec = gpu_named(gpu)
    policy = Policy.of(model_config(recipe.model))
    lengths = (
        lengths_of_run(lengths_of)
        if lengths_of
        else assumed_lengths(recipe.generation.max_new_tokens)
    )
    job = Job(recipe, policy, spec, gpus, lengths)
    calibration = None
    if calibrate_to:
        calibration = calibrate_run(job_of_run(calibrate_to, gpu=gpu), calibrate_to)
        job = replace(job, efficiency=calibration.efficiency)
    plan = make_plan(job, best=best_split)
    memory = plan_memory(
        plan.recipe, trainer_memory(plan.recipe, policy.config)[:1], policy.module, gpu=gpu
    )
    data = {"recipe": name, "gpus": gpus, "gpu": gpu} | plan_data(plan, memory, price=price)
    if calibration:
        data["calibration"] = asdict(calibration)
    return Report(data, _said(plan, memory, data, calibration), code=int(not memory.fits))


def plan_data(plan: Plan, memory: MemoryPlan, *, price: float | None) -> dict[str, Any]:
    simulated, generator = plan.simulated, memory.generator
    rank = memory.ranks[0]
    bottleneck = plan.bottleneck
    return {
        "schedule": plan.recipe.schedule,
        "num_generator_gpus": plan.num_generator_gpus,
        "num_trainer_gpus": plan.recipe.cluster.num_trainers,
        "step_s": simulated.step_s,
        "generated_tokens_per_second": simulated.generated_tokens_per_s,
        "trained_tokens_per_second": simulated.trained_tokens_per_s,
        "staleness_mean": simulated.staleness_mean,
        "staleness": simulated.staleness,
        "hours": plan.hours,
        "cost": plan.cost(price),
        "bottleneck": f"{bottleneck.text}. {bottleneck.remedy}".strip(". "),
        "memory": {
            "fits": memory.fits,
            "gpu_gib": memory.gpu_bytes / GIB,
            "trainer_rank_gib": rank.needed_bytes / GIB,
            "generator_weights_gib": generator.weights_bytes / GIB if generator else None,
            "generator_cache_tokens": generator.cache_tokens if generator else None,
        },
        "best_split": {
            "num_generator_gpus": generator_gpus(plan.best),
            "num_trainer_gpus": plan.best.cluster.num_trainers,
        },
        "changes": plan.changes,
        "lengths": plan.job.lengths.source,
        "efficiency": asdict(plan.job.efficiency),
    }


def _said(
    plan: Plan, memory: MemoryPlan, data: dict[str, Any], calibration: Calibration | None
) -> list[Any]:
    ages = ", ".join(f"{age}: {share:.0%}" for age, share in plan.simulated.staleness.items())
    recipe, kept = plan.recipe, data["memory"]
    rows = {
        "split": "trainer and generator share one GPU"
        if recipe.cluster.has_one_gpu
        else f"{data['num_generator_gpus']} GPUs generate, {data['num_trainer_gpus']} train",
        "a step": f"{data['step_s']:,.1f} s ({plan.steady.generate_s:,.1f} s to generate a batch, "
        f"{plan.steady.train_s:,.1f} s to train it)",
        "tokens a second": f"{data['generated_tokens_per_second']:,.0f} generated, "
        f"{data['trained_tokens_per_second']:,.0f} trained",
        "staleness": f"{data['staleness_mean']:.2f} versions in the mean, of tokens {ages}",
        f"to step {recipe.num_steps}": f"{data['hours']:,.1f} hours, "
        f"{data['cost']:,.0f} US dollars",
        "bottleneck": data["bottleneck"],
        "memory": f"{kept['trainer_rank_gib']:.1f} of {kept['gpu_gib']:.1f} GiB for a trainer rank"
        + (
            f"; the cache of a generator holds {kept['generator_cache_tokens']:,} tokens"
            if memory.generator
            else ""
        )
        + ("" if memory.fits else ": DOES NOT FIT; `plan --memory` says what helps"),
        "lengths": data["lengths"],
    }
    parts: list[Any] = [Table([{"": name, "plan": text} for name, text in rows.items()])]
    changes = [
        {"change": name, "a step": f"{ratio - 1:+.0%}"} for name, ratio in plan.changes.items()
    ]
    if changes:
        parts.append(Table(changes, "What one change would give"))
    if calibration:
        parts.append(calibration.sentence)
    return parts
