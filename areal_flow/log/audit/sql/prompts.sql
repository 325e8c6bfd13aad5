-- Rules of the prompt tables.

-- rule prompt-id: prompts
SELECT place || ', id ' || prompt_id, 'one prompt', num_prompts || ' that differ' FROM repeated_ids;
