-- Each trajectory that a step trained or discarded, as often as a row says so, and where it does.
-- `consumed_twice` has the hashes of ids that are named more than once.

CREATE VIEW placed AS
SELECT consumed.*, steps.place, steps.policy_version, steps.trajectory_watermark,
       steps.verifier AS step_verifier
FROM consumed JOIN steps USING (step);

CREATE VIEW repeated AS
WITH said AS (
    SELECT place, step, status, trajectory_id AS what FROM placed
    WHERE hash(trajectory_id) IN (FROM consumed_twice)
    UNION ALL
    SELECT place, step, 'given up', 'group ' || unnest(failed_submissions) FROM steps
)
SELECT status, place || ', ' || what AS place,
       first_value(place) OVER (PARTITION BY status, what ORDER BY step) AS earlier
FROM said
QUALIFY row_number() OVER (PARTITION BY status, what ORDER BY step) > 1;
