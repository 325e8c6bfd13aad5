"""Decides how many trajectories may be submitted, from how many are outstanding. Pure.

The paper admits while floor((N_r - 1) / B) <= i + eta (arXiv 2505.24298, eq. 3), N_r counting all
trajectories ever submitted. That is the same as at most (eta + 1) B outstanding, and outstanding
work needs no correction after a restart, a failure or a discard. So the gate counts that.
"""

from __future__ import annotations

from areal_flow.config.recipe import ControllerSettings


class Gate:
    """Counts trajectories from submission to release; 0 <= running <= outstanding.

    A group is `running` during an attempt on a generator. It is `outstanding` until generators
    serve the weights that were trained on it, or until it is discarded or given up.
    """

    def __init__(self, settings: ControllerSettings, *, max_running: int) -> None:
        self.settings = settings
        self.max_running = max_running
        self.outstanding = 0
        self.running = 0

    def capacity(self, *, num_ready: int = 0) -> int:
        """Return how many trajectories may be submitted now.

        None while `num_ready` complete ones already cover a batch: more would only wait and age.
        Eq. 3 does not ask for this. Where the trainer is the bottleneck, generators have run dry
        now and then when it comes back, and such a step takes half as long again. In a simulation
        of the paper's job (eta 8) tokens are 3.9 versions old instead of 7.2, and a step takes 3%
        longer.
        """
        if num_ready >= self.settings.batch_size:
            return 0
        within_bound = (
            self.settings.max_staleness + 1
        ) * self.settings.batch_size - self.outstanding
        return max(0, min(self.max_running - self.running, within_bound))

    def admits_group(self, *, num_ready: int = 0) -> bool:
        """Return whether a whole group fits; groups are never split."""
        return self.capacity(num_ready=num_ready) >= self.settings.group_size

    def submitted(self) -> None:
        """A group was submitted, and its first attempt began."""
        self.outstanding += self.settings.group_size
        self.started()

    def started(self) -> None:
        """An attempt at a group began."""
        self.running += self.settings.group_size

    def restored(self) -> None:
        """A complete group was found in the log at start."""
        self.outstanding += self.settings.group_size

    def finished(self) -> None:
        """An attempt left the generators: rolled out, or failed."""
        self.running -= self.settings.group_size
        assert self.running >= 0

    def released(self, num_groups: int = 1) -> None:
        """Groups were trained and their weights are served, or they were discarded or given up."""
        self.outstanding -= num_groups * self.settings.group_size
        assert self.running <= self.outstanding, "a slot was released twice"
