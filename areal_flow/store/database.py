"""A run in, a DuckDB connection over it out: its tables as views, and what follows from them.

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
"""Lists of token ids in, texts out."""

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
        ) AS token_versions
    FROM stored
    JOIN consumption USING (trajectory_id, writer_epoch)
),
aged AS (
    SELECT
        *,
        CASE WHEN status = 'trained' THEN list_transform(
            list_filter(
                list_zip(token_versions, loss_mask),
                lambda token: token[2] AND policy_version - token[1] <= {max_staleness}
            ),
            lambda token: policy_version - token[1]
        ) END AS trained_ages
    FROM consumed
)
SELECT
    * EXCLUDE (trained_ages),
    len(trained_ages) AS num_trained_tokens,
    num_tokens - len(trained_ages) AS num_masked_tokens,
    list_avg(trained_ages) AS staleness
FROM aged
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
    connection.execute(_TRAJECTORIES.format(max_staleness=max_staleness))
    return connection


def _close_if_open(connection: weakref.ref[duckdb.DuckDBPyConnection]) -> None:
    if (still_open := connection()) is not None:
        still_open.close()
