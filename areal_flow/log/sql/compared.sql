-- Answers of the first evaluation beside those of the last, a few prompts of each set and difficulty.

WITH counted AS (
    FROM answers WHERE verifier = (SELECT arg_max(verifier, evaluated_at) FROM answers)
),
made AS (
    SELECT evaluation, policy_version,
           row_number() OVER (ORDER BY max(evaluated_at)) AS place, count(*) OVER () AS num_made
    FROM counted GROUP BY ALL
),
placed AS (
    SELECT * FROM counted JOIN made USING (evaluation, policy_version) WHERE sample = 0
)
SELECT before.difficulty, before.prompt, before.answer,
       before.completion AS before, before.reward AS reward_before,
       passes(before.reward, $threshold) AS passed_before,
       after.completion AS after, after.reward AS reward_after,
       passes(after.reward, $threshold) AS passed_after
FROM placed AS before JOIN placed AS after USING (held_out, prompt_id)
WHERE before.place = 1 AND after.place = after.num_made
    AND before.policy_version <> after.policy_version
QUALIFY row_number() OVER (PARTITION BY held_out, before.difficulty ORDER BY hash(prompt_id)) <= 2
    AND dense_rank() OVER (ORDER BY held_out, before.difficulty) <= 8
ORDER BY held_out, before.difficulty, hash(prompt_id)
