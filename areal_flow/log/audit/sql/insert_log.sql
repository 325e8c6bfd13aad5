-- What is kept of trajectories that were read (`batch`).

INSERT INTO log BY NAME
SELECT trajectory_id, group_id, submission_index, member, branch, seed, reward,
       verifier, writer_epoch, difficulty, finish_reason = 'length' AS truncated,
       finish_reason = 'error' AS failed,
       _rowid AS commit_order,
       len(loss_mask) AS num_tokens,
       coalesce(
           list_bool_and(list_transform(behavior_logprobs, lambda logprob: isfinite(logprob))), true
       ) AS finite,
       chosen_spans(version_spans, loss_mask) AS spans,
       CASE WHEN found_hash <> content_hash THEN [content_hash, found_hash] END AS other_content,
       list_filter([
           CASE WHEN source <> expected_source THEN 'source' END,
           CASE WHEN prompt_id <> expected_prompt_id THEN 'prompt_id' END,
           CASE WHEN difficulty <> expected_difficulty THEN 'difficulty' END,
           CASE WHEN prompt_tokens <> expected_prompt_tokens THEN 'prompt_tokens' END
       ], lambda name: name IS NOT NULL) AS other_prompt
FROM batch;

INSERT INTO dropped
SELECT trajectory_id FROM batch WHERE len(output_tokens) = 0 AND len(loss_mask) > 0;
