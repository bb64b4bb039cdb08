"""Adds up JUnit reports: `count_tests.py REPORT...` prints one line; exit code 1 if a test failed or none ran."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path


def count(reports: Sequence[Path]) -> tuple[int, int, int]:
    """(passed, skipped, failed) over reports; one that is not there counts as a failure, for its run died."""
    total = skipped = failed = 0
    for report in reports:
        if not report.exists():
            failed += 1
            total += 1
            continue
        for suite in ElementTree.parse(report).iter("testsuite"):
            total += int(suite.get("tests", 0))
            skipped += int(suite.get("skipped", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return total - skipped - failed, skipped, failed


def main() -> int:
    passed, skipped, failed = count([Path(name) for name in sys.argv[1:]])
    print(f"test-gpu: {passed} tests passed, {failed} failed, {skipped} skipped.")
    if not passed:
        print("test-gpu: no test ran, so nothing counts as passed; the reasons of the skips are above.")
    return int(bool(failed) or not passed)


if __name__ == "__main__":
    raise SystemExit(main())
