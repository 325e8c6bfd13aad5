"""The internals of vLLM that this project uses; these tests notice first when they change."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm import LLMEngine
from vllm.config import VllmConfig
from vllm.config.lora import MaxLoRARanks
from vllm.distributed.weight_transfer import WeightTransferEngine
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers import logits_processor, rotary_embedding
from vllm.model_executor.models.transformers.base import Base
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason, UtilityOutput
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import InprocClient, SyncMPClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult
from vllm.v1.worker.gpu_worker import Worker

from areal_flow.rollout.engines.protocol import LORA_RANKS
from areal_flow.rollout.engines.vllm.core import SampledLogprobs, skip_unused_arrays
from tests.engines import shared_core
from tests.vllm.models import Operators, logits_of_vllm


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (EngineCore.pause_scheduler, ["mode", "clear_cache"]),
        (EngineCoreProc.pause_scheduler, ["mode", "clear_cache"]),
        (EngineCore.resume_scheduler, []),
        (EngineCore.set_weight_version, ["weight_version"]),
        (EngineCore.collective_rpc, ["method", "timeout", "args", "kwargs"]),
        (Worker.start_weight_update, []),
        (Worker.update_weights, ["update_info"]),
        (Worker.finish_weight_update, []),
        (WeightTransferEngine.__init__, ["config", "vllm_config", "device", "model"]),
        (SyncMPClient.call_utility, ["method", "args"]),
        (SyncMPClient.shutdown, ["timeout"]),
        (SyncMPClient.abort_requests, ["request_ids"]),
        (InprocClient.abort_requests, ["request_ids"]),
        (SyncMPClient.get_output, []),
        (InprocClient.get_output, []),
        (
            InputProcessor.process_inputs,
            ["request_id", "prompt", "params", "supported_tasks", "arrival_time", "lora_request"],
        ),
        (LLMEngine.__init__, ["vllm_config", "executor_class", "log_stats"]),
        (CoreEngineProcManager.sentinels, []),
        (UniProcExecutor._init_executor, []),
        (Base._decorate_cls_for_torch_compile, []),
    ],
    ids=lambda each: each.__qualname__ if callable(each) else "",
)
def test_vllm_methods_accept_our_arguments(method: Any, parameters: list[str]) -> None:
    parameter_names = [*inspect.signature(method).parameters]
    assert parameter_names[1 : 1 + len(parameters)] == parameters


def test_pause_of_a_core_process_waits_for_steps_in_flight() -> None:
    """What makes asynchronous scheduling right: the pause ends when no batch is queued."""
    assert "has_work" in inspect.getsource(EngineCoreProc._pause_complete)
    assert "batch_queue" in inspect.getsource(EngineCoreProc.has_work)


def test_vllm_attributes_exist_where_this_project_reads_them() -> None:
    core, _ = shared_core()
    assert isinstance(core.llm.engine_core, InprocClient)
    assert isinstance(core.llm.engine_core.engine_core, EngineCore)
    assert isinstance(core.llm.input_processor, InputProcessor)
    assert isinstance(rotary_embedding._ROPE_DICT, dict)
    assert "max_concurrent_batches" in dir(VllmConfig)
    source = inspect.getsource(SyncMPClient)
    assert all(name in source for name in ("engine_dead", "outputs_queue", "utility_results"))
    assert "decoder.decode(" in source


def test_decoder_without_unused_arrays_keeps_all_that_completions_need() -> None:
    logprobs = LogprobsLists(np.array([[7], [8]]), np.float32([[-0.1], [-0.2]]), np.array([3, 4]))
    assert LogprobsLists._fields == SampledLogprobs._fields
    outputs = [
        EngineCoreOutput("a", [7, 8], logprobs, finish_reason=FinishReason.LENGTH),
        EngineCoreOutput("b", [9], logprobs.slice_request(1, 1)),
        EngineCoreOutput("c", []),
    ]
    sent = EngineCoreOutputs(outputs=outputs, weight_version="5", engine_index=2)
    decoder = MsgpackDecoder(EngineCoreOutputs)
    skip_unused_arrays(decoder)
    received = decoder.decode(MsgpackEncoder().encode(sent))
    assert (received.weight_version, received.engine_index) == ("5", 2)
    for output, original in zip(received.outputs, outputs, strict=True):
        assert output.request_id == original.request_id
        assert output.new_token_ids == original.new_token_ids
        assert output.finish_reason == original.finish_reason
        if original.new_logprobs:
            assert output.new_logprobs.logprobs.dtype == np.float32
            assert np.array_equal(output.new_logprobs.logprobs, original.new_logprobs.logprobs)
    answer = EngineCoreOutputs(utility_output=UtilityOutput(3, None, UtilityResult([1, "x"])))
    received = decoder.decode(MsgpackEncoder().encode(answer))
    assert (received.outputs, received.utility_output.result.result) == ([], [1, "x"])


def test_ranks_and_names_of_adapters_are_those_of_vllm() -> None:
    assert get_args(MaxLoRARanks) == LORA_RANKS
    assert [*inspect.signature(EngineCore.add_lora).parameters] == ["self", "lora_request"]
    assert {"lora_name", "lora_int_id", "lora_path", "load_inplace"} <= {
        *LoRARequest.__annotations__
    }


def test_float32_head_on_a_gpu_is_a_product_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """With neither a float32 copy of the weights nor a float32 product, which would be slow."""
    monkeypatch.setattr(logits_processor.current_platform, "is_cuda", lambda: True)
    with FakeTensorMode(), Operators() as operators:
        hidden_TH = torch.empty(3, 64, dtype=torch.bfloat16, device="cuda")
        weight_VH = torch.empty(96, 64, dtype=torch.bfloat16, device="cuda")
        operators.names.clear()
        logits_TV = logits_of_vllm(hidden_TH, weight_VH)
    assert (logits_TV.dtype, logits_TV.shape) == (torch.float32, (3, 96))
    assert operators.names.count("aten.mm.dtype") == 1
    assert not any("copy" in name or "linear" in name for name in operators.names)
