"""Environment variables in values, and overrides from outside the file."""

from pathlib import Path

import pytest

from tests.unit.config_text import MINIMAL, error_lines, load_text


def test_a_variable_with_a_default_is_typed_by_its_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MINIMAL.replace("topk: 2", "topk: ${MOE_EP_TEST_TOPK:4}")
    monkeypatch.delenv("MOE_EP_TEST_TOPK", raising=False)
    assert load_text(tmp_path, text).moe.router.topk == 4
    monkeypatch.setenv("MOE_EP_TEST_TOPK", "1e0")
    assert load_text(tmp_path, text).moe.router.topk == 1


def test_a_variable_may_be_a_part_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_EP_TEST_ROOT", "/data")
    monkeypatch.delenv("MOE_EP_TEST_NAME", raising=False)
    run_dir = "'${MOE_EP_TEST_ROOT}/${MOE_EP_TEST_NAME:a:b}'"
    train = f"train: {{steps: 4, global_batch_size: 2, seq_len: 8, lr: 1, run_dir: {run_dir}}}\n"
    config = load_text(tmp_path, MINIMAL + train)
    assert config.train is not None
    assert config.train.run_dir == "/data/a:b"


def test_an_empty_default_is_null_for_an_optional_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_EP_TEST_SMS", raising=False)
    assert load_text(tmp_path, MINIMAL + "  ep:\n    comm_sms: ${MOE_EP_TEST_SMS:}\n").moe.ep.comm_sms is None


def test_a_variable_that_is_not_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_EP_TEST_SIZE", raising=False)
    assert error_lines(tmp_path, MINIMAL + "  ep:\n    size: ${MOE_EP_TEST_SIZE}\n") == [
        "config.yaml:8: moe.ep.size uses the environment variable MOE_EP_TEST_SIZE, which is not set. "
        "Set it or write ${MOE_EP_TEST_SIZE:default}."
    ]


def test_an_unset_variable_is_not_also_a_missing_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_EP_TEST_TOPK", raising=False)
    assert len(error_lines(tmp_path, MINIMAL.replace("topk: 2", "topk: ${MOE_EP_TEST_TOPK}"))) == 1


@pytest.mark.parametrize("text", ["${1A}", "${A", "${A:${B:2}}", "${}", "x${ A}"])
def test_a_form_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    assert error_lines(tmp_path, MINIMAL.replace("topk: 2", f"topk: {text}")) == [
        f"config.yaml:6: moe.router.topk has the text {text!r}, whose ${{ cannot be read. "
        "Write ${NAME} or ${NAME:default}."
    ]


def test_a_value_from_a_variable_is_checked_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_EP_TEST_TOPK", "0")
    assert error_lines(tmp_path, MINIMAL.replace("topk: 2", "topk: ${MOE_EP_TEST_TOPK}")) == [
        "config.yaml:6: moe.router.topk is 0; set it to an integer from 1 to 64 (experts per token, K)."
    ]


def test_an_override_wins_over_the_file_and_is_typed_by_its_field(tmp_path: Path) -> None:
    overrides = {"moe.router.topk": "1", "moe.router.normalize": "yes", "moe.ep.timeout_secs": "1e1"}
    moe = load_text(tmp_path, MINIMAL, overrides).moe
    assert (moe.router.topk, moe.router.normalize, moe.ep.timeout_secs) == (1, True, 10.0)


def test_overrides_make_the_sections_that_they_need(tmp_path: Path) -> None:
    overrides = {"train.steps": "4", "train.global_batch_size": "2", "train.seq_len": "8", "train.lr": "1e-3"}
    config = load_text(tmp_path, MINIMAL + "train:\n", overrides)
    assert config.train is not None
    assert config.train.lr == 1e-3
    assert load_text(tmp_path, MINIMAL + "train: {steps: 1}\n", {"train": "null"}).train is None


def test_an_override_may_repair_a_wrong_value(tmp_path: Path) -> None:
    text = MINIMAL.replace("topk: 2", "topk: 0")
    assert load_text(tmp_path, text, {"moe.router.topk": "2"}).moe.router.topk == 2


def test_an_override_may_replace_a_variable_that_is_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_EP_TEST_TOPK", raising=False)
    text = MINIMAL.replace("topk: 2", "topk: ${MOE_EP_TEST_TOPK}")
    assert load_text(tmp_path, text, {"moe.router.topk": "4"}).moe.router.topk == 4


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("moe.router.tpk", "2", "moe.router.tpk is not a setting. Did you mean topk?"),
        ("moe.topk", "2", "moe.topk is not a setting. topk belongs under moe.router."),
        ("topk", "2", "topk is not a setting. topk belongs under moe.router."),
        ("moe.ruter.topk", "2", "moe.ruter is not a setting. Did you mean router?"),
        (
            "moe.num_experts.x",
            "2",
            "moe.num_experts is a map; set it to an integer from 1 to 2147483647 (routed experts over all ranks, E).",
        ),
        ("moe.router.topk", "0", "moe.router.topk is 0; set it to an integer from 1 to 64 (experts per token, K)."),
        (
            "moe.router.topk",
            "9",
            "moe.router.topk is 9, but the number of experts (moe.num_experts) is 8. "
            "Set topk from 1 to 8, or use more experts.",
        ),
        (
            "moe.router.topk",
            "${MOE_EP_TEST_NONE}",
            "moe.router.topk uses the environment variable MOE_EP_TEST_NONE, which is not set. "
            "Set it or write ${MOE_EP_TEST_NONE:default}.",
        ),
    ],
)
def test_a_wrong_override_is_named_like_a_line_of_the_file(tmp_path: Path, key: str, value: str, told: str) -> None:
    # case C02
    assert error_lines(tmp_path, MINIMAL, {key: value}) == [f"override {key}={value}: {told}"]
