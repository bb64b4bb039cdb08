"""Builds moe_ep: pure Python everywhere, and csrc/ into `moe_ep._C` where nvcc is found.

Where NVSHMEM's wheel is found too, csrc/nvshmem/ becomes `moe_ep._C_nvshmem`, which only rails between nodes load.

Everything is compiled and linked by nvcc, so that nothing here needs to know where the toolkit lies. No PyTorch header
and no PyTorch import: one build serves every PyTorch version. The CUDA runtime is linked statically and libcuda not at
all: the extension builds and imports on a machine without a driver.

Environment: MOE_EP_BUILD_CUDA = 0 (never) or 1 (fail where nvcc is missing); unset: compile where nvcc is found.
NVSHMEM_HOME = a folder with NVSHMEM's include/ and lib/, or empty for none; unset: that of an installed wheel.
MOE_EP_CUDA_ARCHS = the GPU architectures, for example "sm_80,sm_90a". CUDA_HOME = the toolkit; unset: nvcc on PATH.
"""

import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEFAULT_ARCHS = ("sm_80", "sm_90a", "sm_100a")
COMPILE_FLAGS = ("-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra")
# PyTorch's own libcudart is often loaded with global symbols; ours must not bind to it, nor offer its symbols.
# Host code that both extensions have.
NVSHMEM_SHARES = ("csrc/exchange/host.cpp", "csrc/internode/rail.cpp", "csrc/low_latency/memory.cpp")
RELOCATABLE = "-rdc=true"  # device code that is linked with a library's
LINK_FLAGS = ("-shared", "--cudart=static", "-Xlinker=--exclude-libs=ALL")


