"""vLLM's core, in this process or in one of its own: how it is made, called, watched and ended.

It does not know requests; see `engine`. What vLLM does not promise is used here alone. Of a core in
a process of its own:

| who                      | waits for  | unblocked by                                     |
|--------------------------|------------|--------------------------------------------------|
| `LLMEngine.step`, `call` | the core   | its answer, or a thread here that finds it dead  |
| a thread of the core     | its parent | the parent's end, of any kind: it kills the core |
| ranks of a split model   | the core   | the core's end, by vLLM                          |

Whoever imports this module gets a process for generation alone: vLLM seeds torch's global
generator and makes `torch.set_num_threads` do nothing.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from areal_flow.core.errors import EngineError
from areal_flow.core.machine import usable_bytes
from areal_flow.policy.models.huggingface import TokenizersBackend
from areal_flow.policy.tokenizer.directory import tokenizer_of
from areal_flow.policy.weights.tensor_file import write_tensors
from areal_flow.rollout.engines.pages import CACHE_SHARE
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.vllm.parent_watch import end_with_parent
from areal_flow.rollout.engines.vllm.support import BLOCK_TOKENS, engine_arguments, environment

end_with_parent()  # a core process, which imports this for its executor, before all else

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a core has a process of its own if we say so
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a worker has threads, which a fork would break
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers share cores
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""vLLM reads these when it is imported, and has no other setting for them."""

os.environ.update(ENVIRONMENT)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault(
    "VLLM_CACHE_ROOT", str(Path(tempfile.gettempdir()) / f"areal-flow-vllm-{os.getuid()}")
)
warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")

from vllm import EngineArgs, LLMEngine  # noqa: E402
from vllm.config import VllmConfig, WeightTransferConfig  # noqa: E402
from vllm.model_executor.layers import rotary_embedding  # noqa: E402
from vllm.model_executor.models.transformers import base as transformers_models  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.v1.engine.core_client import SyncMPClient  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError  # noqa: E402
from vllm.v1.executor import Executor  # noqa: E402
from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: E402
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: E402

from areal_flow.rollout.engines.vllm.transfer import BACKEND, RegistersTransfer  # noqa: E402

END_TIMEOUT_S = 2.0
"""How long a core process may take to end before it is killed: it has nothing to save."""


class InProcessCore:
    def __init__(self, config: VllmConfig) -> None:
        _compile_nothing_on_cpu(config)
        self.llm = LLMEngine(config, Executor.get_class(config), log_stats=False)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.llm.engine_core.engine_core, method)(*arguments)

    @contextmanager
    def offered(self, checkpoint: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        yield checkpoint

    def close(self) -> None: ...


class CoreProcess:
    """A core in a process of its own, which steps for as long as it has requests."""

    def __init__(self, config: VllmConfig) -> None:
        is_split = config.parallel_config.world_size > 1
        executor = SplitExecutor if is_split else WholeExecutor
        try:
            self.llm = LLMEngine(config, executor, log_stats=False, multiprocess_mode=True)
        except RuntimeError as error:
            raise EngineError(f"vLLM's core process did not start: {error}") from error
        watch = threading.Thread(target=_fail_when_dead, args=(self.llm.engine_core,), daemon=True)
        watch.start()

    def call(self, method: str, *arguments: Any) -> Any:
        """Run a method of vLLM's `EngineCore` between two of its steps; raises what that raised."""
        return self.llm.engine_core.call_utility(method, *arguments)

    @contextmanager
    def offered(self, checkpoint: Mapping[str, Tensor]) -> Iterator[str]:
        """Yield a memory file of tensors, which ends with this process or with the block."""
        file = os.memfd_create("areal-flow-weights")
        try:
            path = Path(f"/proc/{os.getpid()}/fd/{file}")
            with path.open("wb") as segment:
                write_tensors(checkpoint.items(), segment, like=checkpoint)
            yield str(path)
        finally:
            os.close(file)

    def close(self) -> None:
        self.llm.engine_core.shutdown(timeout=END_TIMEOUT_S)


VLLMCore = InProcessCore | CoreProcess


def _fail_when_dead(client: SyncMPClient) -> None:
    """Have those fail that wait for a core process once it has ended.

    vLLM tells only those who call it later.
    """
    connection.wait(client.resources.engine_manager.sentinels())
    client.resources.engine_dead = True  # first, so that nobody begins to wait
    dead = EngineDeadError()
    client.outputs_queue.put(dead)
    for answer in list(client.utility_results.values()):
        if not answer.done():
            answer.set_exception(dead)


class WholeExecutor(UniProcExecutor):
    def _init_executor(self) -> None:
        _compile_nothing_on_cpu(self.vllm_config)
        super()._init_executor()


class SplitExecutor(MultiprocExecutor):
    """Runs each rank of a model that is split in a process, which vLLM ends with the core's."""


def _compile_nothing_on_cpu(config: VllmConfig) -> None:
    """Spare the first step a C++ compiler, and half a minute.

    For compilation vLLM changes classes of transformers in place, and a process that builds
    policies of such a class for itself, as ours does to check weights, then fails.
    """
    if config.device_config.device_type == "cpu":
        torch._dynamo.config.disable = True
        transformers_models.Base._decorate_cls_for_torch_compile = lambda *_, **__: None


def engine_config(model: Path, settings: GenerationSettings) -> VllmConfig:
    """Return vLLM's own settings for a model directory, with random weights."""
    os.environ.update(environment(settings))
    # Engines of a process share these modules. One that broke in an update left them half loaded,
    # and log-probabilities of the next one differed by 0.005.
    rotary_embedding._ROPE_DICT.clear()
    arguments = EngineArgs(
        **engine_arguments(model, settings),
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=f"{RegistersTransfer.__module__}.{RegistersTransfer.__name__}",
    )
    config = arguments.create_engine_config(UsageContext.LLM_CLASS)
    if settings.device == "cpu" or settings.kv_cache_tokens:
        # vLLM would take nearly all memory of the machine.
        config.cache_config.kv_cache_memory_bytes = _cache_bytes(config, settings)
    return config


def _cache_bytes(config: VllmConfig, settings: GenerationSettings) -> int:
    model, parallel = config.model_config, config.parallel_config
    num_heads = model.get_num_layers(parallel) * model.get_num_kv_heads(parallel)
    token_bytes: int = 2 * num_heads * model.get_head_size() * model.dtype.itemsize
    block_bytes = BLOCK_TOKENS * token_bytes
    room = CACHE_SHARE * usable_bytes() // block_bytes
    return (settings.num_pages(BLOCK_TOKENS, room=room) + 1) * block_bytes  # vLLM keeps the first


def find_stop_strings(llm: LLMEngine, model: Path) -> None:
    """Have vLLM decode with the model's own tokenizer.

    The one that it would choose itself adds tokens, and `min_tokens` holds those back, too.
    """
    llm.output_processor.tokenizer = TokenizersBackend(tokenizer_object=tokenizer_of(model))
