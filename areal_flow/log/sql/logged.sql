-- Trajectories (`stored`) with the columns that follow from the log alone.

CREATE VIEW logged AS
SELECT
    *,
    decode_tokens(prompt_tokens) AS prompt,
    decode_tokens(output_tokens) AS completion,
    reward_detail->>'verdict' AS verdict,
    passes(reward, pass_threshold()) AS passed,
    len(output_tokens) AS num_tokens,
    flatten(
        list_transform(
            version_spans, lambda span: list_resize([span.version], span.length, span.version)
        )
    ) AS token_versions
FROM stored;
