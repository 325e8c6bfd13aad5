-- The curves of a run, of steps after $since: numbers of the ledger's rows, without their ids.

SELECT
    step,
    reward_mean AS reward,
    reward_mean - 1.96 * metrics['rollout/reward_std'] / sqrt($num_prompts) AS reward_low,
    reward_mean + 1.96 * metrics['rollout/reward_std'] / sqrt($num_prompts) AS reward_high,
    completion_tokens_mean AS length,
    metrics['rollout/completion_p10_tokens'] AS length_low,
    metrics['rollout/completion_p90_tokens'] AS length_high,
    staleness_mean AS staleness,
    staleness_mean AS staleness_low,
    staleness_max AS staleness_high,
    num_masked_tokens / nullif(num_trained_tokens + num_masked_tokens, 0) AS masked
FROM ledger WHERE step > greatest($since, 0) ORDER BY step
