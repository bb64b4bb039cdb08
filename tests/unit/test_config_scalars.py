"""Text becomes the type of its field, whatever it looks like (case C01)."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ep.config.fields import FieldKind
from moe_ep.config.scalars import parse_scalar
from tests.unit.config_text import MINIMAL, error_lines, load_text

TRAIN = "train: {{steps: 4, global_batch_size: 2, seq_len: 8, lr: 1, {0}: {1}}}\n"


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "1.e-3", "+1.0e-3", ".001", "0.001", '"1e-3"', "'0.001'"])
def test_every_way_to_write_a_float_gives_the_float(tmp_path: Path, text: str) -> None:
    # case C01
    value = load_text(tmp_path, MINIMAL + f"    bias_update_rate: {text}\n").moe.router.bias_update_rate
    assert type(value) is float
    assert value == 0.001


def test_an_integer_for_a_float_setting_becomes_a_float(tmp_path: Path) -> None:
    # case C01
    value = load_text(tmp_path, MINIMAL + "  ep: {timeout_secs: 5}\n").moe.ep.timeout_secs
    assert type(value) is float
    assert value == 5.0


@pytest.mark.parametrize("text", ["1e3", "1E3", "1000", "+1000", "1000.0", "1.0e3", '"1000"', "'1e3'"])
def test_every_way_to_write_an_integer_gives_the_integer(tmp_path: Path, text: str) -> None:
    # case C01
    value = load_text(tmp_path, MINIMAL.replace("hidden_size: 8", f"hidden_size: {text}", 1)).moe.hidden_size
    assert type(value) is int
    assert value == 1000


@pytest.mark.parametrize("text", ["1.5", "1e-3", "eight", "0x10", "1_000", "1e400", "1e30", "true", ".inf", "1 0"])
def test_what_is_not_an_integer_is_refused(tmp_path: Path, text: str) -> None:
    # case C01
    lines = error_lines(tmp_path, MINIMAL.replace("num_experts: 8", f"num_experts: {text}"))
    assert lines == [
        f"config.yaml:4: moe.num_experts is '{text}'; set it to an integer from 1 to 2147483647 "
        "(routed experts over all ranks, E)."
    ]


@pytest.mark.parametrize("text", ["1e-3x", "x1e-3", "1e", "nan", ".nan", "inf", "-.inf", "1e400", "1,5", "--1", "off"])
def test_what_is_not_a_finite_number_is_refused(tmp_path: Path, text: str) -> None:
    # case C01
    lines = error_lines(tmp_path, MINIMAL + f"    z_loss_coef: {text}\n")
    assert lines == [
        f"config.yaml:7: moe.router.z_loss_coef is '{text}'; set it to a finite number of at least 0 "
        "(weight of the squared log-sum-exp of the logits)."
    ]


@pytest.mark.parametrize("text", ["yes", "on", "true", "True", "YES", '"yes"'])
def test_yes_on_and_true_are_true(tmp_path: Path, text: str) -> None:
    assert load_text(tmp_path, MINIMAL + f"    normalize: {text}\n").moe.router.normalize is True


@pytest.mark.parametrize("text", ["no", "off", "false", "False", "OFF", "'no'"])
def test_no_off_and_false_are_false(tmp_path: Path, text: str) -> None:
    assert load_text(tmp_path, MINIMAL + f"    batch_first: {text}\n").moe.router.batch_first is False


@pytest.mark.parametrize("text", ["1", "0", "y", "maybe"])
def test_other_words_are_not_true_or_false(tmp_path: Path, text: str) -> None:
    lines = error_lines(tmp_path, MINIMAL + f"    normalize: {text}\n")
    assert lines == [
        f"config.yaml:7: moe.router.normalize is '{text}'; set it to true or false (divide the K weights by their sum)."
    ]


@pytest.mark.parametrize("text", ["no", "on", "1e3", "null", "~", "8"])
def test_a_text_setting_keeps_its_text(tmp_path: Path, text: str) -> None:
    """A run named `no` stays "no"."""
    config = load_text(tmp_path, MINIMAL + TRAIN.format("run_dir", text))
    assert config.train is not None
    assert config.train.run_dir == text


@pytest.mark.parametrize("text", ["null", "~", "Null", ""])
def test_null_and_nothing_are_null_for_an_optional_setting(tmp_path: Path, text: str) -> None:
    assert load_text(tmp_path, MINIMAL + f"    capacity_factor: {text}\n").moe.router.capacity_factor is None


@pytest.mark.parametrize(("text", "shown"), [("null", "'null'"), ("", "empty"), ('"null"', "'null'")])
def test_null_is_refused_where_a_value_is_needed(tmp_path: Path, text: str, shown: str) -> None:
    lines = error_lines(tmp_path, MINIMAL.replace("topk: 2", f"topk: {text}"))
    assert lines == [
        f"config.yaml:6: moe.router.topk is {shown}; set it to an integer from 1 to 64 (experts per token, K)."
    ]


def test_a_number_and_a_word_may_stand_in_one_setting(tmp_path: Path) -> None:
    assert load_text(tmp_path, MINIMAL + "  ep: {size: auto}\n").moe.ep.size == "auto"
    assert load_text(tmp_path, MINIMAL + "  ep: {size: 4}\n", world_size=4).moe.ep.size == 4
    lines = error_lines(tmp_path, MINIMAL + "  ep: {size: Auto}\n")
    assert lines == [
        "config.yaml:7: moe.ep.size is 'Auto'; set it to an integer from 1 to 2147483647, or auto "
        "(ranks in the EP group; auto = all ranks of the group). Did you mean auto?"
    ]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_float_survives_being_written(value: float) -> None:
    # case C01
    for text in (repr(value), f"{value:.17e}"):
        assert parse_scalar(text, FieldKind(scalar=float)) == value


@given(st.integers(min_value=-(2**63) + 1, max_value=2**63 - 1))
def test_every_integer_of_64_bits_survives_being_written(value: int) -> None:
    # case C01
    parsed = parse_scalar(str(value), FieldKind(scalar=int))
    assert type(parsed) is int
    assert parsed == value
