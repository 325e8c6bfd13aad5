#!/bin/bash
# One Slurm job for a whole run: the driver, and its workers as steps on all nodes.
#
#     sbatch --account=rl --nodes=2 infra/slurm/nodes.sh deepscaler-7b /shared/runs mine --data rows.jsonl
#
# from a folder that all nodes see. Submit the same line again after the time limit: it resumes.
#SBATCH --job-name=areal-flow --nodes=2 --ntasks-per-node=1 --exclusive
#SBATCH --gpus-per-node=8 --time=24:00:00 --signal=B:TERM@120
set -eu
recipe=$1 runs=$2 name=$3
shift 3
# The interface between the nodes, if NCCL does not find the fastest: export NCCL_SOCKET_IFNAME=ib0
if [ -e "$runs/$name/config.toml" ]; then
    exec areal-flow train --resume "$name" --runs "$runs"
fi
exec areal-flow train "$recipe" --name "$name" --runs "$runs" \
    --cluster.launcher srun --cluster.network.host 0.0.0.0 "$@"
