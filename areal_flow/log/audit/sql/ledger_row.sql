-- What is kept of the ledger's rows in a `batch`, `place` being how findings name a row. Ids have a
-- table of their own, since the ids of all rows do not fit into memory at once.

SELECT * EXCLUDE (
           trajectory_ids, discarded, importance_weight_means, importance_weight_maxima
       ),
       'step ' || step AS place,
       digest_of(policy_version, trajectory_ids) AS found_digest,
       trajectory_ids = list_sort(trajectory_ids) AS is_sorted,
       len(trajectory_ids) AS num_trained,
       len(list_distinct(list_transform(
           trajectory_ids, lambda identifier: split_part(identifier, '-', 1)))) AS num_groups
FROM batch
