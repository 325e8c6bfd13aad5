-- What passes: a reward above the threshold; none never is. `areal_flow.core.pass_rates` says it in
-- Python, and a test holds both equal.

CREATE MACRO passes(reward, threshold) AS coalesce(reward > threshold, false);
