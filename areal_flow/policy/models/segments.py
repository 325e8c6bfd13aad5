"""Attention on a GPU: no scores in memory, no keys repeated for the heads that share them.

A segment is a run of queries that are the last tokens of a run of keys; each query sees itself and
the keys before it. Packed sequences, completions of a shared prompt and chunks after the tokens in
pages are all segments, side by side in one row of queries and one of keys.

Letters: N segments, Q queries of all segments, K keys of all segments, T tokens of a row, H heads,
G key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from areal_flow.algorithms.gather import GatherIndex, deterministic_gather
from areal_flow.policy.models.attention import AttentionRule, pass_dtype, to_device

BLOCK = 128
"""Number of queries, and of keys, that FlexAttention skips or computes together."""

FLEX_MIN_WIDTH = 16
"""Of heads; narrower ones are padded with zeros."""

FLEX_KERNEL = {"BACKEND": "TRITON"}
"""The kernel for few queries (`TRITON_DECODE`) has no configuration for float32."""

MAX_FLEX_GRAPHS = 64
"""With more graphs torch.compile gives up, and FlexAttention keeps all scores in memory."""

VARLEN_MAX_WIDTH = 256

CUDNN_MIN_TOKENS = 6_000
"""Sequences for which cuDNN's kernel is used. Forward and backward on an H100 with torch 2.11 it
took 0.56 of `varlen_attn`'s time for 16,384 tokens, 1.04 for 4,096 and 5.5 for 1,024."""

CUDNN_MAX_WIDTH = 128
"""Of heads: its backward pass takes no wider ones on all GPUs."""

Kernel = Callable[["Segments", Tensor, Tensor, Tensor, AttentionRule], Tensor]
"""Returns values `[Q, H, D]` for `query [Q, H, D]`, `key, value [K, G, D]`."""


def has_fused_kernels(device: torch.device) -> bool:
    """Return whether a device attends without scores in memory, and multiplies into float32.

    Call it through its module: the memory planner, which runs on a CPU, replaces it.
    """
    return device.type == "cuda"


class Segments:
    def __init__(
        self,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
        device: torch.device | str,
        *,
        keys: GatherIndex | None = None,
    ) -> None:
        """`keys` has the place of each segment's keys in the row; None: they are in order."""
        self.keys = keys
        self._query_lengths, self._key_lengths = [*query_lengths], [*key_lengths]
        self.max_seqlen_q, self.max_seqlen_k = max(query_lengths), max(key_lengths)
        query_ends, key_ends = (
            np.cumsum([0, *lengths]) for lengths in (query_lengths, key_lengths)
        )
        self.query_ends, self.key_ends = (
            to_device(ends.astype(np.int32), device) for ends in (query_ends, key_ends)
        )
        self._first_Q = np.repeat(key_ends[:-1], query_lengths)
        self._last_Q = np.arange(query_ends[-1]) + np.repeat(
            key_ends[1:] - query_ends[1:], query_lengths
        )
        self._block_masks: dict[int | None, Any] = {}
        self._parts: dict[tuple[int, ...], Segments] = {}

    @classmethod
    def of(cls, places: Sequence[NDArray[np.int64]], device: torch.device | str) -> Segments:
        """Return the segments of a row with the tokens of a sequence at each of `places`.

        Sequences may begin with tokens of an earlier one. A sequence's own tokens follow those of
        the sequence before it.
        """
        query_lengths, key_lengths, places_per_segment, end = [], [], [], 0
        for places_L in places:
            num_own = len(places_L) - int(np.searchsorted(places_L, end))
            if num_own:
                query_lengths.append(num_own)
                key_lengths.append(len(places_L))
                places_per_segment.append(places_L)
            end += num_own
        if query_lengths == key_lengths:
            return cls(query_lengths, key_lengths, device)
        index_K = to_device(np.concatenate(places_per_segment), device)
        return cls(query_lengths, key_lengths, device, keys=GatherIndex.of(index_K, end))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Return values `[Q, H, D]` for `query [Q, H, D]`, and for keys and values `[T, G, D]`."""
        dtype = pass_dtype(value)  # rotary positions leave queries and keys in float32
        query, key, value = (each.to(dtype) for each in (query, key, value))
        if self.keys is not None:
            key, value = (deterministic_gather(each, self.keys) for each in (key, value))
        kernels = choose_kernels(
            dtype,
            (query.shape[-1], value.shape[-1]),
            rule,
            [*zip(self._query_lengths, self._key_lengths, strict=True)],
            has_cudnn=has_cudnn(query.device),
        )
        if len({*kernels}) == 1:
            return kernels[0](self, query, key, value, rule)
        return self._attend_in_parts(kernels, query, key, value, rule)

    def _attend_in_parts(
        self,
        kernels: Sequence[Kernel],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: AttentionRule,
    ) -> Tensor:
        """Attend by each kernel to its segments; values are in the order of all segments."""
        queries = torch.split(query, self._query_lengths)
        keys, values = (torch.split(each, self._key_lengths) for each in (key, value))
        attended: dict[int, Tensor] = {}
        for kernel in dict.fromkeys(kernels):
            indices = tuple(index for index, each in enumerate(kernels) if each is kernel)
            part = self._part(indices)
            query, key, value = (
                torch.cat([rows[i] for i in indices]) for rows in (queries, keys, values)
            )
            outputs = torch.split(kernel(part, query, key, value, rule), part._query_lengths)
            attended |= zip(indices, outputs, strict=True)
        return torch.cat([attended[index] for index in range(len(kernels))])

    def _part(self, indices: tuple[int, ...]) -> Segments:
        if indices not in self._parts:
            self._parts[indices] = Segments(
                [self._query_lengths[i] for i in indices],
                [self._key_lengths[i] for i in indices],
                self.query_ends.device,
            )
        return self._parts[indices]

    def block_mask(self, window: int | None) -> Any:
        """Return FlexAttention's mask, made of blocks, without Q times K entries."""
        if window not in self._block_masks:
            first_Q, last_Q = self._first_Q, self._last_Q
            if window is not None:
                first_Q = np.maximum(first_Q, last_Q - (window - 1))
            self._block_masks[window] = _block_mask(first_Q, last_Q, self.query_ends.device)
        return self._block_masks[window]


