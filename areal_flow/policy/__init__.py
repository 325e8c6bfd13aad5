"""The policy: as tensors (models), as tokens (tokenizer), in transit (weights) and at rest."""
