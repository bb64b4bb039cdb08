"""Helper of the configuration tests: writes a YAML text to a file and loads it."""

import textwrap
from pathlib import Path

import pytest

from moe_ep.config import Config, load_config
from moe_ep.errors import ConfigError

MINIMAL = """\
moe:
  hidden_size: 8
  ffn_hidden_size: 16
  num_experts: 8
  router:
    topk: 2
"""


def load_text(
    folder: Path, text: str, overrides: dict[str, str] | None = None, world_size: int | None = None
) -> Config:
    """Load `text`, written to `config.yaml` in `folder`."""
    file = folder / "config.yaml"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return load_config(file, overrides, world_size)


def error_lines(
    folder: Path, text: str, overrides: dict[str, str] | None = None, world_size: int | None = None
) -> list[str]:
    """The lines of the `ConfigError` that loading `text` raises, the folder left out."""
    with pytest.raises(ConfigError) as raised:
        load_text(folder, text, overrides, world_size)
    return str(raised.value).replace(f"{folder}/", "").splitlines()
