"""Checks of what callers hand in, before anything travels: what was given, the limit, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from moe_ep.backends.base import DispatchRequest
from moe_ep.handle import LAYOUTS, DispatchHandle, Layout
from moe_ep.placement import ExpertPlacement

ROW_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
IDX_DTYPES = (torch.int64, torch.int32)
MAX_TOPK = 64
MAX_ROWS = 2**31 - 1


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_tensor(value: object, name: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {type(value).__name__}; give a torch.Tensor.")


def check_int(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; give an int.")


def check_rows(rows: Tensor, name: str) -> None:
    """[R, H] in one of the row dtypes."""
    if not isinstance(rows, Tensor):
        check_tensor(rows, name)
    if rows.layout != torch.strided or rows.is_meta:
        raise TypeError(f"{name} is a {rows.layout} tensor on {rows.device}; give an ordinary dense tensor with data.")
    if rows.dtype not in ROW_DTYPES:
        fix = "Convert it first."
        if rows.element_size() == 1 and rows.is_floating_point():
            fix = "FP8 rows travel without a gradient, through Buffer.dispatch((rows, scales), ...); else convert them."
        raise TypeError(f"{name} is {rows.dtype}; rows travel as {_names(ROW_DTYPES)}. {fix}")
    if rows.dim() != 2 or rows.shape[1] < 1:
        raise ValueError(f"{name} has shape {list(rows.shape)}; two dimensions [rows, hidden >= 1] are needed.")


def as_weights(weights: Tensor, rows_dtype: torch.dtype, name: str) -> Tensor:
    """The weights in the dtype in which they travel: float32, or float64 where they and the rows are float64.

    float16 and bfloat16 are cast (their gradient comes back in their own dtype, through the cast).
    """
    check_tensor(weights, name)
    if weights.dtype not in ROW_DTYPES:
        raise TypeError(f"{name} is {weights.dtype}; weights are {_names(ROW_DTYPES)}. Convert it first.")
    if weights.dtype != torch.float64:
        return weights.float()
    if rows_dtype != torch.float64:
        raise TypeError(f"{name} is float64 beside {rows_dtype} rows; give float32 weights, or float64 rows.")
    return weights


def check_topk(x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None) -> None:
    """topk_idx [T, K] int64 or int32 and topk_weights [T, K] that fit x [T, H]."""
    check_tensor(topk_idx, "topk_idx")
    if topk_idx.dtype not in IDX_DTYPES:
        raise TypeError(f"topk_idx is {topk_idx.dtype}; expert ids are {_names(IDX_DTYPES)}. Convert it first.")
    if topk_idx.dim() != 2 or topk_idx.shape[0] != x.shape[0]:
        raise ValueError(
            f"topk_idx has shape {list(topk_idx.shape)} and x {list(x.shape)}; topk_idx must be [T, K] with "
            f"T = {x.shape[0]} rows."
        )
    if not 1 <= topk_idx.shape[1] <= MAX_TOPK:
        raise ValueError(f"topk_idx has K = {topk_idx.shape[1]} slots a token; K must lie in 1..{MAX_TOPK}.")
    if topk_idx.device != x.device:
        raise ValueError(f"topk_idx is on {topk_idx.device} and x on {x.device}; put both on one device.")
    if topk_weights is None:
        return
    check_tensor(topk_weights, "topk_weights")
    if topk_weights.shape != topk_idx.shape:
        raise ValueError(
            f"topk_weights has shape {list(topk_weights.shape)}, topk_idx {list(topk_idx.shape)}; they must be equal."
        )
    if topk_weights.device != x.device:
        raise ValueError(f"topk_weights is on {topk_weights.device} and x on {x.device}; put both on one device.")


def check_layout(layout: str, alignment: int, max_rows: int | None) -> Layout:
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}.")
    check_int(alignment, "alignment")
    if max_rows is not None:
        check_int(max_rows, "max_rows")
    if not 1 <= alignment <= MAX_ROWS:
        raise ValueError(f"alignment is {alignment}; it must be at least 1 (no padding) and at most {MAX_ROWS}.")
    if max_rows is not None and not 0 <= max_rows <= MAX_ROWS:
        raise ValueError(
            f"max_rows is {max_rows}; it must be at least 0 and at most {MAX_ROWS}, or None for as many as come."
        )
    return LAYOUTS[LAYOUTS.index(layout)]


def check_padding(alignment: int, placement: ExpertPlacement) -> None:
    """Where the rows of the experts begin fits 32 bits, on every rank."""
    most = placement.most_local
    if alignment * most > MAX_ROWS:
        raise ValueError(
            f"alignment is {alignment} and a rank owns {most} experts; padded rows are counted in 32 bits, so their "
            f"product may be at most {MAX_ROWS}. Give an alignment of at most {MAX_ROWS // most}."
        )


def dispatch_request(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    placement: ExpertPlacement,
    layout: str,
    alignment: int,
    max_rows: int | None,
    num_channels: int,
) -> DispatchRequest:
    """A checked dispatch call; the gradient bits say what this rank wants."""
    check_rows(x, "x")
    check_topk(x, topk_idx, topk_weights)
    checked_layout = check_layout(layout, alignment, max_rows)
    check_padding(alignment, placement)
    wants_grad = torch.is_grad_enabled()
    return DispatchRequest(
        x=x.detach() if x.requires_grad else x,
        topk_idx=topk_idx,
        topk_weights=None if topk_weights is None else as_weights(topk_weights.detach(), x.dtype, "topk_weights"),
        placement=placement,
        layout=checked_layout,
        alignment=alignment,
        max_rows=max_rows,
        num_channels=num_channels,
        x_needs_grad=wants_grad and x.requires_grad,
        weights_need_grad=wants_grad and topk_weights is not None and topk_weights.requires_grad,
        grad_enabled=wants_grad,
    )


def check_handle(
    handle: DispatchHandle, ranks: tuple[int, ...], rank: int, placement: Callable[[int], ExpertPlacement]
) -> None:
    """The handle was made over the same ranks, on this rank, with the experts where `placement` has them."""
    if not isinstance(handle, DispatchHandle):
        raise TypeError(f"handle is {type(handle).__name__}; give the handle that dispatch returned.")
    check_origin(handle, ranks, rank, placement)


class Routing(Protocol):
    """What every handle says of where it was made; `placement` is a fingerprint."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def rank(self) -> int: ...
    @property
    def placement(self) -> int: ...
    @property
    def num_experts(self) -> int: ...


