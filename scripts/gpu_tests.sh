#!/usr/bin/env bash
# Runs tests/gpu on the GPUs at hand and prints how many tests ran: gpu_tests.sh PYTHON [PYTEST-ARGUMENT...]
#
# First under MPS where it serves, then those marked no_mps without it: a rank that is killed under MPS takes its
# neighbours along. The exit code is 0 if nothing failed and at least one test ran.
set -u
python=$1
shift
cd "$(dirname "$0")/.."
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
export PYTHON="$python" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

options=(--session-timeout=2400)
if ! "$python" -c "import pytest_timeout" 2> /dev/null; then
  # Its settings in pyproject.toml would be errors, and a stuck test has no limit but ours.
  echo "gpu_tests: pytest-timeout is not installed, so the tests have no limit of their own."
  options=(-o "addopts=-ra" -W "ignore::pytest.PytestUnknownMarkWarning" -W "ignore::pytest.PytestConfigWarning")
fi
status=0
scripts/with_mps.sh "$python" -m pytest tests/gpu -m "not no_mps and not slow" "${options[@]}" \
  --junitxml="$reports/shared.xml" "$@" || status=$?
alone=0
"$python" -m pytest tests/gpu -m "no_mps and not slow" "${options[@]}" --junitxml="$reports/alone.xml" "$@" || alone=$?
for code in "$status" "$alone"; do
  if [ "$code" -ne 0 ] && [ "$code" -ne 5 ]; then failed=$code; fi  # 5: no test has the mark
done
"$python" scripts/count_tests.py "$reports/shared.xml" "$reports/alone.xml" || failed=1
exit "${failed:-0}"
