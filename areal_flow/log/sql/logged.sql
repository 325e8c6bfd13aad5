-- Trajectories (`stored`) with the columns that follow from the log alone.

CREATE VIEW logged AS
SELECT
    *,
    decode_tokens(prompt_tokens) AS prompt,
    CASE WHEN len(output_tokens) = len(loss_mask) THEN decode_tokens(output_tokens) END
        AS completion,
    reward_detail->>'verdict' AS verdict,
    passes(reward, pass_threshold()) AS passed,
    len(loss_mask) AS num_tokens,
    flatten(
        list_transform(
            version_spans, lambda span: list_resize([span.version], span.length, span.version)
        )
    ) AS token_versions
FROM stored;
