-- Groups of `members`: rows of the log without tokens, joined with `consumption` and `prompts`.

SELECT
    submission_index AS "group",
    round(avg(reward), 3) AS reward,
    CASE
        WHEN bool_or(status = 'trained') THEN 'step ' || max(step) FILTER (status = 'trained')
        ELSE coalesce(any_value(reason), 'waiting')
    END AS status,
    left(replace(coalesce(first(prompts.prompt), any_value(members.prompt_id)), chr(10), ' '), 200)
        AS prompt,
    round(avg(list_sum(list_transform(version_spans, lambda span: span.length))), 1) AS tokens,
    concat_ws(' to ', min(list_min(list_transform(version_spans, lambda span: span.version))), nullif(
        max(list_max(list_transform(version_spans, lambda span: span.version))),
        min(list_min(list_transform(version_spans, lambda span: span.version)))
    )) AS versions,
    concat_ws(' to ', min(reward), nullif(max(reward), min(reward))) AS rewards,
    any_value(members.difficulty) AS difficulty,
    count(*) AS members
FROM members
JOIN consumption USING (trajectory_id, writer_epoch)
LEFT JOIN (
    SELECT DISTINCT ON (prompt_id) prompt_id, prompt FROM prompts
    WHERE prompt_id IN (SELECT prompt_id FROM members)
) AS prompts USING (prompt_id)
GROUP BY submission_index
