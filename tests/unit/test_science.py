"""Experiments write pages: one runs in its quick form, and conclusions follow from intervals."""

from __future__ import annotations

from argparse import Namespace
from math import inf
from pathlib import Path

import pytest

from areal_flow.config import load_recipe
from benchmarks.science import learning
from benchmarks.science.__main__ import BEGIN, END, EXPERIMENTS, main
from benchmarks.science.findings import Estimate, conclude, difference
from pipelines.jobs.job import DEFAULT_RECIPE
from tests.markdown import DOCS
from tests.policies import write_model_directory


def test_quickest_experiment_writes_its_page_and_keeps_what_a_person_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["packing", "--quick", "--sequences", "6", "--to", str(tmp_path)]
    main(options)
    page = tmp_path / "packing.md"
    first = page.read_text()
    assert first.startswith("# Packing: trained tokens per second with packing by length")
    assert "- command: `nox -s science -- packing --quick --sequences 6`" in first
    assert "- seeds: 0, 1" in first
    assert "| sigma 1.5 | by lengths |" in first
    assert "speed, by lengths over fixed" in capsys.readouterr().out
    assert (tmp_path / "packing.png").stat().st_size < 60_000
    page.write_text(f"# Mine\n\n{BEGIN}\nold\n{END}\n\nRemarks.\n")
    main(options)
    again = page.read_text()
    assert again.startswith(f"# Mine\n\n{BEGIN}")
    assert again.endswith(f"{END}\n\nRemarks.\n")
    assert "old" not in again


def test_unknown_experiment_is_refused() -> None:
    with pytest.raises(SystemExit, match="one of staleness"):
        main(["nothing"])


def test_interval_is_students_t_and_infinite_for_one_seed() -> None:
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert (estimate.mean, estimate.half) == pytest.approx((2.0, 4.303 / 3**0.5), rel=1e-3)
    assert Estimate.of([1.0]) == Estimate(1.0, inf)
    assert difference([0.0, 10.0], [1.0, 11.0]) == Estimate(1.0, 0.0), "by pairs"


def test_wide_interval_concludes_nothing() -> None:
    assert "No conclusion" in conclude("effect", Estimate(0.1, 0.2))
    assert "No conclusion" not in conclude("effect", Estimate(0.1, 0.05))
    assert "No conclusion" in conclude("ratio", Estimate(1.1, 0.2), nothing=1.0)
    assert "No conclusion" in conclude("one seed", Estimate.of([1.0]))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_a_page_and_a_small_plot(name: str) -> None:
    page = (DOCS / "science" / f"{name}.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    assert "- seeds: " in page
    assert (DOCS / "science" / f"{name}.png").stat().st_size < 60_000


@pytest.mark.slow
def test_each_batch_of_an_experiment_is_sampled_eta_versions_before(tmp_path: Path) -> None:
    """And all that the experiment does not set is the default recipe's."""
    model = write_model_directory(tmp_path / "model")
    chosen = Namespace(
        recipe="arithmetic", samples=256, learning_rate=2e-5, model=model, dtype="", keep=None
    )
    sampled = {}
    for eta in (1.0, inf):
        setting = learning.Setting({"name": "ppo"}, eta, batch_size=64)
        run = learning.train(tmp_path, f"{eta:g}", setting, 1, chosen)
        rows = run.steps("arrow", where="step > 0").to_pylist()
        assert all(row["staleness_mean"] == row["staleness_max"] for row in rows)
        sampled[eta] = [row["policy_version"] - row["staleness_max"] for row in rows]
    assert sampled == {1.0: [0, 0, 1, 2], inf: [0, 0, 0, 0]}
    default = load_recipe(DEFAULT_RECIPE)
    assert run.recipe.generation == default.generation.model_copy(update={"engine": "torch"})
    assert run.recipe.trainer.num_warmup_steps == 10
    assert 0 <= run.summary()["held_out_after"]["pass_rate"] <= 1


@pytest.mark.walk
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs(name: str, tmp_path: Path) -> None:
    main([name, "--quick", "--to", str(tmp_path)])
    assert "- seeds: " in (tmp_path / f"{name}.md").read_text()
