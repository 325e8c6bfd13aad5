"""One file a job: what it prepares, drives and says at its end."""
