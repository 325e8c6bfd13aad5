"""Turns `auto`, the default of devices and data types, into values when a recipe is built.

A recipe has values only, so that a resume or a replay does not depend on its machine.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from areal_flow.config.cluster import ClusterSettings
from areal_flow.core import machine
from areal_flow.core.machine import Gpu, Gpus
from areal_flow.rollout.engines.vllm import support

AUTO = "auto"
TINY_MODELS = ("tiny", "tiny_calculator", "tiny_lookup", "tiny_coder")
"""Models that are made here and compute on CPUs unless a recipe says otherwise."""
OLDEST_CAPABILITY = (7, 5)
"""Of GPUs for which torch has kernels."""
BFLOAT16_CAPABILITY = (8, 0)
SHARED_MEMORY = {"async": 0.4, "sync": 0.6}
"""A generator's share of the one GPU of a run, by schedule: in turns, both shares may be larger."""
SECTIONS = ("trainer", "generation")
_ASKS_FOR_GPUS = re.compile(r"--(gpus\b|gpus-per|gres=.*gpu|tres.*gpu)")
"""Options of `sbatch`."""


class Devices(NamedTuple):
    """What `auto` stands for in a cluster."""

    device: str
    dtype: str
    """On a GPU; on a CPU it is float32."""
    num_gpus: int | None
    """GPUs of this machine, if all workers are on it."""

    def dtype_on(self, device: str) -> str:
        return "float32" if device == "cpu" else self.dtype


def devices_of(model: object, cluster: ClusterSettings, gpus: Gpus) -> Devices:
    """Return what `auto` stands for.

    GPUs of other machines, and those that detection misses, are known from the cluster's settings
    alone.

    Args:
        gpus: of this machine.
    """
    if model in TINY_MODELS:
        return Devices("cpu", "bfloat16", None)
    if cluster.launcher != "local":
        options = [option for each in cluster.slurm.values() for option in each]
        is_stated = bool(cluster.num_gpus) or any(map(_ASKS_FOR_GPUS.match, options))
        return Devices("cuda" if is_stated else "cpu", "bfloat16", None)
    usable = [gpu for gpu in gpus.usable if not is_too_old(gpu)]
    num_gpus = len(usable) if cluster.num_gpus is None else cluster.num_gpus
    dtype = "bfloat16" if all(map(has_bfloat16, usable)) else "float32"
    return Devices("cuda" if num_gpus else "cpu", dtype, num_gpus)


def is_too_old(gpu: Gpu) -> bool:
    return gpu.capability is not None and gpu.capability < OLDEST_CAPABILITY


def has_bfloat16(gpu: Gpu) -> bool:
    return gpu.capability is None or gpu.capability >= BFLOAT16_CAPABILITY


def with_devices(recipe: Any) -> Any:
    """Return a recipe's table with values instead of `auto`.

    A table that validation will refuse is returned as it is.
    """
    if not isinstance(recipe, dict):
        return recipe
    sections = {name: _settings_in(recipe.get(name, {})) for name in SECTIONS}
    if all(given is None or {"device", "dtype"} <= given.keys() for given in sections.values()):
        return recipe
    try:
        cluster = ClusterSettings.model_validate(recipe.get("cluster", {}))
    except ValidationError:
        return recipe
    devices = devices_of(recipe.get("model", TINY_MODELS[0]), cluster, machine.gpus_here())
    for name, given in sections.items():
        if given is not None:
            device = given.get("device", devices.device)
            values = {"device": device, "dtype": devices.dtype_on(device), **given}
            recipe = {**recipe, name: _with(recipe.get(name, {}), values)}
    is_one_worker_each = cluster.num_trainers == cluster.num_generators == 1
    if not cluster.has_one_gpu and devices.num_gpus == 1 and is_one_worker_each:
        cluster = cluster.model_copy(update={"num_gpus": 1})
    return _sharing(recipe, cluster)


def _sharing(recipe: dict[str, Any], cluster: ClusterSettings) -> dict[str, Any]:
    """Return the table with the settings of a trainer and a generator that share one GPU."""
    trainer, generation = (_settings_in(recipe.get(name)) or {} for name in SECTIONS)
    vllm = _settings_in(generation.get("vllm", {}))
    on_gpu = trainer.get("device") == generation.get("device") == "cuda"
    if not (on_gpu and cluster.has_one_gpu and vllm is not None):
        return recipe
    if vllm.get("tensor_parallel_size", 1) != 1:
        return recipe
    engine = generation.get("engine", AUTO)
    share = SHARED_MEMORY.get(recipe.get("schedule", "async"))
    if share and (engine == "vllm" or (engine == AUTO and support.installed_vllm("cuda"))):
        values = {"vllm": {"gpu_memory_utilization": share, **vllm}}
        recipe = {**recipe, "generation": _with(recipe["generation"], values)}
    return {**recipe, "cluster": _with(recipe.get("cluster", {}), {"num_gpus": 1})}


def _settings_in(section: Any) -> dict[str, Any] | None:
    """Return what a section sets, without `auto` for a device or a data type; None: no section."""
    if isinstance(section, BaseModel):
        section = {name: getattr(section, name) for name in section.model_fields_set}
    if not isinstance(section, dict):
        return None
    is_auto = {"device", "dtype"} & {name for name, value in section.items() if value == AUTO}
    return {name: value for name, value in section.items() if name not in is_auto}


def _with(section: Any, values: dict[str, Any]) -> Any:
    if isinstance(section, BaseModel):
        return type(section).model_validate({**dict(section), **values})
    return {**section, **values}
