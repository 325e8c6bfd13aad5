-- What a trained token is: fresh enough for the step, and chosen by the policy.
-- `areal_flow.algorithms.staleness` says it in Python, and a test holds both equal. Spans are those
-- of `chosen_spans`: version spans, each with its number of tokens that `loss_mask` keeps.

CREATE MACRO tokens_until(spans, i) AS
    coalesce(list_sum(list_transform(spans[:i], lambda span: span.length)), 0);

CREATE MACRO num_chosen(mask) AS coalesce(list_sum(mask::INT[]), 0)::BIGINT;

CREATE MACRO chosen_spans(spans, mask) AS list_transform(spans, lambda span, i: {
    'version': span.version,
    'length': span.length,
    'num_chosen':
        num_chosen(mask[tokens_until(spans, i) - span.length + 1 : tokens_until(spans, i)])
});

CREATE MACRO num_trained(span, policy_version, max_staleness) AS
    CASE WHEN policy_version - span.version <= max_staleness THEN span.num_chosen ELSE 0 END;

CREATE MACRO trained_tokens(spans, policy_version, max_staleness) AS
    coalesce(list_sum(list_transform(
        spans, lambda span: num_trained(span, policy_version, max_staleness)
    )), 0)::BIGINT;

CREATE MACRO staleness_sum(spans, policy_version, max_staleness) AS
    list_sum(list_transform(spans, lambda span:
        num_trained(span, policy_version, max_staleness) * (policy_version - span.version)
    ))::BIGINT;

CREATE MACRO staleness_max(spans, policy_version, max_staleness) AS
    list_max(list_transform(spans, lambda span:
        CASE WHEN num_trained(span, policy_version, max_staleness) > 0
        THEN policy_version - span.version END
    ));
