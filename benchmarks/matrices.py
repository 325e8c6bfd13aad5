"""Linear layers of float32 on this CPU: PyTorch's own products and those of oneDNN.

For layers of the default policy (128 wide), of an 11M one (384) and of 1.5B (1536), with as many
rows as a decode step and a micro-batch have: billions of operations a second, forward and of both
gradients, the best of some turns. `areal_flow/models/linear.py` takes oneDNN where `used` says so.

    python -m benchmarks.matrices [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from areal_flow.models import linear as module

LAYERS = ((128, 128), (128, 256), (384, 384), (384, 1536), (1536, 384), (1536, 8960))
"""Inputs and outputs."""
ROWS = (8, 32, 128, 1024, 4096)
TURNS = 3
SECONDS = 0.05
"""Of a turn, at least."""


def rate(product: Callable[[], Tensor], num_operations: float) -> float:
    """Return billions of operations a second."""
    product()
    began = perf_counter()
    product()
    repeats = max(1, int(SECONDS / (perf_counter() - began)))
    began = perf_counter()
    for _ in range(repeats):
        product()
    return repeats * num_operations / (perf_counter() - began) / 1e9


def rates(num_rows: int, num_inputs: int, num_outputs: int) -> dict[str, dict[str, float]]:
    """Return the best rate of each product, PyTorch's own and oneDNN's, which take turns."""
    rows, weight = torch.randn(num_rows, num_inputs), torch.randn(num_outputs, num_inputs)
    gradient = torch.randn(num_rows, num_outputs)
    products = {
        "forward": (rows, weight),
        "of rows": (gradient, weight.T),
        "of weights": (gradient.T, rows.T),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (left, right) in products.items():
        best = {"pytorch": 0.0, "onednn": 0.0}
        for _ in range(TURNS):
            for way, is_faster in (("pytorch", False), ("onednn", True)):
                with (
                    patch.object(module, "onednn_is_faster", lambda chosen=is_faster: chosen),
                    patch.object(module, "FEWEST_PRODUCTS", 0),
                ):
                    speed = rate(
                        lambda a=left, b=right: module.linear(a, b),  # type: ignore[misc]
                        2.0 * num_rows * num_inputs * num_outputs,
                    )
                best[way] = max(best[way], speed)
        found[name] = best
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table(title=f"GFLOP/s, {arguments.threads} thread(s): PyTorch's own -> oneDNN")
    for label in ("rows", "inputs x outputs", "forward", "of rows", "of weights", "used"):
        table.add_column(label, justify="right")
    report = []
    for num_inputs, num_outputs in LAYERS:
        for num_rows in ROWS:
            found = rates(num_rows, num_inputs, num_outputs)
            is_large = num_rows * num_inputs * num_outputs >= module.FEWEST_PRODUCTS
            used = is_large and module.onednn_is_faster()
            cells = (f"{of['pytorch']:.0f} -> {of['onednn']:.0f}" for of in found.values())
            table.add_row(
                f"{num_rows}", f"{num_inputs} x {num_outputs}", *cells, "yes" if used else ""
            )
            shape = {"rows": num_rows, "inputs": num_inputs, "outputs": num_outputs}
            report.append({**shape, "used": used, "gflops": found})
    Console(width=120).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
