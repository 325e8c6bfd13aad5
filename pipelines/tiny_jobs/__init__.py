"""The own parts of the jobs that ship: questions, and policies small enough for a laptop."""
