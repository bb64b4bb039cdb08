"""Prints the folder with NVSHMEM's include/ and lib/, as setup.py finds it; nothing where there is none."""

import os
import sysconfig
from pathlib import Path

home = os.environ.get("NVSHMEM_HOME")
wheels = [Path(sysconfig.get_paths()[name], "nvidia", "nvshmem") for name in ("purelib", "platlib")]
candidates = wheels if home is None else [Path(home)] if home else []
print(next((path for path in candidates if (path / "include" / "nvshmem.h").exists()), ""))
