"""The table of marks and the picture, from rows that were made up."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks.marks import BASE, MARKS, judge, table
from benchmarks.plot import draw
from benchmarks.records import Record, default_path, read, write

FIXED_KEYS = (
    "op system backend transport layout dtype world nodes gpus tokens hidden num_experts topk routing num_sms "
    "registered time_us time_us_p10 time_us_p90 host_us kernel_us remote_bytes gbps ceiling_gbps hardware versions "
    "commit"
).split()


def row(op: str, time_us: float, **changes: Any) -> dict[str, Any]:
    made = {
        **BASE,
        "op": op,
        "backend": "intranode",
        "transport": "sm",
        "layout": "compact",
        "dtype": "bfloat16",
        "nodes": 1,
        "num_sms": 24,
        "registered": False,
        "time_us": time_us,
        "time_us_p10": time_us,
        "time_us_p90": time_us,
        "host_us": 50.0,
        "kernel_us": None,
        "remote_bytes": 58_000_000,
        "gbps": 58_000 / time_us,
        "ceiling_gbps": 390.0,
        "hardware": "2 x GPU",
        "versions": "python 3, torch 2, deep_ep not installed",
        "commit": "abc",
    }
    return made | changes


def verdict(name: str, rows: list[dict[str, Any]]) -> str:
    (mark,) = [mark for mark in MARKS if mark.name == name]
    return judge(mark, rows).verdict


def test_the_keys_of_a_record_are_fixed() -> None:
    assert [field.name for field in fields(Record)] == FIXED_KEYS
    assert sorted(row("combine", 1.0)) == sorted(FIXED_KEYS)


def test_records_come_out_of_a_file_as_they_went_in_and_appended_ones_behind(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    write(path, [Record(**row("combine", 200.0))])
    write(path, [Record(**row("dispatch", 300.0))], append=True)
    assert read(path) == [row("combine", 200.0), row("dispatch", 300.0)]
    path.write_text('{"op": 1}\nnot json\n')
    with pytest.raises(ValueError, match=r"line 2 of .* is no JSON object"):
        read(path)


def test_a_results_file_is_named_by_topic_hardware_and_date() -> None:
    assert default_path("ep", "2 x NVIDIA H200").name.startswith("ep-2-x-nvidia-h200-20")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "not measured: the file has no row of cached_dispatch"),
        ([row("cached_dispatch", 200.0, gpus=1)], "not measured: the rows of cached_dispatch were not taken on 2 GPUs"),
        (
            [row("cached_dispatch", 200.0, num_sms=32)],
            "not measured: no row of cached_dispatch has this shape, input and layout with at most 24 SMs",
        ),
        ([row("cached_dispatch", 200.0)], "met; not measured: deep_ep not installed"),
        ([row("cached_dispatch", 225.5)], "missed by 20.5 us (10%); not measured: deep_ep not installed"),
        ([row("cached_dispatch", 200.0), row("cached_dispatch", 350.0, system="deep_ep")], "met"),
        (
            [row("cached_dispatch", 200.0), row("cached_dispatch", 300.0, system="deep_ep")],
            "missed by 1.50x instead of 1.70x",
        ),
    ],
)
def test_a_mark_is_met_missed_by_how_much_or_not_measured_and_why(rows: list[dict[str, Any]], said: str) -> None:
    assert verdict("dispatch bf16, handle given", rows) == said


def test_the_fastest_row_within_the_sm_budget_counts() -> None:
    rows = [row("combine", 215.0, num_sms=16), row("combine", 205.0), row("combine", 150.0, num_sms=64)]
    assert verdict("combine bf16", rows).startswith("met")


def test_marks_beside_another_row_of_ours_look_at_that_row() -> None:
    rows = [row("dispatch", 250.0), row("cached_dispatch", 200.0)]
    assert verdict("first dispatch over the cached one", rows) == "missed by 10.0 us (25%)"
    rows = [row("combine", 500.0, num_sms=8, registered=True), row("combine", 200.0, num_sms=16, registered=True)]
    assert verdict("combine, 8 SMs: half of 16 SMs, registered", rows) == "missed by 10 points"
    assert verdict("combine, 8 SMs: half of 16 SMs, registered", rows[:1]) == "not measured: no row with 16 SMs"
    assert verdict("host time of a combine", [row("combine", 200.0, host_us=75.0)]) == "missed by 15.0 us (25%)"


def test_a_fused_mark_has_no_verdict_without_its_peer() -> None:
    rows = [row("dispatch", 300.0, layout="expert_major", num_sms=32)]
    assert verdict("dispatch to expert_major (fused permute)", rows) == "not measured: deep_ep not installed"
    rows.append(row("dispatch", 500.0, layout="expert_major", system="deep_ep+te"))
    assert verdict("dispatch to expert_major (fused permute)", rows) == "met"


def test_the_table_has_a_line_for_every_mark() -> None:
    text = table([row("cached_dispatch", 200.0), row("combine", 219.0)])
    assert all(mark.name in text for mark in MARKS)
    (line,) = [line for line in text.splitlines() if line.startswith("dispatch bf16, handle given  ")]
    assert "<= 205 us, >= 1.70x" in line
    assert "290 of 390 GB/s (74%)" in line
    assert "deep_ep (1.74x)" in line  # of an earlier run, so in brackets and without a verdict


def test_the_picture_is_drawn_from_rows_on_two_gpus_and_from_no_others(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(op, 200.0 + sms, num_sms=sms) for op in ("cached_dispatch", "combine") for sms in (8, 16, 24)]
    rows += [row("combine", 100.0, tokens=2048), row("cached_dispatch", 348.0, system="deep_ep")]
    rows += [row("combine", 300.0, system="nccl", num_sms=None)]
    path = tmp_path / "marks.png"
    assert draw(rows, path) == f"Picture: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw([row("combine", 1.0, gpus=1)], path).startswith("No picture: no row")


def test_without_matplotlib_a_sentence_takes_the_place_of_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert draw([row("combine", 1.0)], tmp_path / "x.png").startswith("No picture: matplotlib is not installed")


def test_rows_of_the_results_folder_can_be_read() -> None:
    for path in (Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"):
        assert all(json.dumps(line) and "time_us" in line for line in read(path)), path.name
