-- Tables that are filled before any rule is asked; those of the ledger are in ledger_tables.sql.

CREATE MACRO differs(a, b) AS
    isnan(a::DOUBLE) <> isnan(b::DOUBLE) OR abs(a - b) > 1e-9 * greatest(1, abs(a), abs(b));

-- Up to which step an earlier audit verified the run, and from which one the ledger is read again;
-- the sums up to then. One row; before the first step if everything is read.
CREATE TABLE base (
    step BIGINT, first_step BIGINT, num_tokens BIGINT, num_consumed_tokens BIGINT,
    next_open_submission BIGINT
);

-- Submissions that were committed or given up by then, beside all before next_open_submission.
CREATE TABLE closed (submission_index BIGINT);

-- Every trajectory that was read. Only what rules ask for is kept: counts by version span, no token.
CREATE TABLE log (
    trajectory_id VARCHAR, submission_index BIGINT, reward DOUBLE, verifier VARCHAR,
    difficulty INTEGER, truncated BOOLEAN, failed BOOLEAN, commit_order BIGINT, num_tokens BIGINT,
    finite BOOLEAN, spans STRUCT("version" INTEGER, length INTEGER, num_chosen BIGINT)[],
    newest_version INTEGER -- of its tokens
);

-- Ids that several different prompts of one prompt table share.
CREATE TABLE repeated_ids (place VARCHAR, prompt_id VARCHAR, num_prompts BIGINT);

-- How many rows the dataset of trajectories has. Watermarks count superseded drivers' rows, too.
CREATE TABLE dataset (num_rows BIGINT);

-- What rules need of the recipe: one row, or none if it cannot be read.
CREATE TABLE recipe (
    config_hash VARCHAR, code_version VARCHAR, seed BIGINT, group_size BIGINT,
    groups_per_step BIGINT, max_staleness BIGINT, pass_threshold DOUBLE
);

-- The verifiers that inputs.json names, and the first writer epoch of each.
CREATE TABLE verifiers (since_epoch BIGINT, verifier VARCHAR);

-- Replays that made other weights than recorded_hash.
CREATE TABLE forks (
    step BIGINT, recorded_hash VARCHAR, weights_hash VARCHAR, served_hash VARCHAR
);

-- Directories of checkpoints and of published weights, by the step in their name.
CREATE TABLE files (kind VARCHAR, step BIGINT);

-- What each checkpoint says of itself, and what was found of its files.
CREATE TABLE checkpoints (
    place VARCHAR, listed_step BIGINT, step BIGINT, next_submission_index BIGINT,
    config_hash VARCHAR, weights_hash VARCHAR, optimizer_hash VARCHAR,
    found_weights_hash VARCHAR, found_optimizer_hash VARCHAR, other_files VARCHAR
);

-- Published weights: the hash beside the tensors, and theirs.
CREATE TABLE published (
    place VARCHAR, step BIGINT, recorded_hash VARCHAR, tensors_hash VARCHAR
);

-- What the run was forked from, and the weights hash that the parent's ledger has of that step, null
-- if nobody can say; no row for a run that began by itself.
CREATE TABLE parents (name VARCHAR, step BIGINT, weights_hash VARCHAR, ledger_hash VARCHAR);

-- Trajectories without the tokens that they had: `log.keep_tokens_of` drops those of old steps.
CREATE TABLE dropped (trajectory_id VARCHAR);
