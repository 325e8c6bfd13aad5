-- Rules between the index, from which queries answer, and what it was made from.

-- rule index-differs: index
WITH said AS (
    SELECT step, count(*) AS num, bit_xor(hash(trajectory_id, status, reward)) AS content
    FROM indexed GROUP BY step
),
logged AS (
    SELECT step, count(*) AS num, bit_xor(hash(trajectory_id, status, reward)) AS content
    FROM consumed_trajectories WHERE is_indexed(commit_order) GROUP BY step
)
SELECT 'index, step ' || step,
       coalesce(logged.num, 0) || ' trajectories, by log and ledger',
       coalesce(said.num, 0) || CASE WHEN said.num = logged.num THEN ' others' ELSE '' END
FROM logged FULL JOIN said USING (step)
WHERE said.num IS DISTINCT FROM logged.num OR said.content IS DISTINCT FROM logged.content;
