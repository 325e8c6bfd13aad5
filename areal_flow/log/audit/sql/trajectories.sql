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

-- rule content-hash: log
SELECT trajectory_id, other_content[1], other_content[2] FROM log WHERE other_content IS NOT NULL;

-- rule seed: log
SELECT trajectory_id, right_seed, seed
FROM (SELECT trajectory_id, log.seed, seed_of(recipe.seed, submission_index, member) AS right_seed
      FROM log, recipe)
WHERE seed <> right_seed;

-- rule trajectory-verifier: verifier
SELECT trajectory_id, verifiers.verifier, log.verifier
FROM log ASOF JOIN verifiers ON log.writer_epoch >= verifiers.since_epoch
WHERE log.verifier <> verifiers.verifier;

-- rule prompt: log
SELECT trajectory_id, unnest(other_prompt) || ' of the prompt table at its submission', 'another'
FROM log;
