"""Which settings of a recorded step a replay may change: by their dotted names, and the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_flow.algorithms.registry import ALGORITHMS
from areal_flow.config import Recipe, load_recipe
from areal_flow.core.errors import ConfigError
from areal_flow.core.settings import flatten, parse_overrides
from areal_flow.policy.settings import LoraSettings
from areal_flow.training.settings import TrainerSettings

if TYPE_CHECKING:
    from areal_flow.algorithms.protocol import TokenLoss

WITHOUT_INFLUENCE = frozenset(
    {
        *("trainer.checkpoint_every_steps", "trainer.keep_checkpoints"),
        *("algorithm.group_filter", "algorithm.reference"),
        *(f"trainer.lora.{name}" for name in LoraSettings.model_fields),
    }
)
"""Settings that say what is kept of a step, which groups come to it or which weights the checkpoint
has that it begins with: not what it computes of them.

The reference is among them, since a replay reads the one that the run was prepared with.
"""


def settings_of_a_step() -> list[str]:
    algorithm = {f"algorithm.{name}": None for a in ALGORITHMS.values() for name in a.model_fields}
    trainer = flatten(TrainerSettings().model_dump(), "trainer.")
    names = [*algorithm, *trainer, "controller.max_staleness", "generation.temperature", "seed"]
    return [name for name in names if name not in WITHOUT_INFLUENCE]


def parse_changes(texts: Sequence[str]) -> dict[str, Any]:
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"--set {text}: expected SECTION.KEY=VALUE")
    return parse_overrides(texts)


def changed_recipe(config: Path, changes: Mapping[str, Any]) -> Recipe:
    recipe = load_recipe(config, dict(changes), spelling="--set {}")
    allowed = settings_of_a_step()
    idle = [name for name in flatten(changes) if name not in allowed]
    if idle:
        raise ConfigError(
            f"--set {', '.join(idle)}: cannot change what a step computes from its trajectories; "
            f"these can: {', '.join(allowed)}"
        )
    device = changes.get("trainer", {}).get("device", "cpu")
    if not device_is_here(device):
        raise ConfigError(f"--set trainer.device={device}: this machine has no such device")
    return recipe


def describe_changes(
    recorded: Recipe, changed: Recipe, *, loss: TokenLoss | None
) -> dict[str, tuple[Any, Any]]:
    before, after = flatten(recorded.model_dump()), flatten(changed.model_dump())
    changes = {
        name: (before.get(name), after.get(name))
        for name in settings_of_a_step()
        if before.get(name) != after.get(name)
    }
    if loss is not None:
        changes["loss"] = (recorded.algorithm.name, getattr(loss, "__name__", repr(loss)))
    return changes


def device_is_here(device: str) -> bool:
    if not device.startswith("cuda"):
        return True
    import torch  # seconds, which a setting that does not exist need not take

    return torch.cuda.is_available()


def on_this_machine(recipe: Recipe) -> Recipe:
    return recipe if device_is_here(recipe.trainer.device) else on_device(recipe, "cpu")


def on_device(recipe: Recipe, device: str) -> Recipe:
    trainer = recipe.trainer.model_copy(update={"device": device})
    return recipe.model_copy(update={"trainer": trainer})
