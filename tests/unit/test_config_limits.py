"""Values outside their range, and names of things that do not exist, are refused when loading (cases C05, C06)."""

from pathlib import Path

import pytest

from tests.unit.config_text import MINIMAL, error_lines, load_text

EP_SIZE_MEANING = "(ranks in the EP group; auto = all ranks of the group)"


@pytest.mark.parametrize("size", [0, -1])
def test_an_ep_size_below_one_is_refused(tmp_path: Path, size: int) -> None:
    # case C06
    assert error_lines(tmp_path, MINIMAL + f"  ep: {{size: {size}}}\n") == [
        f"config.yaml:7: moe.ep.size is {size}; set it to an integer from 1 to 2147483647, or auto {EP_SIZE_MEANING}."
    ]


def test_an_ep_size_that_does_not_divide_the_world_is_refused(tmp_path: Path) -> None:
    # case C06
    assert error_lines(tmp_path, MINIMAL + "  ep:\n    size: 3\n", world_size=4) == [
        "config.yaml:8: moe.ep.size is 3, which does not divide the world size 4 (the number of ranks). "
        "Set it to auto or to one of 1, 2, 4, or start another number of ranks."
    ]


def test_an_ep_size_larger_than_the_world_is_refused(tmp_path: Path) -> None:
    # case C06
    assert error_lines(tmp_path, MINIMAL + "  ep:\n    size: 8\n", world_size=2) == [
        "config.yaml:8: moe.ep.size is 8, which does not divide the world size 2 (the number of ranks). "
        "Set it to auto or to one of 1, 2, or start another number of ranks."
    ]


def test_no_experts_is_refused(tmp_path: Path) -> None:
    # case C06
    assert error_lines(tmp_path, MINIMAL.replace("num_experts: 8", "num_experts: 0")) == [
        "config.yaml:4: moe.num_experts is 0; set it to an integer from 1 to 2147483647 "
        "(routed experts over all ranks, E)."
    ]


def test_a_number_that_no_device_can_count_to_is_refused(tmp_path: Path) -> None:
    # case C06
    for number in (2**31, 2**63 - 1):
        assert error_lines(tmp_path, MINIMAL.replace("num_experts: 8", f"num_experts: {number}")) == [
            f"config.yaml:4: moe.num_experts is {number}; set it to an integer from 1 to 2147483647 "
            "(routed experts over all ranks, E)."
        ]


def test_of_many_divisors_the_first_are_listed(tmp_path: Path) -> None:
    # case G05: 2095133040 has 1600 divisors, more than any smaller number
    text = MINIMAL.replace("num_experts: 8", "num_experts: 2095133040")
    lines = error_lines(tmp_path, text.replace("topk: 2", "topk: 2\n    num_groups: 23\n    group_topk: 1"))
    assert lines == [
        "config.yaml:7: moe.router.num_groups is 23, which does not divide moe.num_experts = 2095133040. "
        "Set num_groups to one of 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 (1584 larger ones left out)."
    ]


def test_topk_zero_is_refused(tmp_path: Path) -> None:
    # case C06
    assert error_lines(tmp_path, MINIMAL.replace("topk: 2", "topk: 0")) == [
        "config.yaml:6: moe.router.topk is 0; set it to an integer from 1 to 64 (experts per token, K)."
    ]


@pytest.mark.parametrize(("text", "shown"), [("0", "0.0"), ("-5", "-5.0")])
def test_a_timeout_that_is_not_positive_is_refused(tmp_path: Path, text: str, shown: str) -> None:
    # case C06
    assert error_lines(tmp_path, MINIMAL + f"  ep: {{timeout_secs: {text}}}\n") == [
        f"config.yaml:7: moe.ep.timeout_secs is {shown}; set it to a finite number above 0 "
        "(limit on every wait, seconds)."
    ]


def test_an_ep_size_of_one_loads_with_options_that_have_no_effect(tmp_path: Path) -> None:
    # case C06
    ep = "  ep: {size: 1, backend: torch, comm_sms: 24, timeout_secs: 5, alignment: 16, exact: true}\n"
    assert load_text(tmp_path, MINIMAL + ep, world_size=4).moe.ep.comm_sms == 24


@pytest.mark.parametrize("name", ["deepep", "cuda", "nccl"])
def test_a_backend_that_does_not_exist_is_refused(tmp_path: Path, name: str) -> None:
    """Whether a backend that exists can run on this machine is checked when a buffer or layer is built."""
    # case C05
    assert error_lines(tmp_path, MINIMAL + f"  ep: {{backend: {name}}}\n") == [
        f"config.yaml:7: moe.ep.backend is '{name}'; set it to one of auto, torch, intranode, internode "
        "(what moves the rows)."
    ]


@pytest.mark.parametrize("name", ["auto", "torch", "intranode", "internode"])
def test_the_configuration_itself_accepts_every_backend(tmp_path: Path, name: str) -> None:
    # case C05
    assert load_text(tmp_path, MINIMAL + f"  ep: {{backend: {name}}}\n").moe.ep.backend == name


def test_fp8_true_is_told_what_a_recipe_is(tmp_path: Path) -> None:
    # case C05
    assert error_lines(tmp_path, MINIMAL + "  fp8: true\n") == [
        "config.yaml:7: moe.fp8 is 'true'; set it to a section, that is a map of recipe, gemm, dispatch, "
        "grad_dispatch, power_of_two_scales, wgrad."
    ]
    assert error_lines(tmp_path, MINIMAL + "  fp8: {recipe: blockwis}\n") == [
        "config.yaml:7: moe.fp8.recipe is 'blockwis'; set it to one of none, blockwise, current, delayed, mxfp8 "
        "(scaling recipe). Did you mean blockwise?"
    ]


def test_the_world_size_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MINIMAL + "  ep: {size: 3}\n"
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert load_text(tmp_path, text).moe.ep.size == 3
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert load_text(tmp_path, text).moe.ep.size == 3
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "which does not divide the world size 4" in error_lines(tmp_path, text)[0]
    assert load_text(tmp_path, text, world_size=3).moe.ep.size == 3


def test_a_world_size_that_is_not_a_number_of_ranks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_lines(tmp_path, MINIMAL, world_size=0) == [
        "world_size is 0; set it to an integer from 1 to 2147483647 (the number of ranks)."
    ]
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert error_lines(tmp_path, MINIMAL) == [
        "the environment variable WORLD_SIZE is many; set it to an integer from 1 to 2147483647 (the number of ranks)."
    ]


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("lr", "0", "a finite number above 0"),
        ("min_lr_ratio", "1.5", "a finite number from 0 to 1"),
        ("beta2", "1", "a finite number of at least 0 and below 1"),
        ("steps", "0", "an integer from 1 to 2147483647"),
        ("dtype", "float16", "one of float32, bfloat16"),
        ("micro_batch_size", "0", "an integer from 1 to 2147483647, or null"),
    ],
)
def test_a_training_setting_out_of_range_is_refused(tmp_path: Path, setting: str, value: str, allowed: str) -> None:
    train = {"steps": "4", "global_batch_size": "2", "seq_len": "8", "lr": "1", setting: value}
    text = MINIMAL + "train:\n" + "".join(f"  {key}: {number}\n" for key, number in train.items())
    lines = error_lines(tmp_path, text)
    assert len(lines) == 1
    assert f": train.{setting} is " in lines[0]
    assert f"; set it to {allowed} (" in lines[0]
