-- Rules between ledger and log: what was trained, discarded or given up, and every number of the
-- ledger that can be counted again.

-- rule trajectory-twice: log
SELECT trajectory_id, 'one row', 'another row of the same id' FROM log
WHERE hash(trajectory_id) IN (FROM logged_twice)
QUALIFY row_number() OVER (PARTITION BY trajectory_id) > 1
UNION ALL
-- Only the group that the base divides has rows on both sides.
SELECT trajectory_id, 'one row', 'a row of a submission that was closed by step ' || base.step
FROM log, base WHERE is_closed(submission_index, next_open_submission)
AND submission_index <> (SELECT arg_min(submission_index, commit_order) FROM log);

-- rule unknown-trajectory: both
SELECT place || ', ' || trajectory_id,
       'a trajectory of the log' || CASE WHEN base.step < 0 THEN '' ELSE
           ' that no step had consumed, as step ' || base.step || ' was verified' END,
       'none of that id'
FROM placed ANTI JOIN trajectories USING (trajectory_id), base WHERE placed.step > base.step;

-- rule consumed-before-commit: both
SELECT row_place, 'committed before the row: below watermark ' || trajectory_watermark,
       'commit order ' || commit_order
FROM consumed_trajectories WHERE commit_order >= trajectory_watermark;

-- rule given-up-committed: both
SELECT place || ', group ' || submission_index, 'one or the other', 'given up, and committed'
FROM (SELECT place, unnest(failed_submissions) AS submission_index FROM steps)
SEMI JOIN log USING (submission_index)
UNION ALL
SELECT place || ', group ' || submission_index, 'a submission that was open at step ' || base.step,
       'committed or given up by then'
FROM base, (SELECT step, place, unnest(failed_submissions) AS submission_index FROM steps) AS gone
WHERE gone.step > base.step AND is_closed(submission_index, next_open_submission);

-- rule watermark-beyond-log: both
SELECT place, 'a trajectory_watermark of at most ' || num_rows || ', the rows of the log',
       trajectory_watermark
FROM steps, dataset WHERE trajectory_watermark > num_rows;

-- rule cursor-behind-log: both
SELECT place, 'a next_submission_index beyond ' || furthest_submission, next_submission_index
FROM recounted WHERE furthest_submission >= next_submission_index;

-- rule step-tokens: both
SELECT place, log_step_tokens || ' tokens, by the log', num_trained_tokens + num_masked_tokens
FROM recounted WHERE log_step_tokens <> num_trained_tokens + num_masked_tokens;

-- rule generated-tokens: both
SELECT place, log_generated_tokens || ' tokens, by the log', num_generated_tokens
FROM recounted WHERE log_generated_tokens <> num_generated_tokens;

-- rule discarded-tokens: both
SELECT place, log_discarded_tokens || ' tokens, by the log', num_discarded_tokens
FROM recounted WHERE log_discarded_tokens <> num_discarded_tokens;

-- rule waiting-tokens: both
SELECT place, log_waiting_tokens || ' tokens, by the log', num_waiting_tokens
FROM recounted WHERE log_waiting_tokens <> num_waiting_tokens;

-- rule reward-mean: both
SELECT place, log_reward_mean || ', by the log', reward_mean
FROM recounted WHERE differs(log_reward_mean, reward_mean);

-- rule batch-metrics: both
SELECT place, printf('%s %.12g, by the log', name, value), printf('%.12g', metrics[name])
FROM batch_metrics JOIN steps USING (step) WHERE differs(value, metrics[name]);

-- rule staleness-counts: both
WITH facts AS (
    SELECT place, unnest([
        {'name': 'num_trained_tokens', 'log': log_num_trained_tokens::DOUBLE,
         'ledger': num_trained_tokens::DOUBLE},
        {'name': 'num_masked_tokens', 'log': log_num_masked_tokens, 'ledger': num_masked_tokens},
        {'name': 'staleness_max', 'log': log_staleness_max, 'ledger': staleness_max},
        {'name': 'staleness_mean', 'log': log_staleness_mean, 'ledger': staleness_mean}
    ]) AS fact
    FROM recounted WHERE can_be_masked_again
)
SELECT place, printf('%s %.12g, by version spans', fact.name, fact.log),
       printf('%.12g', fact.ledger)
FROM facts WHERE differs(fact.log, fact.ledger);

-- rule newer-version: both
SELECT row_place, 'tokens of version ' || policy_version || ' or older',
       'a token of version ' || newest_version
FROM consumed_trajectories WHERE status = 'trained' AND newest_version > policy_version;

-- rule trained-unscored: both
SELECT row_place, 'a reward', 'none' FROM consumed_trajectories
WHERE status = 'trained' AND reward IS NULL;

-- rule trained-not-finite: both
SELECT row_place, 'finite log-probabilities', 'infinities or NaN' FROM consumed_trajectories
WHERE status = 'trained' AND NOT finite;

-- rule trained-other-verifier: verifier
SELECT row_place, 'scored by the verifier of the step, ' || step_verifier, verifier
FROM consumed_trajectories WHERE status = 'trained' AND verifier <> step_verifier;

-- rule discard-reason: both
SELECT row_place, 'a reason that holds', reason FROM consumed_trajectories, recipe
WHERE status = 'discarded' AND NOT CASE reason
    WHEN 'stale' THEN policy_version - newest_version > max_staleness
    WHEN 'verifier_error' THEN reward IS NULL
    WHEN 'workflow_error' THEN failed
    WHEN 'other_verifier' THEN verifier <> step_verifier
    WHEN 'beyond_head' THEN newest_version > policy_version
    ELSE true END;

-- rule tokens-dropped: both
SELECT trajectory_id, 'tokens, which a restored trainer may need', 'none'
FROM dropped LEFT JOIN consumed USING (trajectory_id), (
    SELECT coalesce(min(step), 0) AS oldest FROM files WHERE kind = 'checkpoint' AND step > 0)
WHERE step IS NULL OR step > oldest;
