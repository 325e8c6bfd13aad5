"""How good a policy is: answers to held-out prompts, pass rates and paired comparisons."""
