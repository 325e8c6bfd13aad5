"""vLLM's core, in this process or its own: how it is made, called, watched, updated and ended.

Requests are handled in `engine`. Only this module uses what vLLM does not promise. If the core has
its own process:

| who                      | waits for  | unblocked by                                     |
|--------------------------|------------|--------------------------------------------------|
| `get_output`, `call`     | the core   | its answer, or a thread here that sees it die    |
| a thread of the core     | its parent | the parent's end, of any kind: it kills the core |
| ranks of a split model   | the core   | the core's end, by vLLM                          |

A process that imports this module can only generate: vLLM seeds torch's global generator and makes
`torch.set_num_threads` do nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import cache
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch._dynamo
from torch import Tensor

from areal_flow.core.errors import ConfigError, EngineError
from areal_flow.core.machine import usable_bytes
from areal_flow.policy.models.lora import adapter_rank
from areal_flow.policy.weights.device_copies import on_device
from areal_flow.policy.weights.tensor_file import (
    SharedFile,
    read_shared_files,
    shared_files,
    write_tensors,
)
from areal_flow.rollout.engines.pages import CACHE_SHARE
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.vllm.parent_watch import end_with_parent
from areal_flow.rollout.engines.vllm.support import (
    BLOCK_TOKENS,
    VERSION,
    engine_arguments,
    environment,
)

end_with_parent()  # first, in a core process, which imports this module for its executor

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # `CoreProcess` asks for it
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a worker has threads, which a fork would break
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers share cores
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Read by vLLM when it is imported; it has no other setting for them."""

os.environ.update(ENVIRONMENT)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault(
    "VLLM_CACHE_ROOT", str(Path(tempfile.gettempdir()) / f"areal-flow-vllm-{os.getuid()}")
)
warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")

from vllm import EngineArgs, LLMEngine, SamplingParams  # noqa: E402
from vllm.config import VllmConfig, WeightTransferConfig  # noqa: E402
from vllm.distributed import weight_transfer as vllm_transfer  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.model_executor.layers import rotary_embedding  # noqa: E402
from vllm.model_executor.model_loader import reload  # noqa: E402
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info  # noqa: E402
from vllm.model_executor.models.transformers import base as transformers_models  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs  # noqa: E402
from vllm.v1.engine.core_client import SyncMPClient  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError  # noqa: E402
from vllm.v1.executor import Executor  # noqa: E402
from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: E402
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: E402
from vllm.v1.sample import rejection_sampler  # noqa: E402
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p  # noqa: E402
from vllm.v1.serial_utils import MsgpackDecoder  # noqa: E402

TRANSFER_BACKEND = "areal_flow"

END_TIMEOUT_S = 2.0
"""How long a core process may take to end before it is killed: it has nothing to save."""


class InProcessCore:
    def __init__(self, config: VllmConfig) -> None:
        _adapt_to_cpu(config)
        self.llm = LLMEngine(config, Executor.get_class(config), log_stats=False)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.llm.engine_core.engine_core, method)(*arguments)

    @contextmanager
    def offered(
        self, checkpoint: Mapping[str, Tensor], source: Mapping[str, Tensor]
    ) -> Iterator[Mapping[str, Tensor]]:
        yield checkpoint

    def close(self) -> None: ...


class CoreProcess:
    """A core in its own process, which steps for as long as it has requests."""

    def __init__(self, config: VllmConfig) -> None:
        is_split = config.parallel_config.world_size > 1
        executor = SplitExecutor if is_split else SingleExecutor
        try:
            self.llm = LLMEngine(config, executor, log_stats=False, multiprocess_mode=True)
        except RuntimeError as error:
            raise EngineError(f"vLLM's core process did not start: {error}") from error
        skip_unused_arrays(self.llm.engine_core.decoder)
        watch = threading.Thread(target=_fail_when_dead, args=(self.llm.engine_core,), daemon=True)
        watch.start()

    def call(self, method: str, *arguments: Any) -> Any:
        """Run a method of vLLM's `EngineCore` between two of its steps; raises what that raised."""
        return self.llm.engine_core.call_utility(method, *arguments)

    def offered(
        self, checkpoint: Mapping[str, Tensor], source: Mapping[str, Tensor]
    ) -> AbstractContextManager[Sequence[SharedFile]]:
        """Return files in memory with the tensors, which remain during the block."""
        return shared_files(checkpoint, source)

    def close(self) -> None:
        self.llm.engine_core.shutdown(timeout=END_TIMEOUT_S)


