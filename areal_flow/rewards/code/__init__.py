"""Judges programs by running them in sandboxes."""
