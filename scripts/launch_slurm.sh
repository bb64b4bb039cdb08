#!/usr/bin/env bash
#SBATCH --job-name=moe_ep
#SBATCH --ntasks-per-node=1
#SBATCH --distribution=block
# Starts a program with one process a GPU on the nodes of a Slurm job, by torchrun on each of them:
#
#   sbatch --nodes N --gpus-per-node G launch_slurm.sh PROGRAM [ARG...]
#
# Run from the folder that PROGRAM is named from. Prints the command of every node; DRY_RUN=1 starts nothing.
set -euo pipefail

if [ $# -eq 0 ]; then
  echo "launch_slurm: no program was given; write sbatch --nodes N --gpus-per-node G launch_slurm.sh PROGRAM [ARG...]." >&2
  exit 2
fi
for name in SLURM_JOB_NODELIST SLURM_NNODES SLURM_JOB_ID; do
  if [ -z "${!name:-}" ]; then
    echo "launch_slurm: $name is not set, so this is no Slurm job; use sbatch, or launch_torchrun.sh on each node." >&2
    exit 2
  fi
done
# Slurm runs a copy of this file from a folder of its own.
folder=${SLURM_SUBMIT_DIR:-$PWD}/scripts
[ -f "$folder/launch_torchrun.sh" ] || folder=$(cd "$(dirname "$0")" && pwd)
master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
gpus=${SLURM_GPUS_ON_NODE:-8}
port=$((20000 + SLURM_JOB_ID % 20000))
start=("$folder/launch_torchrun.sh" --nodes "$SLURM_NNODES" --master "$master" --gpus "$gpus" --port "$port")
if [ -n "${DRY_RUN:-}" ]; then
  for ((node = 0; node < SLURM_NNODES; ++node)); do
    "${start[@]}" --node "$node" --dry-run -- "$@"
  done
  exit
fi
# srun numbers the nodes; each finds its own number in its environment.
exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 "${start[@]}" -- "$@"
