"""The folders of csrc, read from its includes: each stands on those below it, and every include names its folder."""

import re
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"

# What the files of a folder may include, besides their own folder's; docs/design.md says what they hold.
BELOW: dict[str, set[str]] = {
    "common": set(),
    "exchange": {"common"},
    "fp8": {"common"},
    "layer": {"common"},
    "intranode": {"common", "exchange"},
    "low_latency": {"common", "exchange", "fp8"},
    "internode": {"common", "exchange", "intranode"},
}
BELOW["bindings"] = set(BELOW)
BELOW["nvshmem"] = {"exchange", "low_latency", "internode", "bindings"}


def test_every_file_of_csrc_lies_in_a_folder_that_is_named_here() -> None:
    assert {path.name for path in CSRC.iterdir()} == set(BELOW)


def test_files_include_their_own_folder_and_those_below() -> None:
    wrong = []
    for path in sorted(CSRC.glob("*/*")):
        folder = path.parent.name
        for included in re.findall(r'#include "(.*)"', path.read_text()):
            assert (CSRC / included).is_file(), f"{path.relative_to(CSRC)} includes {included}, which is not there"
            if included.split("/")[0] not in BELOW[folder] | {folder}:
                wrong.append(f"{path.relative_to(CSRC)} includes {included}")
    assert not wrong, "Folders of csrc stand on those below them alone: " + "; ".join(wrong)


def test_the_folders_stand_on_each_other_without_a_circle() -> None:
    laid: set[str] = set()
    for folder, below in BELOW.items():
        assert below <= laid, folder
        laid.add(folder)
