-- What became of each trajectory of `log`, in its order.

SELECT log.trajectory_id, log.writer_epoch, coalesce(status, 'waiting') AS status, step,
       policy_version, reason, importance_weight_mean, importance_weight_max
FROM log LEFT JOIN (
    FROM consumed_by('steps') SEMI JOIN log USING (trajectory_id)
    QUALIFY row_number() OVER (PARTITION BY trajectory_id ORDER BY status DESC, step) = 1
) USING (trajectory_id)
ORDER BY log.position;
