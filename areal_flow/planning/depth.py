"""Memory of a policy of many layers that are alike, from two policies of few of them.

From depth four on the second and the last but one have neighbours as all between them have, whose
weights are gathered ahead. From then on each byte count follows a line in the number of layers: at
each of the first two layers, of the last two, and outside layers. In between it follows a line from
layer to layer, so the largest is at an end of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from areal_flow.models.policy import layers_of, policy_from_config

Bytes = Mapping[str, int]
"""By kind."""
Stretch = tuple[str, int, int, bool]
"""Of a step, from a layer's begin or end to the next one's: which of them, the layer as an index
from the first (0, 1) or the last (-1, -2), how often it was there before, and whether the optimizer
steps."""

FEW, MORE = 4, 5


@dataclass(frozen=True, slots=True)
class StepTrace:
    peak: Bytes
    kept: Bytes
    """After the step."""
    peaks: Mapping[Stretch, Bytes]


def trace_of(config: Any, trace: Callable[[Any], StepTrace]) -> StepTrace:
    """Return a policy's trace: of two shallow policies, or where layers differ its own."""
    depth = config.get_text_config().num_hidden_layers
    if depth <= MORE or not _layers_are_alike(config):
        return trace(config)
    few, more = (trace(_with_layers(config, num)) for num in (FEW, MORE))
    if few.peaks.keys() != more.peaks.keys():
        return trace(config)

    def at_depth(here: Bytes, there: Bytes) -> Bytes:
        return {kind: num + (depth - MORE) * (num - here[kind]) for kind, num in there.items()}

    peaks = {stretch: at_depth(few.peaks[stretch], more.peaks[stretch]) for stretch in more.peaks}
    peak = max(peaks.values(), key=lambda by_kind: sum(by_kind.values()))
    return StepTrace(peak, at_depth(few.kept, more.kept), peaks)


def stretches_of(index: int, num_layers: int) -> list[int]:
    """Return a layer as an index from the first one, from the last one, or both."""
    return [each for each in (index, index - num_layers) if -2 <= each <= 1]


def _layers_are_alike(config: Any) -> bool:
    with torch.device("meta"):
        layers = layers_of(policy_from_config(config, device="meta"))
    kinds = {(type(each), *((n, p.shape) for n, p in each.named_parameters())) for each in layers}
    by_layer = _by_layer(config.get_text_config())
    return len(kinds) == 1 and all(each == [each[0]] * len(each) for each in by_layer.values())


def _with_layers(config: Any, num_layers: int) -> Any:
    changed = deepcopy(config)
    text = changed.get_text_config()
    for name, values in _by_layer(text).items():
        setattr(text, name, values[:num_layers])
    text.num_hidden_layers = num_layers
    return changed


def _by_layer(text: Any) -> dict[str, list[Any]]:
    """Return settings that have a value for each layer."""
    depth = text.num_hidden_layers
    return {n: v for n, v in text.to_dict().items() if isinstance(v, list) and len(v) == depth}
