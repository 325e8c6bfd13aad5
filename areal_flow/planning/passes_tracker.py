"""torch's tracker of memory, for policies that make several passes."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.weak import WeakIdKeyDictionary


class PassesTracker(MemTracker):  # type: ignore[no-untyped-call]
    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if not self._mod_tracker.is_bw:
            self.memory_tracking.pop(module, None)  # type: ignore[no-untyped-call]
        super()._pre_fw_hook(module, inputs)

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
