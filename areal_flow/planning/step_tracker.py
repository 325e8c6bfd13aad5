"""torch's tracker of memory, for several passes of a policy, with a peak for each stretch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.weak import WeakIdKeyDictionary

from areal_flow.models.policy import layers_of
from areal_flow.planning.depth import Bytes, StepTrace, Stretch, stretches_of

_KINDS = {
    "Parameter": "parameters",
    "Buffer": "parameters",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Other": "activations",
    "Temp": "temporaries",
}
"""What torch's tracker calls each kind, and what it is called here."""


class StepTracker(MemTracker):  # type: ignore[no-untyped-call]
    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self._indices: Any = WeakIdKeyDictionary()
        for layers in map(layers_of, models):
            for index, layer in enumerate(layers):
                self._indices[layer] = stretches_of(index, len(layers))
        self._num_before: Counter[tuple[str, int]] = Counter()
        self._here = [("begin", 0, 0)]
        self._peaks: dict[Stretch, Bytes] = {}

    def trace(self) -> StepTrace:
        peak = _by_kind(self.get_tracker_snapshot("peak"))
        return StepTrace(peak, _by_kind(self.get_tracker_snapshot("current")), self._peaks)

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        self._begin("forward", module)
        if not self._mod_tracker.is_bw:
            self.memory_tracking.pop(module, None)  # type: ignore[no-untyped-call]
        super()._pre_fw_hook(module, inputs)

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._begin("after forward", module)
        super()._post_fw_hook(module, inputs, outputs)

    def _pre_bw_hook(self, module: nn.Module | None, args: Any) -> None:
        self._begin("backward", module)

    def _post_bw_hook(self, module: nn.Module | None, args: Any) -> None:
        self._begin("after backward", module)

    def _begin(self, where: str, module: nn.Module | None) -> None:
        if module is None or module not in self._indices:
            return
        self._here = []
        for index in self._indices[module]:
            self._here.append((where, index, self._num_before[where, index]))
            self._num_before[where, index] += 1

    def _track_module_params_and_buffers(
        self, module: nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        """Leave out hooks of gradients where a parameter is frozen: it takes none."""
        have_gradients = all(each.requires_grad for each in module.parameters())
        return super()._track_module_params_and_buffers(
            module, install_grad_hooks and have_gradients
        )

    def _update_peak_stats(self, peak_state: Any) -> None:
        """Leave out each module's own peaks, which take four fifths of the time."""
        modules, self.memory_tracking = self.memory_tracking, WeakIdKeyDictionary()
        super()._update_peak_stats(peak_state)
        self.memory_tracking = modules
        found = _by_kind(self._curr_mem_snap)
        for place in self._here:
            stretch = (*place, self._in_opt)
            if sum(found.values()) > sum(self._peaks.get(stretch, {}).values()):
                self._peaks[stretch] = found


def _by_kind(snapshots: Mapping[Any, Mapping[Any, int]]) -> Bytes:
    found: Counter[str] = Counter(dict.fromkeys(_KINDS.values(), 0))
    for snapshot in snapshots.values():
        for kind, name in _KINDS.items():
            found[name] += snapshot.get(kind, 0)
    return dict(found)
