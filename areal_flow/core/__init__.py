"""What every package exchanges: types, errors, settings, digests, and the layout of a run."""
