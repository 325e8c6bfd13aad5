-- The settled past after the newest of `steps`. The parameters are the past before it, from which on
-- `steps` and `log` were read. No row if no step is later.

WITH positions AS MATERIALIZED (
    SELECT commit_order, submission_index, num_tokens, step
    FROM log LEFT JOIN consumed USING (trajectory_id)
),
later AS (FROM steps WHERE step > $step),
cut AS (
    SELECT coalesce(
        min(commit_order) FILTER (step IS NULL), max(commit_order) + 1, $watermark
    ) AS watermark
    FROM positions
),
closed AS (
    SELECT submission_index FROM positions, cut WHERE commit_order < watermark
    UNION
    SELECT unnest(failed_submissions) FROM later
)
SELECT {'step': step, 'writer_epoch': writer_epoch, 'batch_digest': batch_digest,
        'weights_hash': weights_hash, 'watermark': watermark,
        'ledger_since': coalesce(
            (SELECT min(step) FROM positions, cut WHERE commit_order >= watermark), step + 1),
        'num_tokens': $num_tokens + coalesce(
            (SELECT sum(num_tokens) FROM positions, cut WHERE commit_order < watermark), 0)},
       (SELECT list(submission_index) FROM closed),
       (SELECT {'num_generated_tokens': $num_generated_tokens + sum(num_generated_tokens),
                'num_trained_tokens': $num_trained_tokens + sum(num_trained_tokens),
                'num_masked_tokens': $num_masked_tokens + sum(num_masked_tokens),
                'num_discarded_tokens': $num_discarded_tokens + sum(num_discarded_tokens)}
        FROM later)
FROM cut, (FROM later ORDER BY step DESC LIMIT 1);
