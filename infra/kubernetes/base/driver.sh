# Start the run, or continue it if a driver began it before. `exec`: SIGTERM reaches the driver.
if [ -e "/runs/$RUN" ]; then
    exec areal-flow train --resume "$RUN" --runs /runs
fi
exec areal-flow train /etc/areal-flow/recipe.toml --name "$RUN" --runs /runs
