#!/usr/bin/env bash
# Starts a program with one process a GPU on several nodes; run it on each of them, with its number:
#
#   launch_torchrun.sh --nodes N --node I --master HOST [--gpus G] [--port P] [--dry-run] -- PROGRAM [ARG...]
#
# Ranks are numbered node by node, as backend `internode` wants them. Prints the command; --dry-run starts nothing. Under
# srun the node's number need not be given.
set -euo pipefail

nodes="" node=${SLURM_NODEID:-} master="" gpus=8 port=29500 dry_run=no
usage() {
  echo "launch_torchrun: $1; write launch_torchrun.sh --nodes N --node I --master HOST [--gpus G] -- PROGRAM [ARG...]." >&2
  exit 2
}
while [ $# -gt 0 ]; do
  case "$1" in
    --nodes | --node | --master | --gpus | --port)
      [ $# -ge 2 ] || usage "$1 has no value"
      declare "${1#--}=$2"
      shift 2
      ;;
    --dry-run) dry_run=yes && shift ;;
    --) shift && break ;;
    *) usage "$1 is unknown before --" ;;
  esac
done
for name in nodes node master; do
  [ -n "${!name}" ] || usage "--$name is missing"
done
for name in nodes node gpus port; do
  [[ "${!name}" =~ ^[0-9]+$ ]] || usage "--$name is '${!name}', not a number"
done
[ "$node" -lt "$nodes" ] || usage "--node is $node, but nodes are numbered from 0 to $((nodes - 1))"
[ $# -gt 0 ] || usage "no program was given"

# One thread a process for the CPU side, unless told otherwise: there is a process for every GPU.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
command=("${PYTHON:-python3}" -m torch.distributed.run --nnodes "$nodes" --node-rank "$node" --nproc-per-node "$gpus"
  --master-addr "$master" --master-port "$port" "$@")
printf 'launch_torchrun:' && printf ' %q' "${command[@]}" && echo
[ "$dry_run" = yes ] || exec "${command[@]}"
