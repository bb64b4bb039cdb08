"""The shared expert beside the exchange: who waits for whom, when its GEMMs are put on the stream, and what lives.

Streams here only note what they are told; the rows of one rank move on the CPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moe_ep
from moe_ep.autograd import sm_margin
from moe_ep.backends.torch_dist import TorchDistBackend
from moe_ep.layers.shared_experts import SharedExperts
from tests.distributed.test_layer import HIDDEN, layer_config
from tests.helpers.compare import assert_same_bits

EXCHANGES = ("plan_and_dispatch", "combine", "dispatch_backward", "combine_backward")
THERE = ["buffer waits for caller", "begin", "plan_and_dispatch on buffer", "caller waits for buffer"]
HOME = ["buffer waits for caller", "finish", "combine on buffer", "caller waits for buffer"]
BACK = [
    "buffer waits for caller",
    "combine_backward on buffer",
    "gradient of finish",
    "caller waits for event of buffer",
]
BACK += ["gradient of experts", "buffer waits for caller", "dispatch_backward on buffer", "gradient of begin"]
BACK += ["caller waits for event of buffer", "gradient of router"]


class Streams:
    """A caller's stream and the buffer's own, and a log of all that happens."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.caller, self.own, self.side = (Stream(self, name) for name in ("caller", "buffer", "side"))
        self.default = self.caller
        self.current = [self.caller]

    def install(self, monkeypatch: pytest.MonkeyPatch, buffer: moe_ep.Buffer) -> None:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current[-1])
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: self.default)
        monkeypatch.setattr(torch.cuda, "stream", self.made_current)
        monkeypatch.setattr(TorchDistBackend, "stream", self.own)
        monkeypatch.setattr(sm_margin, "_count_sms", lambda device: 1)
        for name in EXCHANGES:
            monkeypatch.setattr(buffer.backend, name, self.noted(name, getattr(buffer.backend, name)))

    @contextmanager
    def made_current(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            self.log.append(f"{name} on {self.current[-1].name}")
            return call(*args)

        return noting


class Stream:
    device = torch.device("cpu")

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: Stream) -> None:
        self.streams.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.streams.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"event of {self.name}"


@pytest.fixture
def layer() -> Iterator[moe_ep.MoELayer]:
    torch.manual_seed(0)
    made = moe_ep.MoELayer(layer_config()).double()
    yield made
    made.buffer.close()