def check_origin(
    handle: Routing, ranks: tuple[int, ...], rank: int, placement: Callable[[int], ExpertPlacement]
) -> None:
    """The handle was made over the same ranks, on this rank, with the experts where `placement` has them."""
    if handle.ranks != ranks or handle.rank != rank:
        raise ValueError(
            f"the handle was made by rank {handle.rank} of an EP group of ranks {list(handle.ranks)}, this buffer is "
            f"rank {rank} of {list(ranks)}; give a handle from a buffer over the same ranks."
        )
    if handle.placement != placement(handle.num_experts).fingerprint:
        raise ValueError(
            f"the handle was made by a buffer that places its {handle.num_experts} experts differently; give both "
            "buffers the same expert_placement."
        )


def check_combine(handle: DispatchHandle, rows: Tensor, weights: Tensor | None, exact: bool) -> None:
    """rows [R, H] and weights [R] that fit the handle."""
    check_rows(rows, "rows")
    if not isinstance(exact, bool):
        raise TypeError(f"exact is {exact!r}; give True or False.")
    if rows.device != handle.send_token.device:
        _refuse_device("rows", rows, handle)
    if isinstance(weights, Tensor) and weights.device != handle.send_token.device:
        _refuse_device("topk_weights", weights, handle)
    if rows.shape[0] != handle.num_rows:
        raise ValueError(
            f"rows has shape {list(rows.shape)}, but the handle stands for {handle.num_rows} rows; combine takes as "
            "many rows as its dispatch gave, padding included."
        )
    if handle.layout == "compact" and (weights is not None or exact):
        given = "topk_weights" if weights is not None else "exact=True"
        raise ValueError(
            f"combine got {given} with a handle of layout 'compact', whose rows stand for several experts; use "
            "layout='expert_major' in dispatch, or apply the weights before combine."
        )
    if weights is not None:
        check_tensor(weights, "topk_weights")
    if weights is not None and weights.shape != (handle.num_rows,):
        raise ValueError(
            f"topk_weights has shape {list(weights.shape)}, but the handle stands for {handle.num_rows} rows; give "
            "one weight a row, as dispatch returned them."
        )


def raise_faults(faults: list[str]) -> NoReturn:
    """For those of `Backend.take_faults`."""
    raise RuntimeError(" ".join(faults))


def _refuse_device(name: str, tensor: Tensor, handle: DispatchHandle) -> NoReturn:
    raise ValueError(
        f"{name} is on {tensor.device} and the handle on {handle.send_token.device}; move it to the device of its "
        "dispatch."
    )
