#!/usr/bin/env bash
# Runs a command under CUDA MPS, so that processes which share a GPU run at the same time: with_mps.sh COMMAND [ARG...]
#
# The daemon gets fresh folders, is tried with one small program (by $PYTHON, default python3), and is told to quit when
# the command ends, whatever its end. Where there is no MPS, or it does not serve, the command runs without it and a
# sentence says so: the results are the same, the processes take turns. The exit code is the command's.
set -u

if [ $# -eq 0 ]; then
  echo "with_mps: no command was given; write with_mps.sh COMMAND [ARG...]." >&2
  exit 2
fi
if ! command -v nvidia-cuda-mps-control > /dev/null; then
  echo "with_mps: nvidia-cuda-mps-control is not on PATH, so without MPS: processes on one GPU take turns." >&2
  exec "$@"
fi

folder=$(mktemp -d "${TMPDIR:-/tmp}/mps.XXXXXX")
mkdir "$folder/pipe" "$folder/log"
started=no
child=

stop() {
  if [ "$started" = yes ]; then
    started=no
    echo quit | CUDA_MPS_PIPE_DIRECTORY="$folder/pipe" CUDA_MPS_LOG_DIRECTORY="$folder/log" \
      timeout 30 nvidia-cuda-mps-control > /dev/null 2>&1 \
      || echo "with_mps: the daemon did not answer to quit within 30 s; its folder was $folder." >&2
  fi
  rm -rf "$folder"
}
end_with() {
  if [ -n "$child" ]; then kill "$child" 2> /dev/null && wait "$child" 2> /dev/null; fi
  exit "$1"
}
trap stop EXIT
trap 'end_with 129' HUP
trap 'end_with 130' INT
trap 'end_with 143' TERM

export CUDA_MPS_PIPE_DIRECTORY="$folder/pipe" CUDA_MPS_LOG_DIRECTORY="$folder/log"
probe='import torch; assert torch.ones(2, device="cuda").sum().item() == 2'
if timeout 30 nvidia-cuda-mps-control -d > "$folder/log/start" 2>&1 && started=yes \
  && timeout 120 "${PYTHON:-python3}" -c "$probe" > "$folder/log/probe" 2>&1; then
  echo "with_mps: MPS serves." >&2
else
  echo "with_mps: MPS does not serve here ($(cat "$folder"/log/{start,probe} 2> /dev/null | tail -n 1))," \
    "so without it: processes on one GPU take turns." >&2
  stop
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
fi
"$@" &
child=$!
wait "$child"
