"""The log on disk: trajectories, the step ledger, evaluations. The only importer of Lance."""
