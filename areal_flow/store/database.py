"""A run as a DuckDB connection: its tables as views, and the columns that follow from them.

Nothing is copied but ids: views read the datasets as they are queried, filters and projections
pushed down, and a derived column costs only the queries that use it.

    trajectories   every stored column, and
        prompt, completion           decoded, special tokens left out
        status, step, reason           trained, discarded or waiting; by which step; why
        policy_version               that the step started from
        verdict                      the verifier's word
        num_tokens                   of the completion
        token_versions               the policy version that sampled each token
        num_trained_tokens           with gradient; null unless trained
        num_masked_tokens            too old for gradient, or not the policy's choice
        staleness                    mean over the trained tokens, in versions
    steps, evaluations, prompts
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import duckdb
import pyarrow as pa

Decode = Callable[[pa.Array], pa.Array]
"""Turns a column of token ids into a column of texts."""

TOKEN_MACROS = """
CREATE MACRO tokens_until(spans, i) AS
    coalesce(list_sum(list_transform(spans[:i], lambda span: span.length)), 0);
CREATE MACRO num_chosen(mask) AS coalesce(list_sum(mask::INT[]), 0)::BIGINT;
CREATE MACRO chosen_spans(spans, mask) AS list_transform(spans, lambda span, i: {
    'version': span.version,
    'length': span.length,
    'num_chosen':
        num_chosen(mask[tokens_until(spans, i) - span.length + 1 : tokens_until(spans, i)])
});
CREATE MACRO num_trained(span, policy_version, max_staleness) AS
    CASE WHEN policy_version - span.version <= max_staleness THEN span.num_chosen ELSE 0 END;
CREATE MACRO trained_tokens(spans, policy_version, max_staleness) AS
    coalesce(list_sum(list_transform(
        spans, lambda span: num_trained(span, policy_version, max_staleness)
    )), 0)::BIGINT;
CREATE MACRO staleness_sum(spans, policy_version, max_staleness) AS
    list_sum(list_transform(spans, lambda span:
        num_trained(span, policy_version, max_staleness) * (policy_version - span.version)
    ))::BIGINT;
CREATE MACRO staleness_max(spans, policy_version, max_staleness) AS
    list_max(list_transform(spans, lambda span:
        CASE WHEN num_trained(span, policy_version, max_staleness) > 0
        THEN policy_version - span.version END
    ));
"""
"""What a trained token is, in SQL: fresh enough for the step, and chosen by the policy.

`areal_flow.algorithms.staleness` says it in Python, and a test holds both equal. Spans are those of
`chosen_spans`: version spans, each with its number of tokens that `loss_mask` keeps.
"""

_TRAJECTORIES = """
CREATE VIEW trajectories AS
WITH consumed AS (
    SELECT
        stored.*,
        decode_tokens(prompt_tokens) AS prompt,
        decode_tokens(output_tokens) AS completion,
        status,
        step,
        policy_version,
        reason,
        reward_detail->>'verdict' AS verdict,
        len(output_tokens) AS num_tokens,
        flatten(
            list_transform(
                version_spans, lambda span: list_resize([span.version], span.length, span.version)
            )
        ) AS token_versions,
        CASE WHEN status = 'trained' THEN chosen_spans(version_spans, loss_mask) END AS spans
    FROM stored
    JOIN consumption USING (trajectory_id, writer_epoch)
)
SELECT
    * EXCLUDE (spans),
    CASE WHEN status = 'trained' THEN trained_tokens(spans, policy_version, {max_staleness}) END
        AS num_trained_tokens,
    num_tokens - num_trained_tokens AS num_masked_tokens,
    staleness_sum(spans, policy_version, {max_staleness}) / nullif(num_trained_tokens, 0)
        AS staleness
FROM consumed
"""


def connect(
    tables: Mapping[str, Any], *, decode: Decode, max_staleness: int
) -> duckdb.DuckDBPyConnection:
    """Return a connection with the views of this module.

    Args:
        tables: Arrow tables or datasets by name: `stored` (trajectories), `consumption`, `steps`
            and whatever else the run has.
        decode: turns tokens into text.
        max_staleness: of the run, in versions.
    """
    connection = duckdb.connect()
    # An open connection with a Python function in it complains when the interpreter ends.
    atexit.register(_close_if_open, weakref.ref(connection))
    # DuckDB takes an Arrow dataset for one row and would build hash tables from payloads: joins
    # stay as they are written, the small side on the right.
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET disabled_optimizers = 'join_order,build_side_probe_side'")
    for name, table in tables.items():
        connection.register(name, table)
    connection.create_function("decode_tokens", decode, ["INTEGER[]"], "VARCHAR", type="arrow")
    connection.execute(TOKEN_MACROS)
    connection.execute(_TRAJECTORIES.format(max_staleness=max_staleness))
    return connection


def _close_if_open(connection: weakref.ref[duckdb.DuckDBPyConnection]) -> None:
    if (still_open := connection()) is not None:
        still_open.close()
