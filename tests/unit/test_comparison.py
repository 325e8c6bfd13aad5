"""A step compared with its replay: what may differ, and what must not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areal_flow.algorithms.registry import ALGORITHMS
from areal_flow.core.settings import flatten
from areal_flow.core.types import PolicyHashes, StepResult
from areal_flow.flow.recovery.replay_settings import WITHOUT_INFLUENCE, settings_of_a_step
from areal_flow.flow.recovery.restore import ComparedStep, compared_values, result_from_row
from areal_flow.log.ledger_row import Provenance, genesis_row
from areal_flow.training.settings import TrainerSettings

CPU = {"device": "cpu", "torch": "2.13.0", "threads": 1}
PROVENANCE = Provenance(1, "", "")


def result(
    environment: dict[str, Any] = CPU, *, weights: str = "w", loss: float = 0.5
) -> StepResult:
    row = genesis_row(
        PolicyHashes(weights, "s"),
        provenance=PROVENANCE,
        numeric_environment=json.dumps(environment),
    )
    return result_from_row({**row, "step": 3, "loss": loss})


@pytest.mark.parametrize(
    ("replayed", "after_fork", "differences", "refused"),
    [
        (result(), False, [], False),
        (result(weights="x"), False, ["weights_hash"], True),
        (result(loss=0.25), False, ["loss"], True),
        (result(weights="x"), True, ["weights_hash"], False),
        (result({**CPU, "torch": "2.14.0"}, weights="x"), False, ["weights_hash"], False),
        (result({**CPU, "torch": "2.14.0"}), False, [], False),
    ],
    ids=["equal", "other weights", "other loss", "after a fork", "another torch", "equal anyway"],
)
def test_a_difference_is_refused_in_the_recorded_environment_alone(
    replayed: StepResult, after_fork: bool, differences: list[str], refused: bool
) -> None:
    compared = ComparedStep(result(), replayed, after_fork=after_fork)
    assert list(compared.differences) == differences
    assert compared.equal == (not differences)
    assert compared.refused == refused


def test_environment_differences_name_both_sides() -> None:
    compared = ComparedStep(result(), result({"device": "cuda", "torch": "2.13.0"}))
    assert compared.environment_differences == {"device": ("cpu", "cuda"), "threads": (1, None)}


def test_every_setting_of_algorithms_and_trainer_can_change_a_step_but_seven() -> None:
    of_algorithms = {f"algorithm.{name}" for a in ALGORITHMS.values() for name in a.model_fields}
    all_settings = of_algorithms | flatten(TrainerSettings().model_dump(), "trainer.").keys()
    settings = settings_of_a_step()
    of_both = {name for name in settings if name.startswith(("algorithm.", "trainer."))}
    assert of_both == all_settings - WITHOUT_INFLUENCE
    assert len(all_settings) - len(of_both) == 7
    assert {"controller.max_staleness", "generation.temperature", "seed"} <= set(settings)


def test_values_that_a_replay_must_repeat_are_compared_by_name() -> None:
    values = compared_values(result(weights="x", loss=0.25))
    expected = {
        "loss": 0.25,
        "grad_norm": 0.0,
        "num_trained_tokens": 0,
        "num_masked_tokens": 0,
        "weights_hash": "x",
        "served_hash": "s",
    }
    assert {name: values[name] for name in expected} == expected
    assert "train_s" not in values
    assert "reward_mean" not in values
    different = ComparedStep(result(weights="x", loss=0.25), result())
    assert different.differences == {"loss": (0.25, 0.5), "weights_hash": ("x", "w")}
    assert different.step == 3


def test_bits_must_agree_on_one_cpu_environment_only() -> None:
    def refused(there: dict[str, Any], here: dict[str, Any]) -> bool:
        return ComparedStep(result(there), result(here, weights="x")).refused

    assert refused(CPU, CPU) is True
    assert refused(dict(reversed(CPU.items())), CPU) is True
    assert refused(CPU, {**CPU, "threads": 2}) is False
    gpu = {"device": "cuda", "dtype": "bfloat16"}
    assert refused(gpu, gpu) is False
    deterministic = {**gpu, "kernels": "deterministic"}
    assert refused(deterministic, deterministic) is True
    assert refused(deterministic, {**deterministic, "device_name": "another"}) is False


def test_a_gpu_replays_within_a_tolerance_or_bit_for_bit_with_deterministic_kernels() -> None:
    gpu = {"device": "cuda", "dtype": "bfloat16"}
    near, far = (
        ComparedStep(result(gpu), result(gpu, weights="x", loss=loss)) for loss in (0.51, 0.6)
    )
    assert (near.tolerance, near.within_tolerance, far.within_tolerance) == (5e-2, True, False)
    deterministic = {**gpu, "kernels": "deterministic"}
    assert ComparedStep(result(deterministic), result(deterministic, loss=0.51)).tolerance == 0
    assert (
        ComparedStep(result({**gpu, "dtype": "tf32"}), result({**gpu, "dtype": "tf32"})).tolerance
        == 1e-2
    )


def test_result_reads_lists_of_a_row_as_tuples() -> None:
    tenths = [0.1] * 10
    row = genesis_row(result().hashes, provenance=PROVENANCE, numeric_environment="{}")
    step_result = result_from_row({**row, "step": 4, "masked_fraction_by_decile": tenths})
    assert (step_result.step, step_result.numeric_environment) == (4, "{}")
    assert step_result.metrics.masked_fraction_by_decile == tuple(tenths)