VLLMCore = InProcessCore | CoreProcess


def submit(
    llm: LLMEngine,
    name: str,
    prompt: Any,
    parameters: SamplingParams,
    *,
    adapter: LoRARequest | None = None,
) -> str:
    """Add a request to vLLM's core; return its id there, which vLLM makes unique.

    `LLMEngine.add_request` would also register it with vLLM's `OutputProcessor`, which makes
    several objects per token. Outputs are read from `get_output` instead.
    """
    tasks = llm.get_supported_tasks()
    request = llm.input_processor.process_inputs(
        name, prompt, parameters, supported_tasks=tasks, lora_request=adapter
    )
    llm.input_processor.assign_request_id(request)
    llm.engine_core.add_request(request)
    request_id: str = request.request_id
    return request_id


class SampledLogprobs(NamedTuple):
    """`LogprobsLists` of vLLM, with one of its arrays decoded."""

    logprob_token_ids: msgspec.Raw
    logprobs: np.ndarray
    sampled_token_ranks: msgspec.Raw
    cu_num_generated_tokens: msgspec.Raw


class SampledOutput(EngineCoreOutput):
    new_logprobs: SampledLogprobs | None = None


class SampledOutputs(EngineCoreOutputs):
    outputs: list[SampledOutput] = msgspec.field(default_factory=list)


def skip_unused_arrays(decoder: MsgpackDecoder) -> None:
    """Make the decoder of a core process's messages leave out arrays that no completion needs."""
    hooks = {"ext_hook": decoder.ext_hook, "dec_hook": decoder.dec_hook}
    decoder.decoder = msgspec.msgpack.Decoder(SampledOutputs, **hooks)


def _fail_when_dead(client: SyncMPClient) -> None:
    """Wait for a core process to end, then fail the calls that wait for it.

    vLLM itself fails only later calls.
    """
    connection.wait(client.resources.engine_manager.sentinels())
    client.resources.engine_dead = True  # first, so that no new call waits
    dead = EngineDeadError()
    client.outputs_queue.put(dead)
    for answer in list(client.utility_results.values()):
        if not answer.done():
            answer.set_exception(dead)


class SingleExecutor(UniProcExecutor):
    def _init_executor(self) -> None:
        _adapt_to_cpu(self.vllm_config)
        super()._init_executor()


class SplitExecutor(MultiprocExecutor):
    """Runs each rank of a split model in a process, which vLLM ends with the core's."""


def _adapt_to_cpu(config: VllmConfig) -> None:
    """Do without compiled C++ on a CPU, and repair its speculative decoding.

    Compiling would delay the first step by half a minute. vLLM also changes classes of transformers
    in place for it, and then building a policy of such a class, which checks weights, would fail.
    """
    if config.device_config.device_type == "cpu":
        torch._dynamo.config.disable = True
        transformers_models.Base._decorate_cls_for_torch_compile = lambda *_, **__: None
        # vLLM's kernel for the first writes float32 nowhere, so temperatures would be random; the
        # second fails where no token is proposed.
        rejection_sampler.expand_batch_to_tokens = _repeat_for_drafts
        rejection_sampler.apply_top_k_top_p = lambda logits, k, p: (
            apply_top_k_top_p(logits, k, p) if len(logits) else logits
        )
        # Once a process: it looks at all objects of all modules, and fails at those of Numba, which
        # `ngram` loads.
        register = current_platform.register_triton_kernel_overrides
        current_platform.register_triton_kernel_overrides = cache(register)


