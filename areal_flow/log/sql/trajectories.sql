-- Trajectories (`logged`) with what became of them (`consumption`), and the columns that follow.

CREATE VIEW trajectories AS
WITH consumed AS (
    SELECT
        logged.*,
        status,
        step,
        policy_version,
        reason,
        importance_weight_mean,
        importance_weight_max,
        CASE WHEN status = 'trained' THEN chosen_spans(version_spans, loss_mask) END AS spans
    FROM logged
    JOIN consumption USING (trajectory_id, writer_epoch)
)
SELECT
    * EXCLUDE (spans),
    CASE WHEN status = 'trained' THEN trained_tokens(spans, policy_version, max_staleness()) END
        AS num_trained_tokens,
    num_tokens - num_trained_tokens AS num_masked_tokens,
    staleness_sum(spans, policy_version, max_staleness()) / nullif(num_trained_tokens, 0)
        AS staleness
FROM consumed;
