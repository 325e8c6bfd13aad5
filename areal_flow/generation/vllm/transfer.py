"""vLLM's weight transfer: the engine that each of its workers has, and the trainer between cards.

vLLM's `update_weights` blocks its worker, and what waits for a network there stops generation. So
weights arrive in main memory before, beside decoding. Only from card to card they are received in
the worker, by vLLM's own engine ("nccl", "ipc"), and their hash is compared. That has not been run
on a card yet. A thread of the trainer sends; it waits for generators that have asked, and is
unblocked by their end of the transfer, or by another thread that aborts it.
"""

from __future__ import annotations

import logging
import pickle
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from vllm.config import WeightTransferConfig
from vllm.distributed import weight_transfer as vllm_transfer
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from areal_flow.errors import WeightsError
from areal_flow.generation.vllm.weights import ServedTensors
from areal_flow.models.hashing import TensorHash, hash_tensors
from areal_flow.weights.card_transfer import TRANSFER_TIMEOUT_S, StoreClient
from areal_flow.weights.gloo import first_line
from areal_flow.weights.shared_memory import map_tensors

logger = logging.getLogger(__name__)

BACKEND = "areal_flow"
DEVICE = "cuda"
"""Where a trainer sends from."""


class RegistersTransfer:
    """The worker's extension: for it each process of a split model imports this module."""


class TransferEngine(vllm_transfer.WeightTransferEngine[Any, Any]):
    """Loads a checkpoint's tensors into the model. After an error the model is half new."""

    init_info_cls = update_info_cls = SimpleNamespace
    _by_card: Any = None
    """vLLM's engine that receives the next update."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Take a `CardTransfer.message`, and the rank of this generator among the readers."""
        carrier, own_info = pickle.loads(init_info.message)
        if "rank_offset" in own_info:  # the first generator's
            own_info["rank_offset"] += (init_info.rank - 1) * self.parallel_config.world_size
        config = WeightTransferConfig(backend=carrier)
        make = vllm_transfer.WeightTransferEngineFactory.create_engine
        self._by_card = make(config, self.vllm_config, self.device, self.model)
        self._by_card.init_transfer_engine(self._by_card.parse_init_info(own_info))

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
        """Take a `CardTransfer.message`; or `tensors`, as a mapping or as a file in memory.

        `tied` has further names, each with the one that it shares a tensor with: on the CPU vLLM
        has a packed copy of a tied head, which it would not change with the embedding.
        """
        self._tied = update_info.tied
        if self._by_card:
            self._receive_by_card(*pickle.loads(update_info.message))
        elif isinstance(found := update_info.tensors, str):
            self._load(map_tensors(Path(found)))
        else:
            self._load(found)

    def finish_weight_update(self) -> None:
        reload.finalize_layerwise_reload(self.model, self.model_config)
        self.shutdown()

    def shutdown(self) -> None:
        if self._by_card:
            self._by_card.shutdown()
        self._by_card = None

    def _load(self, tensors: Mapping[str, Tensor]) -> Any:
        names = {n: source for n, source in self._tied.items() if n in self._names}
        copies = {name: tensors[source] for name, source in names.items() if source in tensors}
        return self.model.load_weights([*tensors.items(), *copies.items()])

    def _receive_by_card(self, expected: str, own_info: dict[str, Any]) -> None:
        content = TensorHash()

        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> Any:
            tensors = dict(weights)
            for name, tensor in tensors.items():
                content.add(name, tensor.cpu().contiguous())
            return self._load(tensors)

        self._by_card.model = SimpleNamespace(load_weights=load_weights)
        self._by_card.update_weights(own_info)
        if (found := content.hexdigest()) != expected:
            raise WeightsError(f"expected weights with hash {expected} by card, found {found}")


vllm_transfer.WeightTransferEngineFactory.register_engine(BACKEND, TransferEngine)


class StagedSource(vllm_transfer.WeightSource):
    """Tensors in main memory, which go up to the card one at a time."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = [(name, tensors[name]) for name in sorted(tensors)]

    def metadata(self) -> list[vllm_transfer.ParamMeta]:
        meta = vllm_transfer.ParamMeta
        return [meta(name, t.dtype, tuple(t.shape)) for name, t in self._tensors]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.to(DEVICE)) for name, tensor in self._tensors)


def send_between_cards(
    tensors: Mapping[str, Tensor], model: Path, client: StoreClient, *, host: str
) -> None:
    """Begin to send a policy's tensors to the generators of a client."""
    checkpoint = ServedTensors(model).checkpoint(tensors)
    client.content_hash = hash_tensors(checkpoint)
    num_ranks = 1 + client.num_readers * client.num_workers
    info, source = init_info(client.carrier, host, num_ranks), StagedSource(checkpoint)

    def send() -> None:
        make = vllm_transfer.WeightTransferTrainerFactory.trainer_init
        engine = make(info, client=client, source=source)
        abort = threading.Timer(TRANSFER_TIMEOUT_S, engine.shutdown)
        abort.daemon = True
        abort.start()
        try:
            engine.send_weights()
        except RuntimeError as error:
            logger.warning("a generator left while weights went to its card: %s", first_line(error))
        finally:
            abort.cancel()
            engine.shutdown()

    threading.Thread(target=send, daemon=True).start()


def init_info(carrier: str, host: str, num_ranks: int) -> Any:
    if carrier == "ipc":
        return IPCTrainerInitInfo(rank=0)
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
    return NCCLTrainerInitInfo(host, port, num_ranks, rank=0)
