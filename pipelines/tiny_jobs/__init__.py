"""Prompts and demonstrations of the recipes that need no download, and their tiny policies."""
