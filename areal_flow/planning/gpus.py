"""Specifications and prices of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from areal_flow.core.errors import ConfigError

GIB = 2**30
NETWORK_BYTES_PER_S = 50e9
"""Between machines, per GPU: 400 Gb/s, an eighth of the paper's 3.2 Tb/s per machine (arXiv
2505.24298, section 7.1)."""
GPUS_PER_MACHINE = 8


@dataclass(frozen=True, slots=True)
class Gpu:
    gib: float
    """As torch reports it."""
    flops: float
    """Dense bfloat16, per second."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To another GPU of the machine, one direction."""
    price_per_hour: float
    """US dollars: our assumption, roughly on-demand prices of 2025; `--price` sets your own."""


GPUS = {
    # NVIDIA's data sheets of each GPU: dense bfloat16 (half of the figure with sparsity), memory
    # bandwidth, and half of NVLink's figure for both directions; 4090 and L40S have PCIe 4.0 x16.
    "RTX4080-16GB": Gpu(15.6, 97.5e12, 0.717e12, 32e9, 0.3),
    "L4-24GB": Gpu(22.0, 121e12, 0.3e12, 32e9, 0.7),
    "RTX4090-24GB": Gpu(23.5, 165.2e12, 1.008e12, 32e9, 0.4),
    "L40S-48GB": Gpu(44.5, 362e12, 0.864e12, 32e9, 1.0),
    "A100-40GB": Gpu(39.4, 312e12, 1.555e12, 300e9, 1.3),
    "A100-80GB": Gpu(79.1, 312e12, 2.039e12, 300e9, 1.6),
    # An H100 with NVLink of 400 GB/s in both directions together (export rules of 2022).
    "H800-80GB": Gpu(79.1, 989e12, 3.35e12, 200e9, 2.5),
    "H100-80GB": Gpu(79.1, 989e12, 3.35e12, 450e9, 2.5),
    "H200-141GB": Gpu(139.8, 989e12, 4.8e12, 450e9, 3.5),
    # One core of the machine in docs/benchmarks.md: an assumption that `--calibrate` corrects.
    "CPU": Gpu(8.0, 100e9, 10e9, 10e9, 0.05),
}


def gpu_named(name: str) -> Gpu:
    """Return a GPU by its name, or by a part of it that is unique."""
    matches = [each for each in GPUS if each == name] or [each for each in GPUS if name in each]
    if not name or len(matches) != 1:
        raise ConfigError(f"unknown GPU {name!r}: expected one of {', '.join(GPUS)}")
    return GPUS[matches[0]]


def gpu_bytes(name: str) -> int:
    return int(gpu_named(name).gib * GIB)
