-- Groups of `members`: rows of the log without tokens, joined with `consumption` and `prompts`.

SELECT
    submission_index AS "group",
    round(avg(reward), 3) AS reward,
    CASE
        WHEN bool_or(status = 'trained') THEN 'step ' || max(step) FILTER (status = 'trained')
        ELSE coalesce(any_value(reason), 'waiting')
    END AS status,
    left(replace(coalesce(any_value(prompt), any_value(prompt_id)), chr(10), ' '), 200) AS prompt,
    round(avg(list_sum([span.length FOR span IN version_spans])), 1) AS tokens,
    concat_ws(' to ', min(oldest), nullif(max(newest), min(oldest))) AS versions,
    concat_ws(' to ', min(reward), nullif(max(reward), min(reward))) AS rewards,
    any_value(difficulty) AS difficulty,
    count(*) AS members
FROM (
    SELECT *, list_min([span.version FOR span IN version_spans]) AS oldest,
           list_max([span.version FOR span IN version_spans]) AS newest,
           (SELECT any_value(prompt) FROM prompts
            WHERE source = members.source AND prompt_id = members.prompt_id) AS prompt
    FROM members JOIN consumption USING (trajectory_id, writer_epoch)
)
GROUP BY submission_index
