"""The command `moe-ep`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from moe_ep.backends.internode_kernels import STAGING_BYTES
from moe_ep.config import Config, count_parameters, experts_per_rank, load_config
from moe_ep.doctor import report
from moe_ep.doctor.machine import Machine
from moe_ep.errors import ConfigError

_EP_SIZES_SHOWN = (1, 2, 4, 8)  # for `ep.size: auto`, which is known only once there is a group

main = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@main.callback()
def _root() -> None:
    """Mixture-of-Experts layers with expert parallelism: tools for the people who run them."""


@main.command()
def config(
    file: Annotated[Path, typer.Argument(help="A YAML configuration file.", show_default=False)],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, e.g. moe.router.topk=2. Repeatable."),
    ] = None,
) -> None:
    """Check FILE and print every setting, defaults filled in, and what follows from them.

    Exit code 2 and one line per problem if a setting is wrong.
    """
    try:
        loaded = load_config(file, overrides=_parse_overrides(set_ or []))
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    console = Console()
    text = yaml.safe_dump(loaded.model_dump(), sort_keys=False)
    if console.is_terminal:
        console.print(Syntax(text, "yaml", theme="ansi_dark", background_color="default"))
        console.print(_derived_table(loaded))
    else:  # the table as YAML comments, so that the output is itself a configuration file
        print(text, end="")
        for name, value in _derived_rows(loaded):
            print(f"# {name}: {value}")


@main.command()
def doctor(
    require: Annotated[
        str,
        typer.Option(metavar="NAME,...", help=f"What must work here: {', '.join(report.REQUIREMENTS)}."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Look at this machine: one line a finding, with a fix where something is missing or wrong.

    Exit code 1 if something is broken, or if what --require names cannot work; 0 else. Nothing is changed.
    """
    required = [name for name in require.replace(",", " ").split() if name]
    if unknown := [name for name in required if name not in report.REQUIREMENTS]:
        known = ", ".join(report.REQUIREMENTS)
        print(f"--require names {', '.join(unknown)}; it knows {known}.", file=sys.stderr)
        raise typer.Exit(2)
    findings = report.examine(Machine())
    console = Console()
    if as_json:
        print(report.as_json(findings, required))
    elif console.is_terminal:
        console.print(report.as_table(findings))
    else:
        print("\n".join(report.as_lines(findings)))
    if not as_json:
        print("\n".join(report.verdict(findings, required)))
    raise typer.Exit(0 if report.is_well(findings, required) else 1)


def _parse_overrides(pairs: list[str]) -> dict[str, str]:
    overrides = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set {pair} has no value; write --set KEY=VALUE, e.g. --set moe.router.topk=2.")
        overrides[key] = value
    return overrides


def _derived_rows(loaded: Config) -> list[tuple[str, str]]:
    moe = loaded.moe
    sizes = _EP_SIZES_SHOWN if moe.ep.size == "auto" else (moe.ep.size,)
    rows = []
    for size in sizes:
        most, least = experts_per_rank(moe.num_experts, size)
        rows.append((f"experts per rank, EP size {size}", str(most) if most == least else f"{least} or {most}"))
    if moe.ep.backend == "internode":
        rows.append(("memory of a rank's rail between nodes", f"{STAGING_BYTES >> 20} MiB; larger calls run in rounds"))
    parameters = count_parameters(moe)
    rows.append(("parameters per MoE layer, total", f"{parameters.total:,}"))
    rows.append(("parameters per MoE layer, active per token", f"{parameters.active:,}"))
    if loaded.model is not None:
        num_moe_layers = loaded.model.num_layers - loaded.model.num_dense_layers
        rows.append((f"parameters of {num_moe_layers} MoE layers, total", f"{num_moe_layers * parameters.total:,}"))
    return rows


def _derived_table(loaded: Config) -> Table:
    table = Table("derived", "value")
    for name, value in _derived_rows(loaded):
        table.add_row(name, value)
    return table
