"""What an install contains: the folders behind the symlinks, the sources of the kernels, and no more."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("moe_ep", "layers", "autograd", "csrc", "configs")
BUILD = "import sys; from setuptools import build_meta as meta; getattr(meta, sys.argv[1])(sys.argv[2])"


def modules_on_disk() -> set[str]:
    """The Python files of the package by their path in a wheel."""
    links = {
        f"moe_ep/{path.relative_to(ROOT)}" for top in ("layers", "autograd") for path in (ROOT / top).rglob("*.py")
    }
    return links | {str(path.relative_to(ROOT)) for path in (ROOT / "moe_ep").rglob("*.py")}


def build(kind: str, source: Path, target: Path, **environment: str) -> Path:
    """Run one hook of the build backend, as pip does, and give the file that it made."""
    target.mkdir(exist_ok=True)
    environment = os.environ | {"MOE_EP_BUILD_CUDA": "0"} | environment
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(target)]
    ran = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "installed as pure Python, without CUDA kernels, as MOE_EP_BUILD_CUDA=0 asks." in ran.stdout
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a clone has, symlinks kept as symlinks."""
    folder = tmp_path_factory.mktemp("clone") / "moe_ep"
    folder.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder / path.name)
    return folder


def test_a_wheel_holds_every_module_behind_the_symlinks(checkout: Path, tmp_path: Path) -> None:
    wheel = build("wheel", checkout, tmp_path / "wheel")
    assert wheel.name.endswith("py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith(".py")} == modules_on_disk()
    assert "moe_ep/py.typed" in names
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    described = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "Description-Content-Type: text/markdown" in described
    assert (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[0] in described
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"moe_ep"}


def test_an_sdist_holds_the_kernels_and_builds_the_same_wheel(checkout: Path, tmp_path: Path) -> None:
    sdist = build("sdist", checkout, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # patch releases before 3.11.4 have none
        archive.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    on_disk = {path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*")}
    assert {path.relative_to(unpacked) for path in (unpacked / "csrc").rglob("*")} == on_disk
    assert (unpacked / "LICENSE").is_file()
    wheel = build("wheel", unpacked, tmp_path / "wheel")
    assert {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")} == modules_on_disk()


def run_setup(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py as on a machine that has no nvcc."""
    return subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=checkout,
        env=os.environ | {"CUDA_HOME": str(checkout), "MOE_EP_BUILD_CUDA": ""} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("yes", "MOE_EP_BUILD_CUDA is 'yes': give 0 (pure Python), 1 (CUDA required), or leave it out."),
        ("1", "MOE_EP_BUILD_CUDA=1 asks for the CUDA kernels, but nvcc is not in CUDA_HOME"),
    ],
)
def test_a_wish_that_cannot_be_met_ends_the_build_with_a_sentence(checkout: Path, setting: str, message: str) -> None:
    ran = run_setup(checkout, MOE_EP_BUILD_CUDA=setting)
    assert ran.returncode != 0
    assert message in ran.stderr


def test_without_nvcc_the_build_says_in_one_line_that_it_is_pure_python(checkout: Path) -> None:
    ran = run_setup(checkout)
    assert ran.returncode == 0, ran.stderr
    said = [line for line in ran.stdout.splitlines() if line.startswith("moe_ep:")]
    assert said == ["moe_ep: installed as pure Python, without CUDA kernels, because no nvcc was found."]


def test_rails_over_nvshmem_are_built_where_its_headers_are(checkout: Path, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    home = tmp_path / "nvshmem"
    (home / "include").mkdir(parents=True)
    (home / "include" / "nvshmem.h").touch()
    without = "moe_ep: without rails over NVSHMEM, because its wheel was not found."
    for setting, is_found in (("", False), (str(tmp_path), False), (str(home), True)):
        ran = run_setup(checkout, CUDA_HOME=str(tmp_path), NVSHMEM_HOME=setting)
        assert ran.returncode == 0, ran.stderr
        assert (without not in ran.stdout) == is_found
        found = subprocess.run(
            [sys.executable, ROOT / "scripts" / "nvshmem_home.py"],
            env=os.environ | {"NVSHMEM_HOME": setting},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.strip() == (str(home) if is_found else "")
