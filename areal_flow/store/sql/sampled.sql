-- How many tokens of each sampling version each of the last $num_steps steps trained, or masked.

WITH spans AS (
    SELECT step, policy_version, unnest(chosen_spans(version_spans, loss_mask)) AS span
    FROM trajectories
    WHERE status = 'trained' AND step > (SELECT max(step) FROM steps) - $num_steps
)
SELECT step, span.version AS version,
       sum(num_trained(span, policy_version, max_staleness()))::BIGINT AS num_trained_tokens,
       sum(span.length)::BIGINT AS num_tokens
FROM spans GROUP BY ALL ORDER BY ALL
