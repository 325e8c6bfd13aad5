"""The only importer of Dask below `pipelines`: a run's workers, and protocols over tasks."""
