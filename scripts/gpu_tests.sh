#!/usr/bin/env bash
# Runs tests/gpu on the GPUs at hand and prints how many tests ran: gpu_tests.sh PYTHON [PYTEST-ARGUMENT...]
#
# First under MPS where it serves, GPU_JOBS files at a time (default 1; 6 take a quarter of the time on two H200), each
# on its share of the SMs, then, alone and without MPS, those marked no_mps: a rank that is killed under MPS takes its
# neighbours along. The exit code is 0 if nothing failed and at least one test ran.
set -u
python=$1
shift
cd "$(dirname "$0")/.."
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
export PYTHON="$python" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" reports

options=(--session-timeout=2400)
if ! "$python" -c "import pytest_timeout" 2> /dev/null; then
  # Its settings in pyproject.toml would be errors, and a stuck test has no limit but ours.
  echo "gpu_tests: pytest-timeout is not installed, so the tests have no limit of their own."
  options=(-o "addopts=-ra" -W "ignore::pytest.PytestUnknownMarkWarning" -W "ignore::pytest.PytestConfigWarning")
fi

# run_tests NAME MARKS ARGUMENT...: pytest with a report of that name; no test with these marks is no failure.
run_tests() {
  local name=$1 marks=$2 code=0
  shift 2
  "$PYTHON" -m pytest -m "$marks and not slow" --junitxml="$reports/$name.xml" "$@" || code=$?
  [ "$code" -eq 5 ] || return "$code"
}

# One file of several at a time: its last line, what it ran on, what it left out and why; and all of it if it failed.
run_file() {
  local file=$1 name code=0
  shift
  name=$(basename "$file" .py)
  run_tests "$name" "not no_mps" "$file" "$@" > "$reports/$name.log" 2>&1 || code=$?
  [ "$code" -eq 0 ] || cat "$reports/$name.log"
  echo "$file: $(tail -n 1 "$reports/$name.log")"
  grep -E "^(SKIPPED|internode, |NVSHMEM)" "$reports/$name.log" | sort -u
  return "$code"
}

run_files() {
  printf '%s\n' tests/gpu/test_*.py | xargs -P "$jobs" -I FILE bash -c 'run_file "$@"' gpu_tests FILE "$@"
}
export -f run_tests run_file run_files

failed=0
export GPU_JOBS=${GPU_JOBS:-1}
export jobs=$GPU_JOBS
if [ "$jobs" -gt 1 ]; then
  scripts/with_mps.sh bash -c 'run_files "$@"' gpu_tests "${options[@]}" "$@" || failed=1
else
  scripts/with_mps.sh bash -c 'run_tests shared "not no_mps" tests/gpu "$@"' gpu_tests "${options[@]}" "$@" || failed=1
fi
run_tests alone no_mps tests/gpu "${options[@]}" "$@" || failed=1
"$python" scripts/count_tests.py "$reports"/*.xml || failed=1
exit "$failed"
