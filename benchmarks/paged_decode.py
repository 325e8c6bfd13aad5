"""One layer's attention of a decode step over pages, beside padded attention and the memory's rate.

128 sequences, whose lengths are lognormal (sigma 1, median 120 tokens) or all the same. Padded
attention multiplies every sequence up to the longest one's length. The floor is the time in which
this machine copies as many bytes as the sequences' own keys and values have.

    python benchmarks/paged_decode.py [--rounds 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from areal_flow.models.attention import AttentionRule, KeyValues, attend_where_visible
from areal_flow.models.paged_decode import PagedDecodeLayout
from areal_flow.models.paged_prefill import PagedCache, page_tokens_for

NUM_ROWS = 128
SHAPES = {"2 x 2 x 16": (2, 2, 16), "2 x 2 x 32": (2, 2, 32), "4 x 1 x 64": (4, 1, 64)}
"""Key-value heads, heads to each, dimension of a head."""


def lengths_of(kind: str) -> NDArray[np.int64]:
    if kind == "same":
        return np.full(NUM_ROWS, 500)
    drawn = np.random.default_rng(0).lognormal(np.log(120), 1.0, NUM_ROWS)
    return np.clip(drawn, 8, 2000).astype(np.int64)


def seconds_of(work: Callable[[], object], rounds: int) -> float:
    work()
    taken = []
    for _ in range(rounds):
        began = perf_counter()
        work()
        taken.append(perf_counter() - began)
    return min(taken)


def measure(lengths_S: NDArray[np.int64], shape: tuple[int, int, int], rounds: int) -> list[float]:
    """Return seconds of attention over pages, of padded attention, and of a copy."""
    num_groups, per_group, size = shape
    rule = AttentionRule(scale=size**-0.5)
    page_tokens = page_tokens_for(int(lengths_S.max()))
    num_pages_S = -(-lengths_S // page_tokens)
    pages = np.random.default_rng(1).permutation(int(num_pages_S.sum()))
    tables_SW = np.zeros((NUM_ROWS, int(num_pages_S.max())), np.int64)
    ends_S = np.cumsum(num_pages_S)
    for row_W, num_pages, end in zip(tables_SW, num_pages_S, ends_S, strict=True):
        row_W[:num_pages] = pages[end - num_pages : end]
    one = torch.randn(1, num_groups, 1, size)
    cache = PagedCache(
        KeyValues({0: (one, one)}),
        num_pages=len(pages),
        page_tokens=page_tokens,
        device=torch.device("cpu"),
    )
    for pair in cache.layers.values():
        for held in pair:
            held.normal_()
    query = torch.randn(NUM_ROWS, num_groups * per_group, 1, size)
    new = torch.randn(NUM_ROWS, num_groups, 1, size)
    layout = PagedDecodeLayout(cache, tables_SW, lengths_S - 1)
    padded = torch.randn(2, NUM_ROWS, num_groups, int(lengths_S.max()), size)
    positions_S1 = torch.from_numpy(lengths_S - 1)[:, None]
    own, target = torch.randn(2, 2 * int(lengths_S.sum()), num_groups * size)

    def over_pages() -> Tensor:
        return layout.attend(0, query, new, new, rule)

    def over_padding() -> Tensor:
        return attend_where_visible(query, padded[0], padded[1], positions_S1, rule)

    def copy() -> Tensor:
        return target.copy_(own)

    return [seconds_of(work, rounds) for work in (over_pages, over_padding, copy)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("lengths", "heads", "fill", "pages, ms", "padded, ms", "copy, ms", "over copy")
    found = []
    for kind in ("lognormal", "same"):
        lengths_S = lengths_of(kind)
        for name, shape in SHAPES.items():
            taken = measure(lengths_S, shape, chosen.rounds)
            fill = float(lengths_S.mean() / lengths_S.max())
            times = [f"{1e3 * seconds:.2f}" for seconds in taken]
            table.add_row(kind, name, f"{fill:.2f}", *times, f"{taken[0] / taken[2]:.1f}")
            found.append({"lengths": kind, "heads": name, "fill": fill, "seconds": taken})
    Console().print(table)
    if chosen.json:
        machine = {"processor": platform.processor(), "torch": torch.__version__}
        chosen.json.write_text(json.dumps({"machine": machine, "rows": found}))


if __name__ == "__main__":
    main()
