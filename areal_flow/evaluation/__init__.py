"""How good a policy is on prompts that training never sees."""
