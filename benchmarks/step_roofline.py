"""Predicts a training step on one GPU from the speed of its kernels, before a GPU is at hand.

The time of each group of kernels follows from the shapes of `gpu_step` and from rates that were
measured alone, on one H100 80GB with torch 2.11: products of large random matrices, copies,
attention, and the head by rows in a chunk. The first row of a length is the step that was measured
there, and each further row has one change more. Steps with all changes were measured on an H200,
which multiplies as fast. Goals: 0.49 s for 16,384 tokens, 1.45 s for 32,768.

    python -m benchmarks.step_roofline [--json FILE]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from benchmarks import harness

LAYERS, WIDTH, INTERMEDIATE, VOCABULARY = 28, 1536, 8960, 151_936
HEADS, KEY_HEADS, HEAD_WIDTH = 12, 2, 128
TRAINED = 7 / 8
"""Of a trajectory's tokens, in `gpu_step`."""
PEAK = 989e12
"""Operations a second in bfloat16, by the data sheet."""

PRODUCTS, COPIES = 764e12, 3.00e12
"""Operations a second of large products, and bytes read and written a second."""
ATTENTION_S = {
    "varlen": {16_384: (2.85e-3, 6.78e-3), 32_768: (9.70e-3, 25.5e-3)},
    "cudnn": {16_384: (1.56e-3, 3.86e-3), 32_768: (5.34e-3, 15.5e-3)},
}
"""Forward and backward pass of a layer, for one sequence."""
HEAD_S = {
    441: {"product": 0.87e-6, "hidden": 0.66e-6, "weight, then add": 3.47e-6, "weight": 2.22e-6},
    2048: {"product": 0.70e-6, "hidden": 0.59e-6, "weight, then add": 1.12e-6, "weight": 0.74e-6},
}
"""By rows in a chunk, a row's: logits, gradients of hidden states, and of weights as a product that
is then added, or by a product into the sum."""
LOGIT_BYTES = {"separate": 12 * 2 + 16 + 6, "compiled": 4 + 4 + 2}
"""Read and written of a logit, beside products. Separate: a softmax that reads twice, in both
passes, two operations on the gradient, and its rounding. Compiled: each pass reads logits once."""
SUMMED = 8 * WIDTH + (HEADS + 2 * KEY_HEADS) * HEAD_WIDTH
"""Numbers of a token that a layer's norms, sums and rotations read and write in a forward pass."""
PARAMETER_BYTES = 12
"""Of casting a weight to bfloat16, and its gradient back."""
OPTIMIZER_S = 26e-3 / 1.54e9
"""Of a weight: AdamW in the measured step."""
LAYER_WEIGHTS = 2 * WIDTH * HEAD_WIDTH * (HEADS + KEY_HEADS) + 3 * WIDTH * INTERMEDIATE
WEIGHTS = LAYERS * LAYER_WEIGHTS + VOCABULARY * WIDTH


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    num_tokens: int
    attention: Literal["varlen", "cudnn"] = "varlen"
    rows: int = 441
    """Of a chunk of the head."""
    weight: str = "weight, then add"
    logits: Literal["separate", "compiled"] = "separate"
    num_recomputed: float = 0.0
    """Of the layers, as a share: their forward pass is computed again."""
    keeps_attention: bool = True
    """Whether what attention returned is not computed again."""
    sum_bytes: int = 4
    """Of a number in sums of layers."""
    measured_s: float | None = None


MEASURED = (
    Step("`selective`, as measured", 16_384, measured_s=0.667),
    Step(
        "`recompute`, as measured",
        32_768,
        num_recomputed=1.0,
        keeps_attention=False,
        measured_s=2.20,
    ),
)

CHANGED_S = {
    (16_384, "and sums of layers in bfloat16"): 0.431,
    (32_768, "and attention kept"): 1.22,
    (32_768, "and every second layer recomputed"): 1.14,
}
"""Measured on an H200, by number of tokens and last change."""


def group_seconds(step: Step) -> dict[str, float]:
    """Return the seconds of each group of kernels."""
    tokens, again = step.num_tokens, step.num_recomputed
    rows, head = TRAINED * step.num_tokens, HEAD_S[step.rows]
    forward, backward = ATTENTION_S[step.attention][tokens]
    attention_again = 0.0 if step.keeps_attention else again
    layer_bytes = 3 * (step.sum_bytes * SUMMED + 6 * INTERMEDIATE)  # backward twice as much
    return {
        "layers' products": (6 + 2 * again) * LAYERS * LAYER_WEIGHTS * tokens / PRODUCTS,
        "attention": LAYERS * ((1 + attention_again) * forward + backward),
        "layers' other kernels": (1 + again / 3) * LAYERS * layer_bytes * tokens / COPIES,
        "head's products": rows * (2 * head["product"] + head["hidden"] + head[step.weight]),
        "head's other kernels": rows * VOCABULARY * LOGIT_BYTES[step.logits] / COPIES,
        "casts, optimizer": WEIGHTS * (PARAMETER_BYTES / COPIES + OPTIMIZER_S),
    }


def model_flops(num_tokens: int) -> float:
    """Return the operations of a step without recomputation, as `training/flops.py` counts them."""
    products = 6 * LAYERS * LAYER_WEIGHTS * num_tokens
    attention = 6 * LAYERS * HEADS * HEAD_WIDTH * num_tokens * (num_tokens + 1)
    return products + attention + 6 * VOCABULARY * WIDTH * TRAINED * num_tokens


def changes(step: Step) -> list[Step]:
    """Return a measured step, and the same after one change more each."""
    steps = [step]
    for name, change in (
        ("and cuDNN's attention", {"attention": "cudnn"}),
        ("and weight gradients by a product into the sum", {"weight": "weight"}),
        ("and 2,048 rows in a chunk", {"rows": 2048}),
        ("and the head's softmax compiled", {"logits": "compiled"}),
        ("and sums of layers in bfloat16", {"sum_bytes": 2}),
        *(
            [
                ("and attention kept", {"keeps_attention": True}),
                ("and every second layer recomputed", {"num_recomputed": 0.5}),
            ]
            if step.num_recomputed
            else []
        ),
    ):
        changed = replace(steps[-1], name=name, measured_s=None, **change)  # type: ignore[arg-type]
        steps.append(replace(changed, measured_s=CHANGED_S.get((step.num_tokens, name))))
    return steps


def report_row(step: Step) -> dict[str, object]:
    groups = group_seconds(step)
    total_s = sum(groups.values())
    return {
        "step": step.name,
        **{f"{name}, ms": round(1e3 * seconds) for name, seconds in groups.items()},
        "predicted, s": round(total_s, 3),
        "measured, s": step.measured_s or "",
        "predicted MFU": round(model_flops(step.num_tokens) / total_s / PEAK, 2),
    }


def main() -> None:
    options = harness.parse_options(__doc__)
    tables = {
        f"One trajectory of {step.num_tokens:,} tokens, 1.5B, one H100": [
            report_row(each) for each in changes(step)
        ]
        for step in MEASURED
    }
    harness.report(options.json, tables)


if __name__ == "__main__":
    main()
