"""Tokenizers, chat templates and stop tokens of model directories."""
