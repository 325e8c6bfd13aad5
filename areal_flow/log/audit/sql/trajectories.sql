-- Rules of each trajectory alone, asked of one batch at a time.

-- rule trajectory-id: log
SELECT trajectory_id, right_id, trajectory_id
FROM (SELECT *, printf('%08d-%04d-%02d', submission_index, member, branch) AS right_id FROM facts)
WHERE trajectory_id <> right_id;

-- rule group-id: log
SELECT trajectory_id, right_id, group_id
FROM (SELECT *, printf('%08d', submission_index) AS right_id FROM facts)
WHERE group_id <> right_id;

-- rule group-size: log
SELECT trajectory_id, 'a member below group_size ' || group_size, member FROM facts, recipe
WHERE member >= group_size;

-- rule versions-decrease: log
SELECT trajectory_id, 'versions that never decrease', versions
FROM (SELECT *, list_transform(spans, lambda span: span.version) AS versions FROM facts)
WHERE versions <> list_sort(versions);

-- rule content-hash: log
SELECT trajectory_id, other_content[1], other_content[2] FROM facts WHERE other_content IS NOT NULL;

-- rule seed: log
SELECT trajectory_id, right_seed, seed
FROM (SELECT trajectory_id, facts.seed, seed_of(recipe.seed, submission_index, member) AS right_seed
      FROM facts, recipe)
WHERE seed <> right_seed;

-- rule trajectory-verifier: verifier
SELECT trajectory_id, verifiers.verifier, facts.verifier
FROM facts ASOF JOIN verifiers ON facts.writer_epoch >= verifiers.since_epoch
WHERE facts.verifier <> verifiers.verifier;

-- rule prompt: log
SELECT trajectory_id, unnest(other_prompt) || ' of the prompt table at its submission', 'another'
FROM facts;
