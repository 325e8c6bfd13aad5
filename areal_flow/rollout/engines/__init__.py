"""Engines: they complete prompts, and new weights reach them while they do."""
