"""What an episode is: from a prompt to the trajectories that one member of its group makes."""
