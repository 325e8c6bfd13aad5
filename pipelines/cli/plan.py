"""`areal-flow plan` and `doctor`: what a run needs, and what works on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from areal_flow.config.devices import SECTIONS, TINY_MODELS, has_bfloat16, is_too_old
from areal_flow.config.messages import OPTION
from areal_flow.core.errors import ConfigError
from areal_flow.core.machine import Gpus, gpus_here, is_linux, system_name, usable_cores
from areal_flow.core.program import how_to_install
from areal_flow.core.settings import flatten, merge, nest
from areal_flow.planning.gpus import GIB, gpu_bytes, gpu_named
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.registry import AUTO, choose_engine
from areal_flow.rollout.engines.vllm.support import BUILDS, VERSION, installed_vllm
from areal_flow.sandboxes.pool import LOST, choose_tier
from areal_flow.sandboxes.run import SandboxError
from pipelines.cli.settings import Flag, Given, Overrides
from pipelines.console.tables import Report, Table

if TYPE_CHECKING:
    from areal_flow.config import Recipe
    from areal_flow.core.layout import RunLayout
    from areal_flow.planning.memory import MemoryPlan
    from areal_flow.planning.planner import Plan

MIN_CORES = 2
MIN_FREE_GIB = 2
PACKAGES = ("torch", "transformers", "dask", "distributed", "pylance", "mlflow", "pandera")

Subject = tuple[str, str, bool | None, str]
"""What was checked, the value, whether it works (None: it is optional), and what that means."""


def plan(
    recipe: Path | None = None,
    /,
    *,
    placement: Flag = False,
    memory: Flag = False,
    gpu: str = "H100-80GB",
    gpus: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    best_split: Flag = False,
    from_: Annotated[str | None, Parameter(name="--from", metavar="RUN")] = None,
    calibrate: Annotated[str | None, Parameter(metavar="RUN")] = None,
    price: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    settings: Overrides | None = None,
    folders: Given,
) -> Report:
    """Show which workers `train` would start, and estimate memory, time and cost.

    Args:
        recipe: A TOML recipe, or the name of a shipped one; without it, as for `train`. With
            --memory and --gpus, devices that a recipe leaves open are GPUs.
        placement: Workers, their hosts, and the command line or batch script of each kind.
        memory: Peak memory of each trainer rank for the longest rows, and whether it fits the GPU.
        gpu: GPU type.
        gpus: Simulate the run on this many GPUs: step time, staleness, cost, bottleneck.
        best_split: With --gpus: use the fastest split of GPUs instead of the recipe's.
        from_: With --gpus: take the lengths of prompts and completions from this run.
        calibrate: With --gpus: calibrate efficiency on this run, whose workers had one GPU each.
        price: With --gpus: price of a GPU hour in US dollars.
    """
    from pipelines.jobs.job import chosen_recipe, names_task, recipe_path

    if placement + memory + (gpus is not None) != 1:
        raise ConfigError("expected what to plan: --placement, --memory or --gpus N")
    if gpus is None and (best_split or from_ or calibrate or price):
        raise ConfigError("--best-split, --from, --calibrate and --price go with --gpus N")
    over = nest(settings or {})
    name, chosen = chosen_recipe(recipe, over, spelling=OPTION)
    if memory or gpus is not None:
        spec = gpu_named(gpu)  # report an unknown GPU before computing a step
        over = _on_gpus(recipe_path(recipe) if recipe else None, over, num_gpus=gpus)
        chosen = chosen_recipe(recipe, over, spelling=OPTION)[1]
        if recipe is None and names_task(over):
            chosen = _with_plain_defaults(chosen, over, gpu_bytes=int(spec.gib * GIB))
    if memory:
        return _report_memory(name, chosen, gpu=gpu)
    if gpus is not None:
        return _report_plan(
            name,
            chosen,
            gpus=gpus,
            gpu=gpu,
            lengths_of=folders.find(from_).run if from_ else None,
            calibrate_to=folders.find(calibrate).run if calibrate else None,
            best_split=best_split,
            price=price,
        )
    return _report_placement(chosen, logs=folders.runs.resolve() / "NAME" / "jobs")


def _on_gpus(recipe: Path | None, over: dict[str, Any], *, num_gpus: int | None) -> dict[str, Any]:
    """Return overrides that put on GPUs what a recipe leaves open, whatever this machine has."""
    table = merge(tomllib.loads(recipe.read_text()) if recipe else {}, over)
    if table.get("model", TINY_MODELS[0]) in TINY_MODELS:
        return over
    for section in SECTIONS:
        if table.get(section, {}).get("device", AUTO) == AUTO:
            over = merge(over, {section: {"device": "cuda"}})
            if section == "generation" and table.get(section, {}).get("engine", AUTO) == AUTO:
                over = merge(over, {section: {"engine": "vllm"}})
    if num_gpus == 1 and "num_gpus" not in table.get("cluster", {}):
        over = merge(over, {"cluster": {"num_gpus": 1}})
    return over


def _with_plain_defaults(recipe: Recipe, over: dict[str, Any], *, gpu_bytes: int) -> Recipe:
    """Return what `train` would choose for the model on such a GPU, without measuring rows."""
    from areal_flow.planning.costs import model_config
    from pipelines.jobs.defaults import (
        ModelFacts,
        RowFacts,
        parameters_of,
        training_settings,
        with_choices,
    )

    if recipe.model in TINY_MODELS:
        return recipe
    config = model_config(recipe.model)
    size, length = parameters_of(config.to_dict()), config.get_text_config().max_position_embeddings
    num_hidden = config.get_text_config().hidden_size * config.get_text_config().num_hidden_layers
    model, given = ModelFacts(size, length, num_hidden=num_hidden), [*flatten(over)]
    choices = training_settings(model, RowFacts(), recipe, given, gpu_bytes=gpu_bytes)
    return with_choices(recipe, choices)


def _report_placement(recipe: Recipe, *, logs: Path) -> Report:
    from areal_flow.cluster.launchers import make_launcher
    from areal_flow.cluster.placement import place_workers

    cluster = recipe.cluster
    launcher = make_launcher(f"tls://{cluster.network.host}:PORT", cluster, logs=logs)
    workers = place_workers(recipe)
    starts = {worker.name: launcher.preview(worker) for worker in workers}
    rows = [
        {
            "worker": worker.name,
            "host": worker.host or "this machine",
            "cores": worker.num_cores,
            "GPUs": ", ".join(worker.gpus) or worker.num_gpus,
            "slots": worker.num_slots,
        }
        for worker in workers
    ]
    # One command line of each kind: those of one kind differ only in the worker's name.
    kinds = {start.replace(name, ""): name for name, start in reversed(starts.items())}
    shown = [f"\n{name}:\n{starts[name]}" for name in starts if name in kinds.values()]
    data = [asdict(worker) | {"start": starts[worker.name]} for worker in workers]
    return Report({"workers": data}, [Table(rows), *shown])


def _report_memory(name: str, recipe: Recipe, *, gpu: str) -> Report:
    import torch

    from areal_flow.planning.costs import model_config
    from areal_flow.planning.memory import fitting_share, plan_memory, trainer_memory
    from areal_flow.policy.models.policy import policy_from_config
    from pipelines.jobs.built_in import changed

    config = model_config(recipe.model)
    with torch.device("meta"):
        policy = policy_from_config(config, device="meta")

    def planned(recipe: Recipe) -> MemoryPlan:
        memory = trainer_memory(recipe, config, device_bytes=gpu_bytes(gpu))
        return plan_memory(recipe, memory, policy, gpu=gpu)

    plan = planned(recipe)
    data: dict[str, Any] = {
        "recipe": name,
        "gpu": gpu,
        "gpu_bytes": plan.gpu_bytes,
        "fits": plan.fits,
        "ranks": [
            {
                "rank": rank.rank,
                "peak_bytes": rank.peak_bytes,
                "kept_bytes": rank.kept_bytes,
                "by_kind": dict(rank.by_kind),
            }
            for rank in plan.ranks
        ],
    }
    ranks = [
        {
            "rank": rank.rank,
            "peak": _gib(rank.peak_bytes),
            **{kind: _gib(num_bytes) for kind, num_bytes in rank.by_kind.items()},
            "needed": _gib(rank.needed_bytes),
            "kept": _gib(rank.kept_bytes),
        }
        for rank in plan.ranks
    ]
    parts: list[Table | str] = [Table(ranks, "GiB at the peak of a step")]
    if generator := plan.generator:
        data["generator"] = {
            "weights_bytes": generator.weights_bytes,
            "taken_bytes": generator.taken_bytes,
            "cache_tokens": generator.cache_tokens,
            "takes_turns": plan.takes_turns,
        }
        row = {
            "weights": _gib(generator.weights_bytes),
            "taken": _gib(generator.taken_bytes),
            "cache, tokens": f"{generator.cache_tokens:,}",
            "longest sequence": f"{generator.longest_tokens:,}",
        }
        parts.append(Table([row], "GiB of a generator"))
    parts.append(_memory_verdict(plan, gpu))
    trainer = recipe.trainer
    if plan.fits and trainer.activations == "recompute" and trainer.recomputed_layers == 1:
        share = fitting_share(plan, planned(changed(recipe, "trainer", recomputed_layers=0.0)))
        data["recomputed_layers"] = share
        if share < 1:
            parts.append(f"trainer.recomputed_layers = {share:g} fits as well, and is faster")
    return Report(data, parts, code=int(not plan.fits))


def _memory_verdict(plan: MemoryPlan, gpu: str) -> str:
    from areal_flow.planning.memory import FRAGMENTATION
    from areal_flow.training.kernels import RESERVED_BYTES

    needed = max(rank.needed_bytes for rank in plan.ranks)
    verdict = (
        f"{gpu}: {_gib(plan.trainer_bytes)} GiB for a trainer rank, {_gib(needed)} needed "
        f"(the peak, {FRAGMENTATION:.0%} for fragmentation and {_gib(RESERVED_BYTES)} for CUDA)"
    )
    if plan.generator and not plan.generator.fits:
        verdict += (
            ". The generator's cache does not hold the longest sequence: lower "
            "generation.max_model_len or raise generation.vllm.gpu_memory_utilization"
        )
    if plan.generator and plan.generator.taken_bytes > plan.generator_bytes:
        verdict += (
            f". The trainer at rest leaves {_gib(plan.generator_bytes)} GiB to the generator: "
            "lower generation.vllm.gpu_memory_utilization"
        )
    if needed > plan.trainer_bytes:
        verdict += (
            ". Lower trainer.tokens_per_micro_batch, set trainer.activations = 'recompute', or "
            "use more trainer ranks"
        )
    return f"{'fits' if plan.fits else 'DOES NOT FIT'} {verdict}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"


def _report_plan(
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
    from areal_flow.planning.costs import Policy, assumed_lengths, model_config
    from areal_flow.planning.memory import plan_memory, trainer_memory
    from areal_flow.planning.planner import Job, generator_gpus, make_plan
    from pipelines.planning import calibrate_run, job_of_run, lengths_of_run

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
    ranks = trainer_memory(plan.recipe, policy.config, device_bytes=gpu_bytes(gpu))
    memory = plan_memory(plan.recipe, ranks[:1], policy.module, gpu=gpu)
    simulated, generator, bottleneck = plan.simulated, memory.generator, plan.bottleneck
    data = {
        "recipe": name,
        "gpus": gpus,
        "gpu": gpu,
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
            "trainer_rank_gib": memory.ranks[0].needed_bytes / GIB,
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
    parts = _plan_parts(plan, memory, data)
    if calibration:
        data["calibration"] = asdict(calibration)
        parts.append(calibration.sentence)
    return Report(data, parts, code=int(not memory.fits))


def _plan_parts(plan: Plan, memory: MemoryPlan, data: dict[str, Any]) -> list[Any]:
    ages = ", ".join(f"{age}: {share:.0%}" for age, share in plan.simulated.staleness.items())
    split = f"{data['num_generator_gpus']} GPUs generate, {data['num_trainer_gpus']} train"
    if plan.recipe.cluster.has_one_gpu:
        split = "trainer and generator share one GPU"
    kept = data["memory"]
    fit = f"{kept['trainer_rank_gib']:.1f} of {kept['gpu_gib']:.1f} GiB for a trainer rank"
    if memory.generator:
        fit += f"; the cache of a generator holds {kept['generator_cache_tokens']:,} tokens"
    if not memory.fits:
        fit += ": DOES NOT FIT; `plan --memory` says what helps"
    rows = {
        "split": split,
        "a step": f"{data['step_s']:,.1f} s ({plan.steady.generate_s:,.1f} s to generate a batch, "
        f"{plan.steady.train_s:,.1f} s to train it)",
        "tokens a second": f"{data['generated_tokens_per_second']:,.0f} generated, "
        f"{data['trained_tokens_per_second']:,.0f} trained",
        "staleness": f"{data['staleness_mean']:.2f} versions in the mean, of tokens {ages}",
        f"to step {plan.recipe.num_steps}": f"{data['hours']:,.1f} hours, "
        f"{data['cost']:,.0f} US dollars",
        "bottleneck": data["bottleneck"],
        "memory": fit,
        "lengths": data["lengths"],
    }
    parts: list[Any] = [Table([{"": name, "plan": text} for name, text in rows.items()])]
    if plan.changes:
        changes = [
            {"change": name, "a step": f"{ratio - 1:+.0%}"} for name, ratio in plan.changes.items()
        ]
        parts.append(Table(changes, "What one change would give"))
    return parts


def doctor(*, folders: Given) -> Report:
    """Report what works on this machine."""
    marks = {True: "ok", False: "FAIL", None: "-"}
    subjects = list(_subjects(folders.runs.resolve()))
    failed = [what for what, _, works, _ in subjects if works is False]
    rows = [
        {"": marks[works], "what": what, "found": value, "means": means}
        for what, value, works, means in subjects
    ]
    last = f"will not work until fixed: {', '.join(failed)}" if failed else "train will work here"
    names = ("what", "found", "works", "means")
    data = {"works": not failed, "machine": [dict(zip(names, f, strict=True)) for f in subjects]}
    return Report(data, [Table(rows, prose=("found", "means")), last], code=int(bool(failed)))


def _subjects(runs: Path) -> Iterator[Subject]:
    python_version = ".".join(map(str, sys.version_info[:3]))
    yield "python", python_version, sys.version_info >= (3, 11), "3.11 or newer is needed"
    yield _system()
    enough = (cores := usable_cores()) >= MIN_CORES
    means = "generation and training overlap" if enough else "one core: they take turns, slowly"
    yield "cores", str(cores), True, means
    existing = next(folder for folder in (runs, *runs.parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 2**30
    yield "free disk", f"{free:.1f} GiB", free >= MIN_FREE_GIB, f"in {existing}"
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        yield "loopback", "127.0.0.1", True, "all that the local cluster listens on"
    except OSError as error:
        yield "loopback", str(error), False, "workers talk over 127.0.0.1"
    installed = {version.name.lower(): version.version for version in distributions()}
    for name in PACKAGES:
        release = installed.get(name)
        advice = "installed" if release else "install the project with its constraints"
        yield name, release or "missing", bool(release), advice
    gpus = gpus_here()
    yield _gpus(gpus)
    builds = {
        build: version for device, build in BUILDS.items() if (version := installed_vllm(device))
    }
    yield _vllm(builds, has_gpu=bool(gpus.usable))
    device = "cuda" if gpus.usable else "cpu"
    engine, reason = choose_engine(GenerationSettings(engine=AUTO, device=device))
    yield "engine", engine, None, f"what generation.engine = 'auto' uses: {reason}"
    try:
        tier = choose_tier()
        means = LOST[tier] or "'code' runs programs in it; its self-test passes"
        yield "sandbox", tier, True, means
    except SandboxError as error:
        yield "sandbox", "none", None, f"only for the verifier 'code': {error}"


def _system() -> Subject:
    if is_linux():
        return "system", system_name(), True, "all works on Linux"
    if os.name == "posix":
        means = (
            "only on Linux: sandboxes ('code', the tool 'python'), weights in shared memory, vLLM; "
            "not tested on this system"
        )
        return "system", system_name(), None, means
    return "system", system_name(), False, "Linux or macOS is needed: on Windows use WSL"


def _gpus(gpus: Gpus) -> Subject:
    if not gpus.visible:
        return "gpu", "none", None, "models are trained on the CPU; no NVIDIA driver lists a GPU"
    if gpus.unusable:
        return "gpu", str(gpus), False, f"idle: {gpus.unusable}, or set both devices to 'cpu'"
    if all(map(is_too_old, gpus.visible)):
        return "gpu", str(gpus), None, "idle: torch no longer supports them"
    dtype = "bfloat16" if all(map(has_bfloat16, gpus.visible)) else "float32, for lack of bfloat16"
    return "gpu", str(gpus), True, f"what device = 'auto' uses, in {dtype}"


def _vllm(builds: Mapping[str, str], *, has_gpu: bool) -> Subject:
    needed = BUILDS["cuda"]
    if builds.get(needed) == VERSION:
        means = "installed"
    elif needed in builds:
        means = f"expected {VERSION}, the only version that is tested: {how_to_install('vllm')}"
    elif builds:
        means = "generates on the CPU with generation.engine = 'vllm'"
    elif has_gpu:
        means = f"generation is slow without it; {VERSION} fits: {how_to_install('vllm')}"
    else:
        means = f"for GPUs, version {VERSION}; on a CPU the torch engine needs nothing more"
    return "vllm", ", ".join(map(" ".join, builds.items())) or "missing", None, means


COMMANDS = (plan, doctor)