def _repeat_for_drafts(
    values: Tensor, ends: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return each request's value, such as a temperature, once for each of its proposed tokens."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    chosen = values.where(values != replace_from, replace_to)
    return chosen.repeat_interleave(counts, output_size=num_tokens)


def engine_config(model: Path, settings: GenerationSettings, *, lora_rank: int = 0) -> VllmConfig:
    """Return vLLM's own settings for a model directory, with random weights."""
    os.environ.update(environment(settings))
    # Engines of a process share these modules. An engine that broke in an update left them half
    # loaded, and the next engine's log-probabilities differed by 0.005.
    rotary_embedding._ROPE_DICT.clear()
    unknown = settings.vllm.engine_args.keys() - {each.name for each in fields(EngineArgs)}
    if unknown:
        raise ConfigError(
            f"generation.vllm.engine_args: vLLM {VERSION} has no {', '.join(sorted(unknown))}"
        )
    arguments = EngineArgs(
        **engine_arguments(model, settings, lora_rank=lora_rank),
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER_BACKEND),
        worker_extension_cls=f"{RegistersTransfer.__module__}.{RegistersTransfer.__name__}",
    )
    config = arguments.create_engine_config(UsageContext.LLM_CLASS)
    if settings.device == "cpu" or settings.kv_cache_tokens:
        # By default vLLM takes nearly all of the machine's memory.
        config.cache_config.kv_cache_memory_bytes = _cache_bytes(config, settings)
    return config


def _cache_bytes(config: VllmConfig, settings: GenerationSettings) -> int:
    model, parallel = config.model_config, config.parallel_config
    num_heads = model.get_num_layers(parallel) * model.get_num_kv_heads(parallel)
    token_bytes: int = 2 * num_heads * model.get_head_size() * model.dtype.itemsize
    block_bytes = BLOCK_TOKENS * token_bytes
    room = CACHE_SHARE * usable_bytes() // block_bytes
    return (settings.num_pages(BLOCK_TOKENS, room=room) + 1) * block_bytes  # vLLM keeps the first


class RegistersTransfer:
    """The worker extension, through which each process of a split model imports this module."""

    def unused_adapter_modules(self) -> list[str]:
        """Return the matrices of the policy's adapter that vLLM does not have by these names."""
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        adapter = manager.get_adapter(POLICY_ADAPTER.lora_int_id)
        return sorted(adapter.loras.keys() - manager.modules.keys())


POLICY_ADAPTER = LoRARequest("policy", 1, "policy")
"""What a request to an engine with an adapter carries; all its versions have one name and slot."""


@contextmanager
def offered_adapter(adapter: Mapping[str, Tensor]) -> Iterator[LoRARequest]:
    """Yield what makes vLLM load a scaled adapter in place of its last version."""
    rank = adapter_rank(adapter)
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in adapter}
    description = {"r": rank, "lora_alpha": rank, "target_modules": sorted(modules)}
    with TemporaryDirectory(prefix="areal-flow-adapter-") as directory:
        (Path(directory) / "adapter_config.json").write_text(json.dumps(description))
        with (Path(directory) / "adapter_model.safetensors").open("wb") as file:
            write_tensors(adapter.items(), file, like=adapter)
        adapter_id = POLICY_ADAPTER.lora_int_id
        yield LoRARequest(POLICY_ADAPTER.lora_name, adapter_id, directory, load_inplace=True)


class TransferEngine(vllm_transfer.WeightTransferEngine[Any, Any]):
    """Loads a checkpoint's tensors into a worker's model, which an error leaves half new.

    `update_weights` blocks the worker, so waiting for a network there would stop generation.
    Therefore weights arrive in main memory before, while decoding continues.
    """

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
                # Its buffers are computed, such as sines of positions, and stay. No checkpoint has
                # them, so vLLM would warn that nothing was loaded.
                get_layerwise_info(module).load_numel_total = 0

    def receive_weights(self, update_info: Any) -> None:
        """Take `tensors`, as a mapping or as files in memory.

        A GPU gets them as copies of its own: copying them from pages that are not pinned, tensor
        by tensor, would take several times as long.

        `tied` maps further names to those that they share a tensor with: on the CPU vLLM has a
        packed copy of a tied head, which loading the embedding would not change.
        """
        tensors, tied = update_info.tensors, update_info.tied
        if not isinstance(tensors, Mapping):
            tensors = read_shared_files(tensors)
        names = {name: source for name, source in tied.items() if name in self._names}
        copies = {name: tensors[source] for name, source in names.items() if source in tensors}
        named = [*tensors.items(), *copies.items()]
        on_gpu = self.device.type == "cuda"
        self.model.load_weights(on_device(named, self.device) if on_gpu else named)

    def finish_weight_update(self) -> None:
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: no connection is open."""


vllm_transfer.WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, TransferEngine)
