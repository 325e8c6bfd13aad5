# Start the run, or continue it if a driver began it before. `exec`: SIGTERM reaches the driver.
# Arguments: a recipe and settings; the settings here are those of these manifests.
if [ -e "/runs/$RUN" ]; then
    exec areal-flow train --resume "$RUN" --runs /runs
fi
exec areal-flow train --name "$RUN" --runs /runs --cluster.launcher kubernetes \
    --cluster.network.host 0.0.0.0 \
    --cluster.kubernetes.templates '{all = "/etc/areal-flow/worker.yaml"}' "$@"
