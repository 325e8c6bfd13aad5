"""vLLM's weight transfer: the engine that each of its workers has.

vLLM's `update_weights` blocks its worker, and what waits for a network there stops generation. So
weights arrive in main memory before, beside decoding.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.distributed import weight_transfer as vllm_transfer
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from areal_flow.policy.weights.shared_memory import map_tensors

BACKEND = "areal_flow"


class RegistersTransfer:
    """The worker's extension: for it each process of a split model imports this module."""


class TransferEngine(vllm_transfer.WeightTransferEngine[Any, Any]):
    """Loads a checkpoint's tensors into the model. After an error the model is half new."""

    init_info_cls = update_info_cls = SimpleNamespace

    def init_transfer_engine(self, init_info: Any) -> None:
        """Do nothing: weights come from this machine's memory."""

    def start_weight_update(self) -> None:
        self._names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        reload.initialize_layerwise_reload(self.model)
        for module in self.model.modules():
            if not module._parameters and module._non_persistent_buffers_set.issuperset(
                module._buffers
            ):
                # What it has is computed, such as sines of positions, and stays. No checkpoint has
                # it, so vLLM would warn that nothing was loaded.
                get_layerwise_info(module).load_numel_total = 0

    def receive_weights(self, update_info: Any) -> None:
        """Take `tensors`, as a mapping or as a file in memory.

        `tied` has further names, each with the one that it shares a tensor with: on the CPU vLLM
        has a packed copy of a tied head, which it would not change with the embedding.
        """
        tensors, tied = update_info.tensors, update_info.tied
        if isinstance(tensors, str):
            tensors = map_tensors(Path(tensors))
        names = {name: source for name, source in tied.items() if name in self._names}
        copies = {name: tensors[source] for name, source in names.items() if source in tensors}
        self.model.load_weights([*tensors.items(), *copies.items()])

    def finish_weight_update(self) -> None:
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: no connection is open."""


vllm_transfer.WeightTransferEngineFactory.register_engine(BACKEND, TransferEngine)
