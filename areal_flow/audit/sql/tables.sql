-- Tables of the ledger, from what was read of it (`stored_ledger`), and of what every reader of a run
-- means by consumed.

CREATE TABLE ledger AS SELECT *, 'step ' || step AS place FROM stored_ledger;

CREATE TABLE steps AS
SELECT * EXCLUDE (position) FROM ledger
QUALIFY row_number() OVER (PARTITION BY step ORDER BY position) = 1;

CREATE VIEW consumed AS
SELECT said.*, steps.place, steps.trajectory_watermark
FROM ({consumed}) AS said JOIN steps USING (step);

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
