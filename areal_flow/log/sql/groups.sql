-- Groups of `members`, rows of the view `indexed`, joined with `prompts`.

SELECT
    submission_index AS "group",
    round(avg(reward), 3) AS reward,
    CASE
        WHEN bool_or(status = 'trained') THEN 'step ' || max(step) FILTER (status = 'trained')
        ELSE coalesce(any_value(reason), 'waiting')
    END AS status,
    coalesce(any_value(prompt), any_value(prompt_id)) AS prompt,
    any_value(metadata) AS metadata,
    any_value(source) AS source,
    round(avg(list_sum([span.length FOR span IN version_spans])), 1) AS tokens,
    concat_ws(' to ', min(oldest), nullif(max(newest), min(oldest))) AS versions,
    concat_ws(
        ' to ', round(min(reward), 3), nullif(round(max(reward), 3), round(min(reward), 3))
    ) AS rewards,
    any_value(difficulty) AS difficulty,
    count(*) AS members
FROM (
    SELECT *, list_min([span.version FOR span IN version_spans]) AS oldest,
           list_max([span.version FOR span IN version_spans]) AS newest,
           asked.prompt, asked.metadata
    FROM members LEFT JOIN (
        SELECT source, prompt_id, any_value(prompt) AS prompt, any_value(metadata) AS metadata
        FROM prompts GROUP BY source, prompt_id
    ) AS asked USING (source, prompt_id)
)
GROUP BY submission_index
