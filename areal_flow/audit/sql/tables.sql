-- Tables of the ledger, from what was read of it: the view `stored_ledger`.

CREATE TABLE ledger AS SELECT *, 'step ' || step AS place FROM stored_ledger;

CREATE TABLE steps AS
SELECT * EXCLUDE (position) FROM ledger
QUALIFY row_number() OVER (PARTITION BY step ORDER BY position) = 1;

CREATE VIEW consumed AS
SELECT place, step, policy_version, trajectory_watermark,
       'trained' AS status, unnest(trajectory_ids) AS trajectory_id, NULL AS reason
FROM steps
UNION ALL
SELECT place, step, policy_version, trajectory_watermark,
       'discarded', discard.trajectory_id, discard.reason
FROM (SELECT *, unnest(discarded) AS discard FROM steps);

CREATE VIEW repeated AS
WITH said AS (
    SELECT place, step, status, trajectory_id AS what FROM consumed
    UNION ALL
    SELECT place, step, 'given up', 'group ' || unnest(failed_submissions) FROM steps
)
SELECT status, place || ', ' || what AS place,
       first_value(place) OVER (PARTITION BY status, what ORDER BY step) AS earlier
FROM said
QUALIFY row_number() OVER (PARTITION BY status, what ORDER BY step) > 1;