def find_nvcc() -> str | None:
    """The path of nvcc: in CUDA_HOME if set, else on PATH, else in the toolkit's usual folder; None if nowhere."""
    cuda_home = os.environ.get("CUDA_HOME")
    candidates = [f"{cuda_home}/bin/nvcc"] if cuda_home else [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def nvcc_to_use() -> str | None:
    """nvcc, or None for a pure Python install; says which in one line."""
    setting = os.environ.get("MOE_EP_BUILD_CUDA", "")
    if setting not in ("", "0", "1"):
        raise SystemExit(f"MOE_EP_BUILD_CUDA is {setting!r}: give 0 (pure Python), 1 (CUDA required), or leave it out.")
    nvcc = find_nvcc()
    if setting == "1" and nvcc is None:
        raise SystemExit(
            "MOE_EP_BUILD_CUDA=1 asks for the CUDA kernels, but nvcc is not in CUDA_HOME, or without "
            "CUDA_HOME not on PATH. Install the CUDA toolkit (12.0 or newer) or set CUDA_HOME."
        )
    if setting == "0":
        print("moe_ep: installed as pure Python, without CUDA kernels, as MOE_EP_BUILD_CUDA=0 asks.")
        return None
    if nvcc is None:
        print("moe_ep: installed as pure Python, without CUDA kernels, because no nvcc was found.")
    return nvcc


def archs_to_build(nvcc: str) -> list[str]:
    """The architectures asked for; without a wish, those of the default list that this nvcc knows."""
    known = subprocess.run([nvcc, "--list-gpu-code"], check=True, capture_output=True, text=True).stdout.split()

    def is_known(arch: str) -> bool:
        # The list leaves out the variants with a letter (sm_90a), which every nvcc with the plain one has.
        return arch.rstrip("af") in known

    if asked := os.environ.get("MOE_EP_CUDA_ARCHS", ""):
        archs = asked.replace(",", " ").split()
        if unknown := [arch for arch in archs if not is_known(arch)]:
            raise SystemExit(
                f"MOE_EP_CUDA_ARCHS names {unknown}, but {nvcc} knows {known}. "
                "Name architectures from this list (a letter may follow, as in sm_90a) or install a newer toolkit."
            )
        return archs
    archs = [arch for arch in DEFAULT_ARCHS if is_known(arch)]
    if left_out := [arch for arch in DEFAULT_ARCHS if arch not in archs]:
        print(f"moe_ep: left out {', '.join(left_out)}, which {nvcc} does not know.")
    return archs


def machine_code_flags(archs: list[str]) -> list[str]:
    """nvcc's flags for machine code of each architecture."""
    return [f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}" for arch in archs]


def gencode_flags(archs: list[str]) -> list[str]:
    """nvcc's flags for machine code of each architecture, and PTX.

    That of the first one that is not bound to a GPU family by a letter; the driver compiles it for GPUs outside the
    list.
    """
    flags = machine_code_flags(archs)
    portable = next((arch for arch in archs if arch[-1].isdigit()), None)
    if portable:
        compute = portable.replace("sm_", "compute_")
        flags.append(f"-gencode=arch={compute},code={compute}")
    return flags


class NvccBuild(build_ext):
    """Compiles each source with nvcc, several at a time, and links with nvcc."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        nvcc = find_nvcc()
        if nvcc is None:
            raise SystemExit("nvcc was found when the build began and is gone now; set CUDA_HOME and build again.")
        archs = archs_to_build(nvcc)
        print(f"moe_ep: compiling csrc for {', '.join(archs)} with {nvcc}.")
        includes = ["-Icsrc", f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
        # Joined by +, because nvcc would take a comma for the end of the definition.
        defines = [f"-DMOE_EP_CUDA_ARCHS={'+'.join(archs)}"]
        # Code that is linked with NVSHMEM's has no PTX: that could not be linked.
        is_linked = RELOCATABLE in ext.extra_compile_args
        targets = machine_code_flags(archs) if is_linked else gencode_flags(archs)
        objects_dir = Path(self.build_temp) / ext.name
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)

        def compile_one(source: str) -> str:
            target = objects_dir / (source + ".o")  # with its folder: files of two folders may have one name
            target.parent.mkdir(parents=True, exist_ok=True)
            flags = [*COMPILE_FLAGS, *ext.extra_compile_args, *targets, *includes, *defines]
            subprocess.run([nvcc, *flags, "-c", source, "-o", str(target)], check=True)
            return str(target)

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, ext.sources))
        link = [nvcc, *LINK_FLAGS, *(targets if is_linked else []), *objects, *ext.extra_link_args]
        subprocess.run([*link, "-o", str(output)], check=True)


def csrc_files(folder: str, *suffixes: str) -> list[str]:
    """The files of a folder of csrc, or of all ("*"), that have one of these suffixes."""
    return sorted(str(path) for suffix in suffixes for path in Path("csrc").glob(f"{folder}/*.{suffix}"))


def find_nvshmem() -> Path | None:
    """The folder with include/ and lib/ of NVSHMEM: NVSHMEM_HOME if set, else that of an installed wheel."""
    home = os.environ.get("NVSHMEM_HOME")
    if home is not None:
        candidates = [Path(home)] if home else []
    else:  # a build in isolation sees the packages of the environment that it builds for by their place alone
        candidates = [Path(sysconfig.get_paths()[name], "nvidia", "nvshmem") for name in ("purelib", "platlib")]
    return next((path for path in candidates if (path / "include" / "nvshmem.h").exists()), None)


def nvshmem_extensions() -> list[Extension]:
    home = find_nvshmem()
    if home is None:
        print("moe_ep: without rails over NVSHMEM, because its wheel was not found.")
        return []
    library = Path(home, "lib")
    return [
        Extension(
            "moe_ep._C_nvshmem",
            sources=[*NVSHMEM_SHARES, *csrc_files("nvshmem", "cpp", "cu")],
            depends=csrc_files("*", "h", "cuh"),
            extra_compile_args=[RELOCATABLE, f"-isystem={home / 'include'}"],
            extra_link_args=[f"-L{library}", "-lnvshmem_device", "-Xlinker=-l:libnvshmem_host.so.3"],
        )
    ]


def extensions() -> list[Extension]:
    if nvcc_to_use() is None:
        return []
    sources = sorted(set(csrc_files("*", "cpp", "cu")) - set(csrc_files("nvshmem", "cpp", "cu")))
    return [Extension("moe_ep._C", sources=sources, depends=csrc_files("*", "h", "cuh")), *nvshmem_extensions()]


setup(ext_modules=extensions(), cmdclass={"build_ext": NvccBuild})
