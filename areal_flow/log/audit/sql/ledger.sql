-- Rules of the step ledger: its order, its chain of hashes, what only ever grows, and that nothing
-- is consumed twice.

-- rule step-twice: ledger
SELECT place, 'one row a step', 'another row of the same step' FROM ledger
QUALIFY row_number() OVER (PARTITION BY step) > 1;

-- rule step-missing: ledger
SELECT place, 'step ' || (before + 1) || ' before it', 'no such row'
FROM (SELECT *, lag(step, 1, (SELECT first_step - 1 FROM base)) OVER (ORDER BY step) AS before
      FROM steps)
WHERE step > before + 1;

-- rule policy-version: ledger
SELECT place, greatest(0, step - 1), policy_version FROM ledger
WHERE policy_version <> greatest(0, step - 1);

-- rule batch-digest: ledger
SELECT place, found_digest, batch_digest FROM ledger WHERE batch_digest <> found_digest;

-- rule batch-order: ledger
SELECT place, 'trajectory ids ascending', 'another order' FROM ledger WHERE NOT is_sorted;

-- rule genesis: ledger
SELECT place, 'no trajectories and no parent', 'some' FROM ledger
WHERE step = 0 AND (num_trained > 0 OR parent_hash <> '');

-- rule fork-genesis: parent
SELECT steps.place, 'weights_hash ' || parents.weights_hash || ', of step ' || parents.step
       || ' of run ' || parents.name || ', by run.json', steps.weights_hash
FROM recorded AS steps, parents WHERE steps.step = 0 AND steps.weights_hash <> parents.weights_hash;

-- rule fork-parent: parent
SELECT 'run.json', 'weights_hash ' || ledger_hash || ', by the ledger of run ' || name || ', step '
       || step, weights_hash
FROM parents WHERE ledger_hash <> weights_hash;

-- rule watermark-order: ledger
SELECT place, 'trajectory_watermark of at least ' || before, trajectory_watermark
FROM (SELECT *, lag(trajectory_watermark) OVER (ORDER BY step) AS before FROM steps)
WHERE trajectory_watermark < before;

-- rule cursor-order: ledger
SELECT place, 'next_submission_index of at least ' || before, next_submission_index
FROM (SELECT *, lag(next_submission_index) OVER (ORDER BY step) AS before FROM steps)
WHERE next_submission_index < before;

-- rule epoch-order: ledger
SELECT place, 'writer_epoch of at least ' || before, writer_epoch
FROM (SELECT *, lag(writer_epoch) OVER (ORDER BY step) AS before FROM steps)
WHERE writer_epoch < before;

-- rule parent-hash: ledger
SELECT steps.place, 'weights_hash of ' || before.place || ', ' || before.weights_hash,
       steps.parent_hash
FROM steps JOIN steps AS before ON before.step = steps.step - 1
WHERE steps.parent_hash <> before.weights_hash AND NOT EXISTS (
    FROM forks WHERE forks.step = before.step AND forks.weights_hash = steps.parent_hash);

-- rule fork-recorded: ledger
SELECT 'forks.jsonl, step ' || step,
       'the ledger''s weights_hash, ' || coalesce(steps.weights_hash, 'none'), recorded_hash
FROM forks LEFT JOIN recorded AS steps USING (step)
WHERE recorded_hash IS DISTINCT FROM steps.weights_hash
  AND (step >= (SELECT first_step FROM base) OR steps.weights_hash IS NOT NULL);

-- rule config-hash: recipe
-- Rows of another version of this program are left out: it may know other settings.
SELECT place, 'the hash of config.toml, ' || recipe.config_hash, ledger.config_hash
FROM ledger JOIN recipe USING (code_version)
WHERE ledger.config_hash <> recipe.config_hash;

-- rule verifier: verifier
SELECT place, verifiers.verifier, steps.verifier
FROM steps ASOF JOIN verifiers ON steps.writer_epoch >= verifiers.since_epoch
WHERE steps.verifier <> verifiers.verifier;

-- rule batch-size: ledger
SELECT place, groups_per_step || ' groups', num_groups || ' groups'
FROM recipe, ledger
WHERE step > 0 AND num_groups <> groups_per_step;

-- rule staleness-bound: ledger
SELECT place, 'at most ' || max_staleness, staleness_max FROM steps, recipe
WHERE staleness_max > max_staleness;

-- rule trained-twice: ledger
SELECT place, 'once', 'also trained in ' || earlier FROM repeated WHERE status = 'trained';

-- rule discarded-twice: ledger
SELECT place, 'once', 'also discarded in ' || earlier FROM repeated WHERE status = 'discarded';

-- rule given-up-twice: ledger
SELECT place, 'once', 'also in ' || earlier FROM repeated WHERE status = 'given up';

-- rule trained-and-discarded: ledger
SELECT trajectory_id, 'either trained or discarded',
       'trained in step ' || min(step) FILTER (status = 'trained')
       || ', discarded in step ' || min(step) FILTER (status = 'discarded')
FROM consumed WHERE hash(trajectory_id) IN (FROM consumed_twice)
GROUP BY trajectory_id HAVING count(DISTINCT status) > 1;

-- rule checkpoint-beyond-ledger: checkpoint
SELECT 'checkpoint ' || step, 'a step of the ledger, 0 to ' || head, 'a later one'
FROM files, (SELECT coalesce(max(step), -1) AS head FROM steps)
WHERE kind = 'checkpoint' AND step > head AND NOT (step = 0 AND EXISTS (FROM parents));

-- rule weights-beyond-ledger: weights
SELECT 'weights ' || step, 'a step of the ledger, 0 to ' || head, 'a later one'
FROM files, (SELECT coalesce(max(step), -1) AS head FROM steps)
WHERE kind = 'weights' AND step > head;

-- rule checkpoint-missing: file
SELECT 'checkpoint 0', 'the policy before training', 'none'
WHERE EXISTS (FROM steps WHERE step > 0)
  AND NOT EXISTS (FROM files WHERE kind = 'checkpoint' AND step = 0);
