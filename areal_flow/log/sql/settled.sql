-- The settled past after the newest of `steps`. The parameters are the past before it, from which on
-- `steps` and `log` were read. No row if no step is later.

WITH later AS (FROM steps WHERE step > $step),
cut AS MATERIALIZED (
    SELECT coalesce(
        (SELECT min(commit_order) FROM log ANTI JOIN consumed USING (trajectory_id)),
        (SELECT max(commit_order) + 1 FROM log), $watermark
    ) AS watermark
),
settled AS (SELECT submission_index, num_tokens FROM log, cut WHERE commit_order < watermark),
beyond AS (SELECT trajectory_id FROM log, cut WHERE commit_order >= watermark),
closed AS (
    SELECT submission_index FROM settled
    UNION
    SELECT unnest(failed_submissions) FROM later
)
SELECT {'step': step, 'writer_epoch': writer_epoch, 'batch_digest': batch_digest,
        'weights_hash': weights_hash, 'watermark': watermark,
        'ledger_since': coalesce(
            (SELECT min(step) FROM consumed SEMI JOIN beyond USING (trajectory_id)), step + 1),
        'num_tokens': $num_tokens + coalesce((SELECT sum(num_tokens) FROM settled), 0)},
       (SELECT list(submission_index) FROM closed),
       (SELECT {'num_generated_tokens': $num_generated_tokens + sum(num_generated_tokens),
                'num_trained_tokens': $num_trained_tokens + sum(num_trained_tokens),
                'num_masked_tokens': $num_masked_tokens + sum(num_masked_tokens),
                'num_discarded_tokens': $num_discarded_tokens + sum(num_discarded_tokens)}
        FROM later)
FROM cut, (FROM later ORDER BY step DESC LIMIT 1);
