"""What a model's directory says beside its weights: tokenizer, chat template and stop tokens."""
