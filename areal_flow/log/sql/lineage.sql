-- What the last of `steps` was made from: trajectories that are trained, and what follows.

CREATE VIEW used AS
FROM trajectories WHERE status = 'trained' ORDER BY step, trajectory_id;

CREATE VIEW ledger_rows AS
SELECT step, parent_hash, weights_hash, served_hash, policy_version, writer_epoch,
       num_trained_tokens, num_masked_tokens, reward_mean, loss, trajectory_watermark,
       config_hash, code_version, numeric_environment, committed_at
FROM steps ORDER BY step;

CREATE VIEW weights_hashes AS
SELECT step, parent_hash, weights_hash, served_hash,
       parent_hash = lag(weights_hash, 1, '') OVER (ORDER BY step) AS follows
FROM steps ORDER BY step;

CREATE VIEW used_prompts AS
SELECT prompt_id, any_value(difficulty) AS difficulty, count(*) AS num_trajectories,
       avg(reward) AS reward_mean, min(step) AS first_step, max(step) AS last_step
FROM used GROUP BY source, prompt_id ORDER BY source, prompt_id;

CREATE VIEW verifiers AS
SELECT verifier, count(*) AS num_trajectories, min(step) AS first_step, max(step) AS last_step
FROM used GROUP BY verifier ORDER BY first_step, verifier;

CREATE VIEW sampled AS
WITH spans AS (
    SELECT step, policy_version, unnest(chosen_spans(version_spans, loss_mask)) AS span
    FROM used
)
SELECT step, span.version AS version,
       sum(num_trained(span, policy_version, max_staleness()))::BIGINT AS num_trained_tokens,
       sum(span.length)::BIGINT AS num_tokens
FROM spans WHERE span.length > 0 GROUP BY ALL ORDER BY ALL;

CREATE VIEW policy_versions AS
SELECT version, sum(num_trained_tokens)::BIGINT AS num_trained_tokens,
       sum(num_tokens - num_trained_tokens)::BIGINT AS num_masked_tokens
FROM sampled GROUP BY version ORDER BY version;
