"""`moe-ep config FILE` prints what was resolved, or the sentences and exit code 2."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_ep import cli
from moe_ep.config import load_config
from tests.unit.config_text import MINIMAL

TINY = Path(__file__).parents[2] / "configs" / "tiny_cpu.yaml"


@pytest.fixture(autouse=True)
def _no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_the_output_is_itself_a_file_with_the_same_settings(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.main, ["config", str(TINY)])
    assert result.exit_code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(result.stdout)
    assert load_config(printed) == load_config(TINY)


def test_set_changes_settings_one_by_one() -> None:
    arguments = ["config", str(TINY), "--set", "moe.router.topk=2", "--set", "moe.ep.size=3"]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0
    assert "    topk: 2\n" in result.stdout
    assert "# experts per rank, EP size 3: 5 or 6\n" in result.stdout


def test_what_follows_from_the_settings_is_printed(tmp_path: Path) -> None:
    """H=8, F=16, E=8, K=2: router 64; an expert 3*8*16 = 384; total 64 + 8*384; active 64 + 2*384."""
    file = tmp_path / "minimal.yaml"
    file.write_text(MINIMAL)
    result = CliRunner().invoke(cli.main, ["config", str(file)])
    assert result.exit_code == 0
    assert "# experts per rank, EP size 4: 2\n" in result.stdout
    assert "# parameters per MoE layer, total: 3,136\n" in result.stdout
    assert "# parameters per MoE layer, active per token: 832\n" in result.stdout


def test_gelu_and_a_shared_expert_are_counted(tmp_path: Path) -> None:
    """Two matrices an expert: 2*8*16 = 256; shared expert 2*8*4 = 64; total 64 + 8*256 + 64."""
    file = tmp_path / "minimal.yaml"
    file.write_text(MINIMAL + "  activation: gelu\n  shared_ffn_hidden_size: 4\n")
    result = CliRunner().invoke(cli.main, ["config", str(file)])
    assert "# parameters per MoE layer, total: 2,176\n" in result.stdout
    assert "# parameters per MoE layer, active per token: 640\n" in result.stdout


def test_a_terminal_gets_colours_and_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = CliRunner().invoke(cli.main, ["config", str(TINY)])
    assert result.exit_code == 0
    assert "\x1b[" in result.stdout
    assert "│ experts per rank, EP size 2" in result.stdout


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("  num_expert: 8\n", "moe.num_expert is not a setting. Did you mean num_experts?"),
        ("    topk_grp: 4\n", "moe.router.topk_grp is not a setting. Did you mean group_topk?"),
        ("num-experts: 8\n", "num-experts is not a setting. Did you mean num_experts, which belongs under moe?"),
    ],
)
def test_a_wrong_file_exits_with_2_and_the_sentence(tmp_path: Path, line: str, told: str) -> None:
    # case C02
    file = tmp_path / "wrong.yaml"
    file.write_text(MINIMAL + line)
    result = CliRunner().invoke(cli.main, ["config", str(file)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"{file}:7: {told}\n"


def test_a_set_without_a_value_exits_with_2() -> None:
    result = CliRunner().invoke(cli.main, ["config", str(TINY), "--set", "moe.router.topk"])
    assert result.exit_code == 2
    assert result.stderr == (
        "--set moe.router.topk has no value; write --set KEY=VALUE, e.g. --set moe.router.topk=2.\n"
    )


def test_a_wrong_set_exits_with_2_and_names_the_override() -> None:
    result = CliRunner().invoke(cli.main, ["config", str(TINY), "--set", "moe.router.topk=12"])
    assert result.exit_code == 2
    assert result.stderr == (
        "override moe.router.topk=12: moe.router.topk is 12, but 2 of 4 groups hold only 8 of the 16 experts. "
        "Set topk to at most 8, or raise group_topk.\n"
    )


def test_a_missing_file_exits_with_2() -> None:
    result = CliRunner().invoke(cli.main, ["config", "no/such.yaml"])
    assert result.exit_code == 2
    assert result.stderr.startswith("no/such.yaml: the configuration file cannot be read: No such file or directory.")


def test_help_names_the_command() -> None:
    result = CliRunner().invoke(cli.main, ["--help"])
    assert result.exit_code == 0
    assert "config" in result.stdout
