#!/usr/bin/env bash
# Builds moe_ep._C in place for the GPUs at hand: gpu_build.sh PYTHON
# MOE_EP_CUDA_ARCHS names other architectures; sm_90 and later with a letter have instructions that need one.
set -eu
python=$1
cd "$(dirname "$0")/.."
if [ -z "${MOE_EP_CUDA_ARCHS:-}" ]; then
  MOE_EP_CUDA_ARCHS=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sort -u \
    | awk '{ sub(/\./, ""); printf("%ssm_%s%s", (NR > 1 ? "," : ""), $1, ($1 >= 90 ? "a" : "")) }')
  export MOE_EP_CUDA_ARCHS
fi
MOE_EP_BUILD_CUDA=1 "$python" setup.py --quiet build_ext --inplace
"$python" -c 'from moe_ep import _native; print(f"moe_ep is built {_native.describe()}.")'
