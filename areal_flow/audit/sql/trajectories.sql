-- Rules of each trajectory alone.

-- rule trajectory-twice: log
SELECT trajectory_id, 'one row', 'another row of the same id' FROM log
QUALIFY row_number() OVER (PARTITION BY trajectory_id) > 1;

-- rule trajectory-id: log
SELECT trajectory_id, right_id, trajectory_id
FROM (SELECT *, printf('%08d-%04d-%02d', submission_index, member, branch) AS right_id FROM log)
WHERE trajectory_id <> right_id;

-- rule group-id: log
SELECT trajectory_id, right_id, group_id
FROM (SELECT *, printf('%08d', submission_index) AS right_id FROM log)
WHERE group_id <> right_id;

-- rule group-size: log
SELECT trajectory_id, 'a member below group_size ' || group_size, member FROM log, recipe
WHERE member >= group_size;

-- rule versions-decrease: log
SELECT trajectory_id, 'versions that never decrease', versions
FROM (SELECT *, list_transform(spans, lambda span: span.version) AS versions FROM log)
WHERE versions <> list_sort(versions);