@pytest.fixture
def streams(layer: moe_ep.MoELayer, monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    streams.install(monkeypatch, layer.buffer)
    for half in ("begin", "finish"):
        method = getattr(SharedExperts, half)

        def noted(shared: SharedExperts, *args: Any, half: str = half, method: Any = method) -> Tensor:
            streams.log.append(half)
            return method(shared, *args)

        monkeypatch.setattr(SharedExperts, half, noted)
    shared = layer.shared_experts
    assert shared is not None
    watched = {
        "begin": shared.get_parameter("gate_up.weight"),
        "finish": shared.get_parameter("down.weight"),
        "experts": layer.experts.down,
        "router": layer.router.weight,
    }
    for what, parameter in watched.items():
        parameter.register_hook(lambda grad, what=what: streams.log.append(f"gradient of {what}"))
    return streams


def tokens() -> Tensor:
    return torch.randn(7, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def step(layer: moe_ep.MoELayer, call: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    x = tokens()
    layer.zero_grad()
    y = layer(x) if call is None else call(x)
    y.square().sum().backward()
    assert x.grad is not None
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}


def test_each_half_runs_beside_an_exchange_forward_and_backward(layer: moe_ep.MoELayer, streams: Streams) -> None:
    step(layer)
    assert streams.log == THERE + HOME + BACK


def test_what_runs_beside_changes_no_bit(layer: moe_ep.MoELayer, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step(layer)
    Streams().install(monkeypatch, layer.buffer)
    actual = step(layer)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor, name)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_runs_beside_too(layer: moe_ep.MoELayer, streams: Streams, use_reentrant: bool) -> None:
    step(layer, lambda x: checkpoint(layer, x, use_reentrant=use_reentrant))
    if use_reentrant:
        assert streams.log == (THERE + HOME) * 2 + BACK
    else:  # begins where something that was kept is wanted, and ends with the last that was: no combine
        again = [*THERE, "buffer waits for caller", "finish"]
        assert streams.log == THERE + HOME + BACK[:2] + again + BACK[2:]


def test_without_gradients_only_the_forward_is_apart(layer: moe_ep.MoELayer, streams: Streams) -> None:
    with torch.no_grad():
        layer(tokens())
    assert streams.log == THERE + HOME


def test_where_no_gradient_comes_back_the_backward_waits_as_usual(layer: moe_ep.MoELayer, streams: Streams) -> None:
    """Nobody would wait for an exchange that serves the other ranks only."""
    layer.router.requires_grad_(False)
    layer(tokens().detach()).square().sum().backward()
    assert "dispatch_backward on buffer" not in streams.log
    assert streams.log[-1] == "gradient of begin"


def test_another_stream_than_the_default_one_has_nothing_beside(layer: moe_ep.MoELayer, streams: Streams) -> None:
    streams.current = [streams.side]
    step(layer)
    assert not [line for line in streams.log if "waits" in line or "buffer" in line]


def test_a_backward_on_another_stream_waits_as_usual(layer: moe_ep.MoELayer, streams: Streams) -> None:
    y = layer(tokens())
    streams.log.clear()
    streams.current = [streams.side]
    y.sum().backward()
    assert not [line for line in streams.log if "waits" in line or "buffer" in line]


@pytest.mark.parametrize("watch", ["anomaly", "compile"])
def test_watched_calls_have_nothing_beside(layer: moe_ep.MoELayer, streams: Streams, watch: str) -> None:
    if watch == "compile":
        torch._dynamo.reset()
        expected = step(layer)
        streams.log.clear()
        actual = step(layer, torch.compile(layer, backend="aot_eager", fullgraph=True))
        for name, tensor in expected.items():
            assert_same_bits(actual[name], tensor, name)
    else:
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            step(layer)
    assert not [line for line in streams.log if "waits" in line or "buffer" in line]


def test_a_shared_expert_with_hooks_runs_as_a_whole_beside_dispatch(layer: moe_ep.MoELayer, streams: Streams) -> None:
    assert layer.shared_experts is not None
    seen: list[tuple[int, ...]] = []
    layer.shared_experts.register_forward_hook(lambda module, args, y: seen.append(tuple(y.shape)))
    step(layer)
    assert seen == [(7, HIDDEN)]
    assert streams.log[:4] == ["buffer waits for caller", "begin", "finish", "plan_and_dispatch on buffer"]


def test_a_graph_may_be_used_twice(layer: moe_ep.MoELayer, streams: Streams) -> None:
    x = tokens()
    y = layer(x).square().sum()
    y.backward(retain_graph=True)
    once = x.grad
    assert once is not None
    x.grad = None
    streams.log.clear()
    y.backward()
    assert streams.log == BACK
    assert_same_bits(x.grad, once, "dx")  # type: ignore[arg-type]


def test_what_an_exchange_reads_lives_until_it_is_waited_for(
    layer: moe_ep.MoELayer, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    grads: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[bool] = []
    combine_backward = layer.buffer.backend.combine_backward
    assert layer.shared_experts is not None

    def reading(handle: Any, grad_y: Tensor, *rest: Any) -> Any:
        grads.append(weakref.ref(grad_y.untyped_storage()))
        return combine_backward(handle, grad_y, *rest)

    monkeypatch.setattr(layer.buffer.backend, "combine_backward", reading)
    layer.shared_experts.get_parameter("down.weight").register_hook(lambda grad: alive.append(grads[0]() is not None))
    layer(tokens()).square().sum().backward()
    assert alive == [True]
    gc.collect()
    assert grads[0]() is None


@pytest.mark.parametrize("num_sms", [79, 80])
def test_gemms_hear_of_a_small_number_of_sms_beside_an_exchange(
    layer: moe_ep.MoELayer, streams: Streams, monkeypatch: pytest.MonkeyPatch, num_sms: int
) -> None:
    monkeypatch.setattr(sm_margin, "_count_sms", lambda device: num_sms)
    margin: list[int | None] = [None]
    monkeypatch.setattr(sm_margin, "_GET", lambda: margin[0])

    def set_margin(num_sms: int | None) -> None:
        margin[0] = num_sms
        streams.log.append(f"margin {num_sms}")

    monkeypatch.setattr(sm_margin, "_SET", set_margin)
    step(layer)
    sms = layer.buffer.num_sms
    assert sms == 20
    if num_sms < 4 * sms:
        assert not [line for line in streams.log if "margin" in line]
        return
    log = [line for line in streams.log if "waits" not in line and " on " not in line]
    assert log == [
        *(f"margin {sms}", "begin", "margin None", f"margin {sms}", "finish", "margin None"),
        *(f"margin {sms}", "gradient of finish", "margin None", "gradient of experts"),
        *(f"margin {sms}", "gradient of begin", "margin None", "gradient of router"),
    ]
    margin[0] = 3  # the caller's own setting
    streams.log.clear()
    step(layer)
    assert margin == [3]
    assert not [line for line in streams.log if "margin" in line]


def test_a_margin_that_a_failed_backward_left_ends_with_the_next_call(
    layer: moe_ep.MoELayer, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    margin: list[int | None] = [None]
    monkeypatch.setattr(sm_margin, "_count_sms", lambda device: 132)
    monkeypatch.setattr(sm_margin, "_GET", lambda: margin[-1])
    monkeypatch.setattr(sm_margin, "_SET", margin.append)
    assert layer.shared_experts is not None

    def fails(grad: Tensor) -> None:
        raise RuntimeError("no memory")

    hook = layer.shared_experts.get_parameter("down.weight").register_hook(fails)
    with pytest.raises(RuntimeError, match="no memory"):
        layer(tokens()).sum().backward()
    assert margin[-1] == layer.buffer.num_sms
    hook.remove()
    step(layer)
    assert margin[-1] is None
