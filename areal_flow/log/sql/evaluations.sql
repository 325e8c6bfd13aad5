-- Held-out answers (`stored_evaluations`) and whether each passes.

CREATE VIEW evaluations AS
SELECT *, passes(reward, pass_threshold()) AS passed FROM stored_evaluations;
