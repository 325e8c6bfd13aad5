"""One row a prompt: what is asked, what is right, how hard it is; and one a held-out answer."""

from __future__ import annotations

import pandera.polars as pa
import polars as pl


class PromptRow(pa.DataFrameModel):
    """A prompt ready to be rolled out: rendered by the template and tokenised once."""

    prompt_id: str = pa.Field(
        str_length={"min_value": 1},
        description="unique but for equal rows; ID or SOURCE/ID",
    )
    prompt: str = pa.Field(str_length={"min_value": 1}, description="text after the template")
    answer: str = pa.Field(
        str_length={"min_value": 1}, description="the right answer: text, or its value as JSON"
    )
    difficulty: pl.Int32 = pa.Field(
        ge=0, description="the source's own measure; 0 when it has none"
    )
    source: str = pa.Field(description="which of the run's sources; empty where it has one")
    metadata: str = pa.Field(description="JSON: the row's columns for the reward, `answer` typed")
    prompt_tokens: pl.List(pl.Int32) = pa.Field(description="token ids, never tokenised again")

    class Config:
        strict = True


class EvaluationRow(pa.DataFrameModel):
    """A sampled answer to a prompt that training never sees."""

    evaluation: str = pa.Field(description="'before', 'after', 'step-' and a step, or a caller's")
    writer_epoch: pl.Int32 = pa.Field(ge=0, description="which driver wrote it; 0 is none")
    policy_version: pl.Int64 = pa.Field(
        ge=0, description="the oldest that sampled an answer of this evaluation"
    )
    version_spans: pl.List(pl.Struct({"version": pl.Int32, "length": pl.Int32})) = pa.Field(
        description="which versions sampled this answer; empty where there is none"
    )
    held_out: str = pa.Field(description="the name of its held-out set")
    prompt_id: str
    sample: pl.Int32 = pa.Field(ge=0, description="which of the prompt's answers")
    difficulty: pl.Int32 = pa.Field(ge=0)
    prompt: str
    completion: str
    answer: str
    num_output_tokens: pl.Int32 = pa.Field(ge=0)
    finish_reason: str = pa.Field(description="'error' where the prompt could not be answered")
    reward: pl.Float64 = pa.Field(nullable=True)
    reward_detail: str
    verifier: str = pa.Field(description="names and hashes of the code that scored it")
    evaluated_at: pl.Datetime("us", "UTC")

    class Config:
        strict = True
