"""One file a command: its arguments, and which part of `pipelines` it calls. Light to import."""
