"""Policies and how they attend; shared by the torch engine and the trainer."""
