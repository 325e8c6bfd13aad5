-- What rules ask of the trajectories in a `batch`, and what is kept of it.

CREATE OR REPLACE TEMP TABLE facts AS
SELECT trajectory_id, group_id, submission_index, member, branch, seed, reward,
       verifier, writer_epoch, difficulty, finish_reason = 'length' AS truncated,
       finish_reason = 'error' AS failed,
       _rowid AS commit_order,
       len(loss_mask) AS num_tokens,
       coalesce(
           list_bool_and(list_transform(behavior_logprobs, lambda logprob: isfinite(logprob))), true
       ) AS finite,
       chosen_spans(version_spans, loss_mask) AS spans,
       coalesce(list_max(list_transform(
           list_filter(spans, lambda span: span.length > 0), lambda span: span.version)), -1
       ) AS newest_version,
       CASE WHEN found_hash <> content_hash THEN [content_hash, found_hash] END AS other_content,
       list_filter([
           CASE WHEN source <> expected_source THEN 'source' END,
           CASE WHEN prompt_id <> expected_prompt_id THEN 'prompt_id' END,
           CASE WHEN difficulty <> expected_difficulty THEN 'difficulty' END,
           CASE WHEN prompt_tokens <> expected_prompt_tokens THEN 'prompt_tokens' END
       ], lambda name: name IS NOT NULL) AS other_prompt
FROM batch;

INSERT INTO log BY NAME
SELECT trajectory_id, submission_index, reward, verifier, difficulty, truncated, failed,
       commit_order, num_tokens, finite, spans, newest_version
FROM facts;

INSERT INTO dropped
SELECT trajectory_id FROM batch WHERE len(output_tokens) = 0 AND len(loss_mask) > 0;
