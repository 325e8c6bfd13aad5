"""The page `/rl` of a run in Dask's dashboard: what it reads, what it computes, how it draws."""