def choose_kernels(
    dtype: torch.dtype,
    widths: tuple[int, int],
    rule: AttentionRule,
    lengths: Sequence[tuple[int, int]],
    *,
    has_cudnn: bool,
) -> list[Kernel]:
    """Return the attention kernel of each segment on a GPU.

    Flash attention supports neither soft-caps nor sinks (it has no gradient of the log-sum-exp that
    sinks need), nor float32, and few widths. FlexAttention does the rest. cuDNN takes long
    sequences without a window whose keys are their own.

    Args:
        widths: a head's of keys and of values.
        lengths: each segment's numbers of queries and of keys.
    """
    is_supported = (
        dtype in (torch.bfloat16, torch.float16)
        and widths[0] == widths[1] <= VARLEN_MAX_WIDTH
        and widths[0] % 8 == 0
        and rule.is_plain
    )
    if not is_supported:
        return [attend_by_flex] * len(lengths)
    has_cudnn = has_cudnn and widths[0] <= CUDNN_MAX_WIDTH

    def takes_long(num_queries: int, num_keys: int) -> bool:
        is_windowed = rule.window is not None and rule.window < num_keys
        return num_queries == num_keys >= CUDNN_MIN_TOKENS and not is_windowed

    return [
        attend_by_cudnn if has_cudnn and takes_long(*each) else attend_by_varlen for each in lengths
    ]


def has_cudnn(device: torch.device) -> bool:
    """Return whether a device has cuDNN's attention, and may use it.

    Its backward pass is not deterministic.
    """
    return (
        device.type == "cuda"
        and bool(torch.backends.cudnn.is_available())  # type: ignore[no-untyped-call]
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and not torch.are_deterministic_algorithms_enabled()
    )


