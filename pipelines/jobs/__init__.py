"""One file per job: what it prepares, runs and prints at its end."""
