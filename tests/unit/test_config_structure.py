"""A file that is not a tree of sections is refused with the line (case C04)."""

from pathlib import Path

import pytest

from moe_ep.config import load_config
from moe_ep.errors import ConfigError
from tests.unit.config_text import MINIMAL, error_lines, load_text


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    """A plain loader silently keeps the last one."""
    # case C04
    lines = error_lines(tmp_path, MINIMAL + "    topk: 1\n")
    assert lines == ["config.yaml:7: moe.router.topk is given twice, first in line 6. Keep one of the two."]


def test_a_section_given_twice_is_refused(tmp_path: Path) -> None:
    # case C04
    lines = error_lines(tmp_path, MINIMAL + MINIMAL)
    assert lines == ["config.yaml:7: moe is given twice, first in line 1. Keep one of the two."]


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_an_empty_file_is_an_error_that_says_what_is_needed(tmp_path: Path, text: str) -> None:
    # case C04
    assert error_lines(tmp_path, text) == [
        "config.yaml: the file is empty; it needs the section moe with at least hidden_size, ffn_hidden_size, "
        "num_experts, router (all sections: moe, model, train)."
    ]


def test_a_list_instead_of_a_map_is_refused(tmp_path: Path) -> None:
    # case C04
    assert error_lines(tmp_path, "\n- a\n") == [
        "config.yaml:2: the file holds a list; it must be a map of moe, model, train."
    ]
    assert error_lines(tmp_path, MINIMAL.replace("router:\n    topk: 2", "router:\n    - topk: 2")) == [
        "config.yaml:5: moe.router is a list; set it to a section, that is a map of topk, score_function, pre_softmax, "
        "normalize, scaling_factor, num_groups, group_topk, group_score, expert_bias, bias_update_rate, aux_loss_coef, "
        "seq_aux_loss_coef, global_aux_loss_coef, z_loss_coef, batch_first, capacity_factor, drop_policy."
    ]


def test_a_single_value_instead_of_a_map_is_refused(tmp_path: Path) -> None:
    # case C04
    assert error_lines(tmp_path, "moe\n") == [
        "config.yaml:1: the file holds a single value; it must be a map of moe, model, train."
    ]


def test_a_map_where_a_value_is_expected_is_refused(tmp_path: Path) -> None:
    # case C04
    assert error_lines(tmp_path, MINIMAL.replace("topk: 2", "topk: {a: 2}")) == [
        "config.yaml:6: moe.router.topk is a map; set it to an integer from 1 to 64 (experts per token, K)."
    ]


def test_bad_indent_is_refused_with_its_line(tmp_path: Path) -> None:
    # case C04
    lines = error_lines(tmp_path, MINIMAL + "   normalize: true\n")
    assert len(lines) == 1
    assert lines[0].startswith("config.yaml:7: not valid YAML: ")
    assert lines[0].endswith("Check the indentation and colons here.")


@pytest.mark.parametrize(
    "text", ["moe: [1, 2\n", "moe: {a: 1\n", 'moe: "x\n', "moe:\n\ttopk: 2\n", "moe: *a\n", "a: b: c\n"]
)
def test_broken_yaml_is_refused_with_a_line(tmp_path: Path, text: str) -> None:
    lines = error_lines(tmp_path, text)
    assert len(lines) == 1
    assert ": not valid YAML: " in lines[0]
    assert lines[0].startswith("config.yaml:")


def test_two_documents_in_one_file_are_refused(tmp_path: Path) -> None:
    assert error_lines(tmp_path, MINIMAL + "---\n" + MINIMAL)[0].startswith("config.yaml:7: not valid YAML: ")


def test_control_characters_and_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    assert "not valid YAML" in error_lines(tmp_path, "moe: \x00\n")[0]
    file = tmp_path / "bytes.yaml"
    file.write_bytes(b"moe: \xff\xfe\n")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        load_config(file)


def test_very_deep_nesting_is_refused(tmp_path: Path) -> None:
    assert "not valid YAML" in error_lines(tmp_path, "moe: " + "[" * 5000)[0]


@pytest.mark.parametrize("tag", ["!!float", "!!python/object/apply:os.getcwd", "!mine"])
def test_tags_are_refused(tmp_path: Path, tag: str) -> None:
    lines = error_lines(tmp_path, MINIMAL.replace("topk: 2", f"topk: {tag} 2"))
    assert len(lines) == 1
    assert lines[0].startswith("config.yaml:6: moe.router.topk has the tag ")
    assert lines[0].endswith("the setting itself decides its type. Remove the tag.")


def test_a_tag_on_a_section_is_refused(tmp_path: Path) -> None:
    assert error_lines(tmp_path, MINIMAL.replace("router:", "router: !!set")) == [
        "config.yaml:5: moe.router has the tag tag:yaml.org,2002:set; the setting itself decides its type. "
        "Remove the tag."
    ]


def test_anchors_and_aliases_work(tmp_path: Path) -> None:
    text = MINIMAL.replace("hidden_size: 8", "hidden_size: &width 8", 1).replace(
        "ffn_hidden_size: 16", "ffn_hidden_size: *width"
    )
    assert load_text(tmp_path, text).moe.ffn_hidden_size == 8


def test_an_alias_to_its_own_section_is_refused(tmp_path: Path) -> None:
    lines = error_lines(tmp_path, "moe: &all\n  router: *all\n")
    assert "config.yaml:2: moe.router.router is not a setting. router belongs under moe." in lines


def test_a_key_that_is_not_a_name_is_refused(tmp_path: Path) -> None:
    lines = error_lines(tmp_path, MINIMAL + "  ? [a]\n  : 3\n")
    assert lines == ["config.yaml:7: moe has a list as a key; write the name of a setting."]


def test_a_section_with_nothing_in_it_has_all_defaults(tmp_path: Path) -> None:
    assert load_text(tmp_path, MINIMAL + "  ep:\n  fp8: {}\nmodel:\ntrain: null\n") == load_text(tmp_path, MINIMAL)


def test_a_missing_section_or_setting_is_named_with_its_place(tmp_path: Path) -> None:
    assert error_lines(tmp_path, "train:\n") == [
        "config.yaml: moe is missing; add it at the top level: a section with at least hidden_size, ffn_hidden_size, "
        "num_experts, router."
    ]
    assert error_lines(tmp_path, MINIMAL.replace("    topk: 2\n", "")) == [
        "config.yaml:5: moe.router.topk is missing; add it under moe.router: an integer from 1 to 64 "
        "(experts per token, K)."
    ]


def test_a_file_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.yaml: the configuration file cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="the configuration file cannot be read: Is a directory"):
        load_config(str(tmp_path))
