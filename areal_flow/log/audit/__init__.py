"""The rules of a run directory, and the reports of what breaks them."""
