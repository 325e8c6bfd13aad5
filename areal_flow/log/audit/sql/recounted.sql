-- The ledger's numbers, counted again from the log once both are complete. `logged_twice` has the
-- hashes of ids that the log has more than once.

CREATE VIEW trajectories AS
FROM log WHERE hash(trajectory_id) NOT IN (FROM logged_twice)
UNION ALL
FROM log WHERE hash(trajectory_id) IN (FROM logged_twice)
QUALIFY row_number() OVER (PARTITION BY trajectory_id ORDER BY commit_order) = 1;

CREATE MACRO is_closed(submission, next_open) AS
    submission < next_open OR submission IN (SELECT submission_index FROM closed);

CREATE VIEW consumed_trajectories AS
SELECT *, place || ', ' || trajectory_id AS row_place
FROM placed JOIN trajectories USING (trajectory_id);

-- Of the metrics of each step those that its batch makes, by name.
CREATE VIEW batch_metrics AS
WITH batch AS (
    SELECT *, passes(reward, pass_threshold) AS passed
    FROM consumed_trajectories, recipe
    WHERE status = 'trained' AND step > (SELECT step FROM base)
),
of_steps AS (
    SELECT step, avg(passed::INT) AS "rollout/pass_rate",
           coalesce(stddev_samp(reward), 0) AS "rollout/reward_std",
           avg(truncated::INT) AS "rollout/truncated_fraction"
    FROM batch GROUP BY step
),
lengths AS ( -- counted: DuckDB's quantiles keep all values of all steps in memory
    SELECT step, num_tokens, sum(count(*)) OVER (PARTITION BY step ORDER BY num_tokens) AS until,
           sum(count(*)) OVER (PARTITION BY step) - 1 AS last_place
    FROM batch GROUP BY step, num_tokens
),
of_lengths AS (
    SELECT step, share, any_value(share * last_place) AS exact_place,
           min(num_tokens) FILTER (until > floor(share * last_place)) AS below,
           min(num_tokens) FILTER (until > ceil(share * last_place)) AS above
    FROM lengths, (VALUES (0.1), (0.5), (0.9)) AS quantiles(share) GROUP BY step, share
),
of_groups AS (
    SELECT step, NOT differs(min(reward), max(reward)) AS is_flat
    FROM batch GROUP BY step, submission_index
)
SELECT step, name, value
FROM (UNPIVOT of_steps ON COLUMNS(* EXCLUDE step) INTO NAME name VALUE value)
UNION ALL
SELECT step, 'rollout/completion_p' || (100 * share)::INT || '_tokens',
       below + (above - below) * (exact_place - floor(exact_place))
FROM of_lengths
UNION ALL
SELECT step, 'rollout/zero_variance_groups_fraction', avg(is_flat::INT)
FROM of_groups GROUP BY step
UNION ALL
SELECT step, 'pass_rate/difficulty_' || difficulty, avg(passed::INT)
FROM batch GROUP BY step, difficulty;

CREATE TABLE recounted AS
WITH numbers AS ( -- a join by order copies what it joins: not the lists of ids
    SELECT * EXCLUDE failed_submissions FROM steps
),
marks AS (SELECT DISTINCT trajectory_watermark FROM steps),
between_marks AS ( -- the other way round, a row of the log for each mark takes DuckDB minutes
    SELECT trajectory_watermark, sum(num_tokens) AS num_tokens,
           max(submission_index) AS furthest_submission
    FROM log ASOF JOIN marks ON log.commit_order < marks.trajectory_watermark
    GROUP BY trajectory_watermark
),
so_far AS (
    SELECT trajectory_watermark, sum(num_tokens) OVER earlier AS num_tokens,
           max(furthest_submission) OVER earlier AS furthest_submission
    FROM marks LEFT JOIN between_marks USING (trajectory_watermark)
    WINDOW earlier AS (ORDER BY trajectory_watermark)
),
trained AS (
    SELECT step, count(*) AS num_known, sum(num_tokens) AS num_tokens,
           avg(coalesce(reward, 'NaN')) AS reward_mean,
           sum(trained_tokens(spans, policy_version, max_staleness)) AS num_trained_tokens,
           sum(staleness_sum(spans, policy_version, max_staleness)) AS staleness_sum,
           max(staleness_max(spans, policy_version, max_staleness)) AS staleness_max
    FROM consumed_trajectories LEFT JOIN recipe ON true
    WHERE status = 'trained' GROUP BY step
),
discarded AS (
    SELECT step, sum(num_tokens) AS num_tokens
    FROM consumed_trajectories WHERE status = 'discarded' GROUP BY step
)
SELECT numbers.*,
       so_far.furthest_submission,
       base.num_tokens + coalesce(so_far.num_tokens, 0) AS log_committed_tokens,
       coalesce(trained.num_tokens, 0) AS log_step_tokens,
       coalesce(discarded.num_tokens, 0) AS log_discarded_tokens,
       log_committed_tokens - lag(log_committed_tokens, 1, 0) OVER by_step AS log_generated_tokens,
       log_committed_tokens - base.num_consumed_tokens
           - coalesce(sum(log_step_tokens + log_discarded_tokens)
                 FILTER (numbers.step > base.step) OVER by_step, 0) AS log_waiting_tokens,
       trained.reward_mean AS log_reward_mean,
       coalesce(trained.num_known = num_trained, false)
           AND EXISTS (FROM recipe) AS can_be_masked_again,
       trained.num_trained_tokens AS log_num_trained_tokens,
       trained.num_tokens - trained.num_trained_tokens AS log_num_masked_tokens,
       coalesce(trained.staleness_max, 0) AS log_staleness_max,
       coalesce(trained.staleness_sum / nullif(trained.num_trained_tokens, 0), 0)
           AS log_staleness_mean
FROM numbers CROSS JOIN base
LEFT JOIN so_far ON so_far.trajectory_watermark = numbers.trajectory_watermark
LEFT JOIN trained ON trained.step = numbers.step
LEFT JOIN discarded ON discarded.step = numbers.step
WINDOW by_step AS (ORDER BY numbers.step)
QUALIFY numbers.step > base.step;
