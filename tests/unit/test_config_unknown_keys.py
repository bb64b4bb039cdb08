"""A misspelt or misplaced key is refused with its file, line and path, and the nearest valid one (cases C02, C04)."""

from pathlib import Path

import pytest

from tests.unit.config_text import MINIMAL, error_lines


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("num_expert", "num_experts"), ("num-experts", "num_experts"), ("Num_Experts", "num_experts")],
)
def test_a_misspelt_key_of_the_layer_is_refused(tmp_path: Path, key: str, nearest: str) -> None:
    # case C02
    lines = error_lines(tmp_path, MINIMAL.replace("num_experts: 8", f"{key}: 8"))
    assert f"config.yaml:4: moe.{key} is not a setting. Did you mean {nearest}?" in lines
    missing = "moe.num_experts is missing; add it under moe: an integer from 1 to 2147483647"
    assert f"config.yaml:1: {missing} (routed experts over all ranks, E)." in lines
    assert len(lines) == 2


def test_a_misspelt_key_of_a_nested_section_is_refused(tmp_path: Path) -> None:
    # case C02
    lines = error_lines(tmp_path, MINIMAL + "    topk_grp: 4\n")
    assert lines == ["config.yaml:7: moe.router.topk_grp is not a setting. Did you mean group_topk?"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("num_expert: 8", "num_expert is not a setting. Did you mean num_experts, which belongs under moe?"),
        ("topk_grp: 4", "topk_grp is not a setting. Did you mean group_topk, which belongs under moe.router?"),
        ("num-experts: 8", "num-experts is not a setting. Did you mean num_experts, which belongs under moe?"),
        ("router: {topk: 2}", "router is not a setting. router belongs under moe."),
        ("ep_size: 2", "ep_size is not a setting. Did you mean size, which belongs under moe.ep?"),
        ("zebra: 2", "zebra is not a setting. Nothing has a similar name; valid at the top level: moe, model, train."),
    ],
)
def test_an_unknown_key_at_the_top_level_is_refused(tmp_path: Path, line: str, told: str) -> None:
    # case C02
    assert error_lines(tmp_path, MINIMAL + f"{line}\n") == [f"config.yaml:7: {told}"]


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("topk", "moe.fp8.topk is not a setting. topk belongs under moe.router."),
        ("top_k", "moe.fp8.top_k is not a setting. Did you mean topk, which belongs under moe.router?"),
        ("lr", "moe.fp8.lr is not a setting. lr belongs under train."),
        ("model", "moe.fp8.model is not a setting. model belongs at the top level."),
    ],
)
def test_a_valid_key_in_the_wrong_section_is_told_its_section(tmp_path: Path, key: str, told: str) -> None:
    # case C04
    assert error_lines(tmp_path, MINIMAL + f"  fp8:\n    {key}: 2\n") == [f"config.yaml:8: {told}"]


def test_whatever_is_below_an_unknown_key_is_left_alone(tmp_path: Path) -> None:
    lines = error_lines(tmp_path, MINIMAL + "expert_parallel:\n  - {a: [1, {b: 2}]}\n")
    assert lines == [
        "config.yaml:7: expert_parallel is not a setting. Nothing has a similar name; "
        "valid at the top level: moe, model, train."
    ]


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    text = """\
        moe:
          hidden_size: 0
          ffn_hidden_size: 16
          num_experts: 8
          router:
            topk: 2
            score_function: softmx
          ep:
            aligment: 4
        """
    assert error_lines(tmp_path, text) == [
        "config.yaml:2: moe.hidden_size is 0; set it to an integer from 1 to 2147483647 (width of a token, H).",
        "config.yaml:7: moe.router.score_function is 'softmx'; set it to one of softmax, sigmoid "
        "(how logits become scores). Did you mean softmax?",
        "config.yaml:9: moe.ep.aligment is not a setting. Did you mean alignment?",
    ]