def attend_by_cudnn(
    segments: Segments, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
) -> Tensor:
    """Attend to each segment by a call of its own: over jagged rows it failed on an H100 (2.11)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # here: it loads torch's compiler

    assert segments._query_lengths == segments._key_lengths, "a segment's keys are its own"
    repeats = query.shape[1] != key.shape[1]
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    lengths = segments._key_lengths
    rows = (torch.split(each, lengths, dim=2) for each in (query, key, value))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION if query.is_cuda else SDPBackend.MATH]):
        attended = [
            scaled_dot_product_attention(
                query_1HLD,
                key_1GLD,
                value_1GLD,
                is_causal=True,
                scale=rule.scale,
                enable_gqa=repeats,
            )
            for query_1HLD, key_1GLD, value_1GLD in zip(*rows, strict=True)
        ]
    return torch.cat(attended, dim=2)[0].transpose(0, 1)


def attend_by_varlen(
    segments: Segments, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
) -> Tensor:
    """Its backward pass is deterministic under `torch.use_deterministic_algorithms`."""
    from torch.nn.attention.varlen import varlen_attn  # here: it loads torch's compiler

    attended = varlen_attn(
        query,
        key,
        value,
        segments.query_ends,
        segments.key_ends,
        segments.max_seqlen_q,
        segments.max_seqlen_k,
        scale=rule.scale,
        window_size=(-1 if rule.window is None else rule.window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended


def attend_by_flex(
    segments: Segments, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
) -> Tensor:
    """Sinks take their share of the weights afterwards, through the log-sum-exp of the scores."""
    from torch.nn.attention.flex_attention import AuxRequest

    width = value.shape[-1]
    columns = (_widened(each).transpose(0, 1)[None] for each in (query, key, value))
    attended: Tensor
    attended, aux = flex_attention(query.device.type)(
        *columns,
        score_mod=None if rule.softcap is None else _soft_capped(rule.softcap),
        block_mask=segments.block_mask(rule.window),
        scale=rule.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
        kernel_options=FLEX_KERNEL,
    )
    if rule.sinks is not None:
        kept = torch.sigmoid(aux.lse - rule.sinks.float()[:, None])
        attended = (attended * kept[..., None]).to(attended.dtype)
    return attended[0, ..., :width].transpose(0, 1)


@lru_cache
def flex_attention(device: str) -> Any:
    """Return FlexAttention, compiled for rows of any length on a GPU.

    It is compiled for each scale and soft-cap: if the compiler makes the soft-cap a variable, as it
    does with numbers that change between calls, the gradient fails.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if device != "cuda":
        return flex_attention  # without the compiler it computes all scores
    limits = torch._dynamo.config.patch(specialize_float=True, recompile_limit=MAX_FLEX_GRAPHS)
    return limits(torch.compile(flex_attention, dynamic=True))


def _widened(heads_THD: Tensor) -> Tensor:
    missing = FLEX_MIN_WIDTH - heads_THD.shape[-1]
    return pad(heads_THD, (0, missing)) if missing > 0 else heads_THD


def _soft_capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return capped


def _block_mask(first_Q: NDArray[np.int64], last_Q: NDArray[np.int64], device: torch.device) -> Any:
    """Return a mask of queries that see the keys from their first to their last one.

    A block of queries and keys is computed if a query may see a key of it, and is full, so that
    single keys need no check, if each query sees each key of it.
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_keys = int(last_Q[-1]) + 1
    at, begins = np.arange(0, len(first_Q), BLOCK), np.arange(0, num_keys, BLOCK)
    first_seen, last_seen = np.minimum.reduceat(first_Q, at), np.maximum.reduceat(last_Q, at)
    seen = (begins + BLOCK > first_seen[:, None]) & (begins <= last_seen[:, None])
    first_full, last_full = np.maximum.reduceat(first_Q, at), np.minimum.reduceat(last_Q, at)
    full = (begins >= first_full[:, None]) & (begins + BLOCK <= last_full[:, None] + 1)
    first, last = (to_device(keys_Q.astype(np.int32), device) for keys_Q in (first_Q, last_Q))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key <= last[query])

    return BlockMask.from_kv_blocks(
        *_blocks(seen & ~full, device),
        *_blocks(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(len(first_Q), num_keys),
    )


def _blocks(mask: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each row's number of blocks, and block numbers, with its own first."""
    arrays = mask.sum(axis=1), np.argsort(~mask, axis=1, kind="stable")
    counts, numbers = (to_device(each.astype(np.int32), device) for each in arrays)
    return counts[None, None], numbers[None, None]
