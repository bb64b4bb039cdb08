#!/usr/bin/env bash
# Looks for faults of memory and for races in shared memory while small exchanges run: sanitize.sh [PYTHON]
#
# compute-sanitizer's memcheck and racecheck on one and on two ranks, two minutes at most each. The flags between ranks
# are no matter for racecheck; tests/unit/test_flag_protocol.py explores those. The exit code is 0 if nothing was found.
set -u
python=${1:-python3}
cd "$(dirname "$0")/.."
tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null)
if [ -z "$tool" ]; then
  echo "sanitize: compute-sanitizer is not on PATH; it comes with the CUDA toolkit. Nothing was checked."
  exit 0
fi
failed=0
for check in memcheck racecheck; do
  for world in 1 2; do
    # Kernels with rings have hundreds of barriers in shared memory, which the tool does not count by itself.
    echo "sanitize: $check on $world rank(s)"
    timeout --kill-after=10 120 "$tool" --tool "$check" --target-processes all --kernel-regex kns=moe_ep_ \
      --num-cuda-barriers 512 --error-exitcode 9 "$python" -m tests.gpu.small_exchange "$world" || { failed=$?; echo "sanitize: exit code $failed"; }
  done
done
exit "$failed"
