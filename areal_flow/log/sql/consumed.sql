-- What consumed means: a row each time that a row of the ledger names a trajectory.

CREATE MACRO consumed_by(steps) AS TABLE
SELECT step, policy_version, unnest(trajectory_ids) AS trajectory_id, 'trained' AS status,
       NULL::VARCHAR AS reason, unnest(importance_weight_means) AS importance_weight_mean,
       unnest(importance_weight_maxima) AS importance_weight_max
FROM query_table(steps)
UNION ALL
SELECT step, policy_version, discard.trajectory_id, 'discarded', discard.reason, NULL, NULL
FROM (SELECT step, policy_version, unnest(discarded) AS discard FROM query_table(steps));
