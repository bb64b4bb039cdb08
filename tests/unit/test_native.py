"""The loader of the CUDA extension, and the extension itself as far as it needs no GPU."""

import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from moe_ep import _native
from moe_ep._native.exchange import NativeExchange

needs_extension = pytest.mark.skipif(
    importlib.util.find_spec("moe_ep._C") is None, reason="needs moe_ep._C, which this install was made without"
)


@pytest.fixture
def _fresh_loader() -> Iterator[None]:
    _native.load.cache_clear()
    yield
    _native.load.cache_clear()


@pytest.mark.usefixtures("_fresh_loader")
def test_a_missing_extension_is_none_for_load_and_a_sentence_with_the_fix_for_require(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "moe_ep._C", None)
    assert _native.load() is None
    assert _native.describe() == "as pure Python, without CUDA kernels: no nvcc was used"
    with pytest.raises(RuntimeError, match=r"moe_ep\._C is missing.*MOE_EP_BUILD_CUDA=1 pip install \..*backend="):
        _native.require()


@pytest.mark.usefixtures("_fresh_loader")
def test_an_extension_that_does_not_load_keeps_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ImportError, match="undefined symbol"):
        _native.load()


@needs_extension
def test_the_extension_has_the_signatures_of_the_protocol() -> None:
    kernels = _native.require()
    for name, function in inspect.getmembers(_native.NativeKernels, inspect.isfunction):
        if name.startswith("_"):
            continue
        there = getattr(kernels, name)
        in_extension = (there.__init__ if isinstance(there, type) else there).__doc__.split("(", 1)[1]
        parameters = list(inspect.signature(function).parameters.values())[1:]
        named = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        found = [re.search(rf"\b{parameter}:", in_extension) for parameter in named]
        assert all(found), f"{name} of moe_ep._C has other arguments: {in_extension}"
        positions = [match.start() for match in found if match is not None]
        assert positions == sorted(positions)
    assert kernels.cuda_archs.startswith("sm_")
    for name, _ in inspect.getmembers(NativeExchange, inspect.isfunction):
        assert name.startswith("_") or callable(getattr(kernels.Exchange, name)), f"Exchange.{name} is not there"


@needs_extension
def test_the_extension_takes_as_many_arguments_by_position_as_the_protocol_names() -> None:
    for name, function in inspect.getmembers(NativeExchange, inspect.isfunction):
        parameters = list(inspect.signature(function).parameters.values())[1:]
        if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
            there = getattr(_native.require().Exchange, name).__doc__
            assert len(re.findall(r"arg\d+: ", there)) == len(parameters), f"Exchange.{name}: {there}"


@needs_extension
def test_the_extension_links_no_driver_no_shared_runtime_and_no_torch() -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("needs readelf, which is not on PATH")
    path = importlib.util.find_spec("moe_ep._C").origin
    dynamic = subprocess.run([readelf, "--dynamic", path], check=True, capture_output=True, text=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert needed
    assert not [name for name in needed if name.startswith(("libcuda", "libtorch", "libc10"))]
    symbols = subprocess.run([readelf, "--dyn-syms", "--wide", path], check=True, capture_output=True, text=True).stdout
    assert "PyInit__C" in symbols
    assert not [
        line for line in symbols.splitlines() if line.split()[-1:] and line.split()[-1].startswith(("cuda", "__cuda"))
    ]


@needs_extension
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"idx_bytes": 2}, "has 2 bytes an id, but int32"),
        ({"num_tokens": 2**30}, "hold at most 2147483647"),
        ({"num_tokens": -1}, r"topk_idx is \[-1, 2\], but at least \[0, 1\]"),
        ({"num_ranks": 0}, "8 experts on 0 ranks"),
        ({"num_sms": 0}, "num_sms is 0, but the least is 1"),
    ],
)
def test_the_layout_count_refuses_impossible_sizes_before_any_launch(change: dict[str, int], message: str) -> None:
    pointers = dict.fromkeys(
        ["topk_idx", "rank_of_expert", "tokens_per_expert", "tokens_per_rank", "is_token_in_rank", "bad_id"], 0
    )
    sizes = {"num_tokens": 4, "num_topk": 2, "num_experts": 8, "num_ranks": 2, "num_sms": 1, "idx_bytes": 8}
    with pytest.raises(RuntimeError, match=message):
        _native.require().layout_count(**pointers, **(sizes | change), stream=0)


@needs_extension
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "dtype float64, but bfloat16, float16 and float32"),
        ({"hidden": 0}, r"x is \[4, 0\], but at least \[0, 1\]"),
        ({"num_sms": 0}, "num_sms is 0, but the least is 1"),
    ],
)
def test_the_fp8_cast_refuses_impossible_arguments_before_any_launch(
    change: dict[str, int | str], message: str
) -> None:
    arguments = {"x": 0, "dtype": "float32", "q": 0, "scales": 0, "num_tokens": 4, "hidden": 8, "num_sms": 1}
    with pytest.raises(RuntimeError, match=message):
        _native.require().fp8_cast_1x128(**(arguments | change), power_of_two=False, stream=0)
