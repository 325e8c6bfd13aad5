"""The sections of a recipe that no component keeps beside it: evaluation and tracking."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, model_validator

from areal_flow.core.pass_rates import HELD_OUT
from areal_flow.core.settings import Settings, require
from areal_flow.rollout.engines.protocol import WHOLE_DISTRIBUTION
from areal_flow.rollout.prompts.settings import HeldOutSettings


class EvaluationSettings(Settings):
    """How held-out prompts are answered, and how often."""

    every_steps: int = Field(0, ge=0)
    """Steps between evaluations; 0: only before and after training."""
    num_samples: int = Field(1, ge=1)
    """Answers per prompt; more than one gives pass@k."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature; 0: greedy; none: that of `generation`."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1: off."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0: off."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Minimum probability relative to the most likely token; 0: off."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Penalty on tokens that occurred before; 1: off."""
    min_new_tokens: int = Field(0, ge=0)
    """Minimum length of an answer, in tokens."""
    early_stopping_patience: int = Field(0, ge=0)
    """Stop training after this many evaluations without a better pass rate; 0: never."""
    held_out: tuple[HeldOutSettings, ...] = Field((), strict=False)
    """Each `[[evaluation.held_out]]` table is one more held-out set, with a name and a `path`. It
    may have `question_field`, `answer_field` and `template`; else those of `[prompts]`."""

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationSettings:
        names = [HELD_OUT, *(each.name for each in self.held_out)]
        require(
            len(set(names)) == len(names),
            f"evaluation.held_out: a name stands twice in {names}, the first of which is the set "
            "that training's own prompts give: rename one",
        )
        of_sets = {f"evaluation.held_out {s.name!r}: ": s.num_samples for s in self.held_out}
        for where, number in {"evaluation.": self.num_samples, **of_sets}.items():
            require(
                self.temperature != 0 or number in (1, None),
                f"{where}num_samples ({number}) must be 1 at evaluation.temperature 0: the "
                "likeliest answer is always the same",
            )
        require(
            not self.early_stopping_patience or self.every_steps > 0,
            f"evaluation.early_stopping_patience ({self.early_stopping_patience}) needs "
            "evaluations during training: set evaluation.every_steps",
        )
        return self

    def num_samples_of(self, held_out: str) -> int:
        own = next((each.num_samples for each in self.held_out if each.name == held_out), None)
        return own or self.num_samples

    def sampling(self) -> dict[str, float]:
        own = {name: getattr(self, name) for name in WHOLE_DISTRIBUTION}
        return own if self.temperature is None else {**own, "temperature": self.temperature}


class TrackingSettings(Settings):
    """Where a run is shown. MLflow: a database beside the runs unless an address is given."""

    enabled: bool = True
    """Send metrics and models to the tracking sinks."""
    sink: str = "mlflow"
    """`mlflow`, `tensorboard`, `wandb` (offline), or several: `mlflow,tensorboard`."""
    uri: str = ""
    """Address of the MLflow server, without a password; empty: a database next to the runs."""
    experiment: str = "areal-flow"
    """Name of the MLflow experiment."""
    registered_model: str = "areal-flow"
    """Name of the registered model."""

    @property
    def sinks(self) -> list[str]:
        return [name.strip() for name in self.sink.split(",")]

    @model_validator(mode="after")
    def _without_secrets(self) -> TrackingSettings:
        require(
            urlsplit(self.uri).password is None,
            "tracking.uri has a password, which the run's files would keep: leave it out, and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
        )
        return self
