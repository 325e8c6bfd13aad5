"""Check engine, devices, verifiers and workflow before a run starts.

An error that appears only on the cluster costs a minute and a page of workers' messages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areal_flow.cluster.launch import check_cluster
from areal_flow.cluster.launchers.child import import_paths
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, place_workers
from areal_flow.config import Recipe
from areal_flow.config.devices import TINY_MODELS, has_bfloat16, is_too_old
from areal_flow.core.errors import ConfigError, RewardError
from areal_flow.core.layout import RunLayout
from areal_flow.core.machine import gpus_here
from areal_flow.core.program import how_to_install
from areal_flow.log.inputs import Verifier
from areal_flow.policy.weights.shared_memory import check_medium
from areal_flow.rewards.registry import WeightedRewards
from areal_flow.rewards.trial import ANY_SOURCE, is_foreign
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.registry import require_engine, require_installed
from areal_flow.rollout.prompts.rendering import messages_asked
from areal_flow.rollout.prompts.table import PromptTable
from areal_flow.rollout.workflows.agent import Agent
from areal_flow.rollout.workflows.openenv import OpenEnv
from areal_flow.rollout.workflows.registry import ImportedWorkflow
from areal_flow.rollout.workflows.tool_use import WithTools
from areal_flow.sandboxes.pool import LOST, choose_tier
from areal_flow.sandboxes.registry import make_sandbox
from areal_flow.tracking.registry import require_sinks
from areal_flow.training.settings import TrainerSettings

START_TIMEOUT_S = 120.0
"""How long a verifier may take to be imported and opened."""
EPISODE_LIMIT_S = 90.0
"""How long one episode may take; the trial itself has a shorter limit."""
SLOW_STEP_S = 30.0
"""The trial warns if scoring a step takes longer."""

AVAILABLE_GPUS = """
import json, torch
gpus = range(torch.cuda.device_count())
old = [] if torch.version.hip else [g for g in gpus if torch.cuda.get_device_capability(g) < (8, 0)]
names = [torch.cuda.get_device_name(gpu) for gpu in old]
print(json.dumps({"torch": torch.__version__, "num_gpus": len(gpus), "without_bfloat16": names}))
"""
"""Runs in a process of its own: a CUDA context in the driver would take memory on each GPU."""


def check_devices(recipe: Recipe) -> None:
    """Refuse an engine, devices, a dtype and a medium that this machine does not have.

    Other machines are not checked.
    """
    require_engine(recipe.generation.engine)
    if (rank := recipe.trainer.lora.rank) and find_spec("peft") is None:
        raise ConfigError(
            f"trainer.lora.rank = {rank}: expected the package peft, found none; set it to 0, or "
            f"{how_to_install('lora')}"
        )
    if recipe.tracking.enabled:
        require_sinks(recipe.tracking)
    sections: dict[str, TrainerSettings | GenerationSettings] = {
        "trainer": recipe.trainer,
        "generation": recipe.generation,
    }
    on_gpu = {name: chosen for name, chosen in sections.items() if chosen.device == "cuda"}
    if on_gpu and recipe.cluster.launcher == "local":
        gpus = _available_gpus()
        if not gpus["num_gpus"]:
            settings = " and ".join(f"{name}.device = 'cuda'" for name in on_gpu)
            raise ConfigError(
                f"{settings}: expected CUDA, found none that torch {gpus['torch']} can use; "
                "install a build of torch for CUDA and its driver, or set device to 'cpu'"
            )
        num_required = len({gpu for worker in place_workers(recipe) for gpu in worker.gpus})
        if num_required > gpus["num_gpus"]:
            raise ConfigError(
                f"expected {num_required} GPUs for the trainers and generators with device 'cuda', "
                f"found {gpus['num_gpus']}: start fewer, or fix cluster.num_gpus or "
                "CUDA_VISIBLE_DEVICES, which name more"
            )
        for name, chosen in on_gpu.items():
            if chosen.dtype == "bfloat16" and gpus["without_bfloat16"]:
                raise ConfigError(
                    f"{name}.dtype = 'bfloat16': {', '.join(gpus['without_bfloat16'])} cannot "
                    "compute in it; set it to 'float32'"
                )
    check_cluster(recipe)
    check_medium(recipe.weights_medium)
    if recipe.cluster.launcher == "local":
        require_installed(recipe.generation)


def describe_devices(recipe: Recipe) -> str:
    """Return a line about where trainer and generators compute, and about GPUs that stay idle."""
    parts: dict[str, TrainerSettings | GenerationSettings]
    parts = {"trainer": recipe.trainer, "generation": recipe.generation}
    on_gpu = [name for name, part in parts.items() if part.device == "cuda"]
    chosen = ", ".join(f"{name} {part.device} {part.dtype}" for name, part in parts.items())
    return f"Devices: {chosen}; {_describe_gpus(recipe, on_gpu)}"


def _describe_gpus(recipe: Recipe, on_gpu: Sequence[str]) -> str:
    if recipe.cluster.launcher != "local":
        idle = "no GPU is requested: set cluster.num_gpus for one"
        if recipe.cluster.num_gpus:
            idle = "GPUs stay idle: trainer.device and generation.device say so"
        return f"{'' if on_gpu else f'{idle}, '}workers are on other machines"
    gpus = gpus_here()
    if on_gpu:
        num_used = 1 if recipe.shares_gpu else sum(w.num_gpus for w in place_workers(recipe))
        line = f"{num_used} of the GPUs here ({gpus})"
        if recipe.shares_gpu:
            line += ", which trainer and generator share"
        elif num_used < len(gpus.usable):
            line += ": cluster.num_generators and cluster.num_trainers use more"
        return line if all(map(has_bfloat16, gpus.visible)) else f"{line}; it has no bfloat16"
    if not gpus.visible:
        return "no GPU here"
    why = "settings say so"
    if gpus.unusable:
        why = gpus.unusable
    elif recipe.model in TINY_MODELS:
        why = "a tiny model is as fast on a CPU"
    elif all(map(is_too_old, gpus.visible)):
        why = "torch no longer supports them"
    return f"GPUs here stay idle ({gpus}): {why}"


def _available_gpus() -> dict[str, Any]:
    command = [sys.executable, "-P", "-c", AVAILABLE_GPUS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"device 'cuda': torch cannot say which GPUs there are: {last_line}")
    return dict(json.loads(done.stdout))


def found_verifier(layout: RunLayout, recipe: Recipe) -> Verifier:
    rewards = WeightedRewards(
        recipe.rewards,
        layout.rewards,
        agent=recipe.rewarding_agent,
        environment=recipe.environment,
    )
    return Verifier(rewards.identity, rewards.files)


def try_verifiers(layout: RunLayout, recipe: Recipe) -> list[str]:
    """Call each of the user's verifiers on the first prompt row; return a line about each.

    It is called with the right answer, or the prompt if there is none, and with an empty
    completion; it may fail on one of them.
    For the verifier `code` and the tool `python` a line names the tier of sandboxes, and for
    sandboxes of episodes their provider, which must take the recipe's settings.
    """
    lines, workflow = [], recipe.workflow
    has_python = False
    if isinstance(workflow, WithTools):
        has_python = "python" in workflow.tools and not workflow.has_sandbox
        if workflow.has_sandbox:
            make_sandbox(workflow.sandbox)
            provider = workflow.sandbox.provider
            lines.append(f"Each episode has a sandbox for commands, from the provider {provider!r}")
    if has_python or any(reward.verifier == "code" for reward in recipe.rewards):
        tier = choose_tier()
        lost = f": {LOST[tier]}" if LOST[tier] else ""
        lines.append(f"Model-written code runs in sandboxes here, tier {tier}{lost}")
    chosen = [reward for reward in recipe.rewards if is_foreign(reward)]
    if not chosen:
        return lines
    table = PromptTable(layout.train_prompts, seed=recipe.seed)
    prompt = table.row(0)
    firsts = {ANY_SOURCE: prompt} | {s: table.row(row) for s, row in table.first_rows.items() if s}
    rows = {
        source: {
            "prompt": first.text,
            "answer": first.answer,
            "metadata": dict(first.metadata),
            "prompt_source": first.source,
            "messages": messages_asked(first, recipe.prompt_plan()),
        }
        for source, first in firsts.items()
    }
    limit_s = START_TIMEOUT_S + 2 * sum(reward.timeout_s for reward in chosen)
    rewards = [reward.model_dump(mode="json") for reward in recipe.rewards]
    given = json.dumps({"rewards": rewards, "num_steps": recipe.num_steps, "rows": rows})
    tried, ended = _trial("areal_flow.rewards.trial", layout, given=given, limit_s=limit_s)
    for verifier, judged in {judged["verifier"]: judged for judged in tried}.items():
        scores = judged["scores"] or []
        subject = f"rewards.verifier = {verifier!r}"
        errors = [score["error"] for score in scores]
        if error := judged["error"] or (errors and all(errors) and errors[0]):
            raise RewardError(
                f"{subject} fails on the first prompt row: {error}. Fix it, then start again"
            )
        if not scores:
            raise RewardError(
                f"{subject} {ended} on the first prompt row, instead of returning a reward: call "
                "it yourself on that row, and fix it"
            )
        completion = "prompt" if prompt.answer is None else "answer"
        lines.append(_describe_scores(verifier, scores, recipe, completion=completion))
    return lines


def try_workflow(layout: RunLayout, recipe: Recipe) -> list[str]:
    """Run an episode of a user's workflow or environment on the first row; describe it in a line.

    Every completion is the row's answer, or its prompt if it has none. An error after such a
    completion may come from it, so it is only reported.
    """
    if not isinstance(recipe.workflow, Agent | OpenEnv | ImportedWorkflow):
        return []
    key = "server" if recipe.environment else "path"
    code = getattr(recipe.workflow, key)
    subject = f"workflow.{key} = {code!r}"
    tried, ended = _trial(
        "pipelines.jobs.agent_trial", layout, limit_s=START_TIMEOUT_S + EPISODE_LIMIT_S
    )
    if not tried:
        raise ConfigError(f"{subject} {ended} on the first prompt row: fix it, then start again")
    (outcome,) = tried
    if outcome["is_wrong"]:
        raise ConfigError(
            f"{subject} fails on the first prompt row: {outcome['error']}. Fix it, then start again"
        )
    num_answers, completion = outcome["num_answers"], outcome["completion"]
    line = (
        f"Workflow {code}, tried on the first row with its {completion} as all "
        f"that the policy says: {num_answers} answer{'s' * (num_answers != 1)}, "
        f"{outcome['seconds']:.2g} s"
    )
    if outcome["error"]:
        return [f"{line}, then {outcome['error']}"]
    rewards = ["none" if each is None else f"{each:g}" for each in outcome["rewards"]]
    return [f"{line}; reward {', '.join(rewards)}"]


def _trial(
    program: str, layout: RunLayout, *, given: str = "", limit_s: float
) -> tuple[list[dict[str, Any]], str]:
    """Return the results of a trial, perhaps incomplete, and how its process ended."""
    with tempfile.TemporaryDirectory(prefix="areal-flow-trial-") as scratch:
        output = Path(scratch) / "results.jsonl"
        command = [sys.executable, "-P", "-m", program, str(layout.root), str(output)]
        paths = {"PYTHONPATH": os.pathsep.join(import_paths())}
        environment = os.environ | PROCESS_ENVIRONMENT | paths
        try:
            done = subprocess.run(
                command, input=given, text=True, env=environment, timeout=limit_s, check=False
            )
            code = done.returncode
            ended = f"crashes (signal {-code})" if code < 0 else f"exits (status {code})"
        except subprocess.TimeoutExpired:
            ended = f"hangs (no verdict within {limit_s:g} s)"
        lines = output.read_text().splitlines() if output.exists() else []
    return [json.loads(line) for line in lines], ended


def _shown_reward(score: dict[str, Any]) -> str:
    if score["reward"] is None:
        return "an error" if score["error"] else "no reward"
    return f"{score['reward']:g}"


def _describe_scores(
    verifier: str, scores: list[dict[str, Any]], recipe: Recipe, *, completion: str
) -> str:
    seconds = min(score["seconds"] for score in scores)
    for_answer, for_empty = map(_shown_reward, scores)
    line = (
        f"Verifier {verifier}, tried on the first row: {for_answer} for its {completion} as the "
        f"completion, {for_empty} for an empty one; {1000 * seconds:.3g} ms"
    )
    num_workers, size = recipe.cluster.num_reward_workers, recipe.controller.batch_size
    if (step_s := seconds * size / num_workers) > SLOW_STEP_S:
        line += (
            f". {size} completions of a step take {step_s:.0f} s on {num_workers} reward "
            "worker(s): raise cluster.num_reward_workers"
        )
    return line
