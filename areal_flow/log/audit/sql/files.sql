-- Rules of checkpoints and published weights: tensors, their descriptions and the ledger agree.

-- rule checkpoint-step: checkpoint
SELECT place, 'step ' || listed_step || ' in state.json', step FROM checkpoints
WHERE step <> listed_step;

-- rule checkpoint-weights: checkpoint
SELECT place, weights_hash || ', by state.json', found_weights_hash FROM checkpoints
WHERE found_weights_hash <> weights_hash;

-- rule checkpoint-optimizer: checkpoint
SELECT place, optimizer_hash || ', by state.json', found_optimizer_hash FROM checkpoints
WHERE found_optimizer_hash <> optimizer_hash;

-- rule checkpoint-model: description
SELECT place, 'the ' || other_files || ' of the run''s model directory', 'another'
FROM checkpoints WHERE other_files <> '';

-- rule checkpoint-ledger: disagree
WITH facts AS (
    SELECT c.place, c.listed_step, unnest([
        {'name': 'weights_hash', 'ledger': s.weights_hash, 'found': c.weights_hash},
        {'name': 'config_hash', 'ledger': s.config_hash, 'found': c.config_hash},
        {'name': 'next_submission_index', 'ledger': s.next_submission_index::VARCHAR,
         'found': c.next_submission_index::VARCHAR}
    ]) AS fact
    FROM checkpoints AS c JOIN recorded AS s ON s.step = c.listed_step
)
SELECT place, fact.name || ' ' || fact.ledger || ', by the ledger', fact.found
FROM facts WHERE fact.ledger <> fact.found AND NOT EXISTS (
    FROM forks WHERE forks.step = listed_step AND forks.weights_hash = fact.found);

-- rule weights-hash: weights
SELECT place, recorded_hash || ', by its hash file', tensors_hash FROM published
WHERE tensors_hash <> recorded_hash;

-- rule weights-ledger: weights
SELECT p.place, steps.served_hash || ', by the ledger', p.recorded_hash
FROM published AS p JOIN recorded AS steps USING (step)
WHERE p.recorded_hash <> steps.served_hash AND NOT EXISTS (
    FROM forks WHERE forks.step = p.step AND forks.served_hash = p.recorded_hash);
