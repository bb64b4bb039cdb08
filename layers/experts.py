"""The routed experts of one rank: a grouped MLP over rows that are sorted by expert.

Parameters are stacked over the local experts; the state dict names each expert by its global id, so a checkpoint
does not depend on how many ranks shared the experts.

Letters: L local experts, R rows, H hidden, F ffn width of one expert, E experts of the layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_ep.config import MoEConfig
from moe_ep.fp8.rows import Fp8Rows
from moe_ep.layers.activations import input_projection, mlp, weighted_activate
from moe_ep.layers.fp8.experts import Fp8Experts
from moe_ep.layers.grouped_linear import linear_per_expert, one_gemm_serves


class StateDictCheck(NamedTuple):
    """What does not fit in a state dict: all empty means that loading will succeed."""

    missing_keys: list[str]
    unexpected_keys: list[str]
    errors: list[str]

    def fits(self) -> bool:
        """Whether nothing is missing, left over or of the wrong shape."""
        return not (self.missing_keys or self.unexpected_keys or self.errors)


class GroupedExperts(nn.Module):
    """SwiGLU or GELU experts, one per entry of `expert_ids`.

    Attributes:
        expert_ids: global ids of the local experts, in the order of the rows; L may be 0.
        gate_up [L, 2F, H] (SwiGLU: gate rows first) or up [L, F, H] (GELU).
        down: [L, H, F].
        fp8: what runs them in FP8; None where `config.fp8.recipe` is none.

    Every parameter has the attribute `allreduce = False` (the convention of Megatron-Core): a data-parallel wrapper
    reduces its gradient only over the ranks that hold the same experts. The mark survives deepcopy, pickle, casts and
    loading.

    State dict: `{prefix}{global_id}.gate_up` and so on, [2F, H] per expert, views of the parameters. Loading is all
    or nothing: a missing, unknown or wrongly shaped entry is reported in the usual way and changes no expert. Entries
    of experts that live on other ranks are ignored. Under FSDP2, which gives each rank whole experts, the state dict
    holds those of this rank's shard.
    """

    down: nn.Parameter

    def __init__(self, config: MoEConfig, expert_ids: Sequence[int]) -> None:
        """Build the experts of this rank.

        Args:
            config: the layer's configuration.
            expert_ids: global ids, distinct, in [0, num_experts).

        Raises:
            ValueError: an id is out of range or given twice.
            ConfigError: FP8 was asked for where it cannot run.
        """
        super().__init__()
        ids = tuple(int(expert_id) for expert_id in expert_ids)
        outside = [expert_id for expert_id in ids if not 0 <= expert_id < config.num_experts]
        if outside or len(set(ids)) != len(ids):
            raise ValueError(
                f"expert_ids is {list(ids)}, but must hold distinct ids from 0 to {config.num_experts - 1} "
                f"(num_experts = {config.num_experts}); name each expert that this rank owns once."
            )
        self.config = config
        self.expert_ids = ids
        self.activation = config.activation
        self.fp8 = None if config.fp8.recipe == "none" else Fp8Experts(config)
        self.first_name, first_width = input_projection(config.activation, config.ffn_hidden_size)
        first = torch.empty(len(ids), first_width, config.hidden_size)
        self.register_parameter(self.first_name, nn.Parameter(first))
        self.down = nn.Parameter(torch.empty(len(ids), config.hidden_size, config.ffn_hidden_size))
        self._mark_parameters()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every weight from normal(0, init_std).

        One number is taken from the default generator, however many experts are local; each expert then has a
        generator of its own, seeded by that number and its global id. So the values do not depend on the number of
        ranks, and neither does what the default generator yields next.
        """
        base_seed = int(torch.randint(2**31, (), device="cpu"))
        if self.down.is_meta:
            return
        places, _ = _local_part(self.down)
        generators = [torch.Generator(device=self.down.device) for _ in places]
        for place, generator in zip(places, generators, strict=True):
            generator.manual_seed(base_seed + self.expert_ids[place])
        for parameter in self.parameters(recurse=False):
            for weight, generator in zip(_local_part(parameter)[1], generators, strict=True):
                weight.normal_(0.0, self.config.init_std, generator=generator)

    def forward(
        self,
        rows_RH: Tensor | Fp8Rows,
        tokens_per_expert: Sequence[int] | None,
        expert_offsets: Tensor | None = None,
        row_weights_R: Tensor | None = None,
    ) -> Tensor:
        """Run every expert on its rows.

        Every expert runs, also on 0 rows, so that every parameter gets a gradient (zeros, not None) and every rank
        takes part in the backward.

        Args:
            rows_RH: [R, H], the rows of the first local expert first; the dtype of the parameters, or any floating
                dtype under autocast. With `fp8` also FP8 rows of `moe_ep.dispatch_fp8`; ordinary ones are cast then.
            tokens_per_expert: L row counts that sum to R (padding included); None where the host does not know them,
                as inside torch.compile.
            expert_offsets: [L + 1] int32 on the device, where each expert's rows begin, and their end. Counts and
                offsets give the same bits; of both, a grouped GEMM reads the offsets, a loop the counts.
            row_weights_R: None, or [R] float32 (float64 beside float64) by which each row's result is multiplied,
                inside: between the two projections, with a gradient.

        Returns:
            [R, H] in the dtype of rows_RH, also under autocast.

        Raises:
            ValueError: a shape, the number of counts, their sum or the dtype does not fit.
        """
        if isinstance(rows_RH, Fp8Rows) or self.fp8 is not None:
            out_RH: Tensor = self._forward_fp8(rows_RH, tokens_per_expert, row_weights_R)
            return out_RH
        self._check_rows(rows_RH)
        self._check_weights(rows_RH, row_weights_R)
        if tokens_per_expert is None:
            return self._forward_by_offsets(rows_RH, expert_offsets, row_weights_R)
        sizes = [int(size) for size in tokens_per_expert]
        self._check_sizes(rows_RH, sizes)
        first: Tensor = self.get_parameter(self.first_name)
        if not sizes:
            return self._without_experts(rows_RH, row_weights_R)
        if self._one_gemm_serves(rows_RH, first):
            offsets = _offsets_of(sizes, rows_RH.device) if expert_offsets is None else expert_offsets
            return self._forward_by_offsets(rows_RH, offsets, row_weights_R, has_tail=False)
        # unbind, not indexing: its backward writes the stacked gradient once instead of once per expert
        experts = zip(rows_RH.split_with_sizes(sizes), first.unbind(), self.down.unbind(), strict=True)
        weights = itertools.repeat(None) if row_weights_R is None else row_weights_R.split_with_sizes(sizes)
        outputs = [mlp(*expert, self.activation, weight) for expert, weight in zip(experts, weights, strict=False)]
        return torch.cat(outputs).to(rows_RH.dtype)

    def look_at_fp8_weights(self) -> None:
        """Starts to look whether the weights have changed since they were cast; before a dispatch that is no wait."""
        first = self.get_parameter(self.first_name)
        if self.fp8 is not None and not isinstance(first, DTensor):
            self.fp8.look_at(first=first, down=self.down)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_fp8(
        self, rows_RH: Tensor | Fp8Rows, tokens_per_expert: Sequence[int] | None, row_weights_R: Tensor | None
    ) -> Tensor:
        if self.fp8 is None or tokens_per_expert is None:
            raise ValueError(
                f"the experts got {type(rows_RH).__name__}, with fp8.recipe = {self.config.fp8.recipe} and "
                f"tokens_per_expert = {tokens_per_expert}; FP8 experts need a recipe, and the counts on the host."
            )
        face_RH = rows_RH.face if isinstance(rows_RH, Fp8Rows) else rows_RH
        self._check_rows(face_RH)
        self._check_weights(face_RH, row_weights_R)
        if row_weights_R is not None and row_weights_R.dtype != torch.float32:
            raise ValueError(f"row_weights_R is {row_weights_R.dtype}, but FP8 experts weigh in float32; give that.")
        sizes = [int(size) for size in tokens_per_expert]
        self._check_sizes(face_RH, sizes)
        if not sizes:
            return self._without_experts(face_RH, row_weights_R)
        first: Tensor = self.get_parameter(self.first_name)
        return self.fp8(rows_RH, row_weights_R, sizes, first, self.down, _gemm_dtype(face_RH)).to(face_RH.dtype)

    def _without_experts(self, rows_RH: Tensor, row_weights_R: Tensor | None) -> Tensor:
        """No rows come where no expert is; the zero keeps them attached to the parameters and the weights."""
        attached = self.get_parameter(self.first_name).sum() + self.down.sum()
        attached = attached if row_weights_R is None else attached + row_weights_R.sum()
        return rows_RH + attached.to(rows_RH.dtype)

    def _forward_by_offsets(
        self, rows_RH: Tensor, expert_offsets: Tensor | None, row_weights_R: Tensor | None, has_tail: bool = True
    ) -> Tensor:
        if expert_offsets is None or expert_offsets.shape != (len(self.expert_ids) + 1,):
            given = "None" if expert_offsets is None else f"of shape {list(expert_offsets.shape)}"
            raise ValueError(
                f"tokens_per_expert is None and expert_offsets is {given}; give one of the two: {len(self.expert_ids)} "
                f"counts, or [{len(self.expert_ids) + 1}] offsets."
            )
        dtype = _gemm_dtype(rows_RH)
        first: Tensor = self.get_parameter(self.first_name)
        projected = linear_per_expert(rows_RH.to(dtype), first.to(dtype), expert_offsets, has_tail)
        end = expert_offsets if has_tail else None
        inner = weighted_activate(projected, row_weights_R, self.activation, end)
        return linear_per_expert(inner, self.down.to(dtype), expert_offsets, has_tail).to(rows_RH.dtype)

    def _one_gemm_serves(self, rows_RH: Tensor, first: Tensor) -> bool:
        """Whether both projections are one grouped GEMM each."""
        return all(one_gemm_serves(rows_RH.device, _gemm_dtype(rows_RH), w.shape) for w in (first, self.down))

    def extra_repr(self) -> str:
        """Sizes, for print(module)."""
        return (
            f"hidden_size={self.config.hidden_size}, ffn_hidden_size={self.config.ffn_hidden_size}, "
            f"activation={self.activation}, expert_ids={list(self.expert_ids)}"
        )

    def check_state_dict(self, state_dict: Mapping[str, Any], prefix: str = "") -> StateDictCheck:
        """Compare a state dict with this module, changing nothing.

        Args:
            state_dict: may hold entries of other modules; only names that begin with `prefix` are looked at.
            prefix: name of this module with a dot behind it, as in `nn.Module.state_dict`.

        Returns:
            Missing and unexpected names and one sentence per entry that cannot be copied.
        """
        expected = self._named_slices(prefix)
        missing = [key for key in expected if key not in state_dict]
        foreign = {
            f"{prefix}{expert_id}.{name}"
            for expert_id in range(self.config.num_experts)
            for name, _ in self.named_parameters(recurse=False)
        }
        unexpected = [key for key in state_dict if key.startswith(prefix) and key not in foreign]
        errors = []
        for key, own in expected.items():
            given = state_dict.get(key, own)
            if not isinstance(given, Tensor):
                errors.append(f"{key} is {type(given).__name__}, but must be a tensor of shape {list(own.shape)}.")
            elif given.shape != own.shape:
                sizes = f"the state dict has {list(given.shape)}, but the expert needs {list(own.shape)}"
                errors.append(f"size mismatch for {key}: {sizes}.")
        return StateDictCheck(missing, unexpected, errors)

    def _named_slices(self, prefix: str) -> dict[str, Tensor]:
        """State dict name of every weight that this rank holds to a view of the parameter, expert by expert."""
        parts = {name: _local_part(parameter) for name, parameter in self.named_parameters(recurse=False)}
        places, _ = parts["down"]
        return {
            f"{prefix}{self.expert_ids[place]}.{name}": stack[row]
            for row, place in enumerate(places)
            for name, (_, stack) in parts.items()
        }

    def _check_rows(self, rows_RH: Tensor) -> None:
        if rows_RH.dim() != 2 or rows_RH.shape[1] != self.config.hidden_size:
            raise ValueError(
                f"rows have shape {list(rows_RH.shape)}, but the experts take [rows, {self.config.hidden_size}]; "
                "give one row per (token, expert) pair."
            )
        if rows_RH.dtype != self.down.dtype and not torch.is_autocast_enabled(rows_RH.device.type):
            raise ValueError(
                f"rows are {rows_RH.dtype}, but the experts are {self.down.dtype}; cast one of them, or use autocast."
            )

    def _check_weights(self, rows_RH: Tensor, row_weights_R: Tensor | None) -> None:
        if row_weights_R is not None and row_weights_R.shape != rows_RH.shape[:1]:
            raise ValueError(
                f"row_weights_R has shape {list(row_weights_R.shape)}, but there are {rows_RH.shape[0]} rows; give one "
                "weight for each."
            )

    def _check_sizes(self, rows_RH: Tensor, sizes: list[int]) -> None:
        if len(sizes) != len(self.expert_ids) or any(size < 0 for size in sizes):
            raise ValueError(
                f"tokens_per_expert holds {len(sizes)} counts {sizes}, but this module has {len(self.expert_ids)} "
                "experts; give one count >= 0 for each."
            )
        if sum(sizes) != rows_RH.shape[0]:
            raise ValueError(
                f"tokens_per_expert sums to {sum(sizes)}, but there are {rows_RH.shape[0]} rows; the counts must "
                "cover every row, padding rows included."
            )

    def _mark_parameters(self) -> None:
        for parameter in self.parameters(recurse=False):
            parameter.allreduce = False  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedExperts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark_parameters()  # some conversions make new parameters
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_parameters()  # deepcopy of a parameter keeps its data only

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for key, weight in self._named_slices(prefix).items():
            destination[key] = weight if keep_vars else weight.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        check = self.check_state_dict(state_dict, prefix)
        missing_keys.extend(check.missing_keys)
        unexpected_keys.extend(check.unexpected_keys)
        error_msgs.extend(check.errors)
        if not check.fits():
            absent = len(check.missing_keys) == len(self._named_slices(prefix))
            if not (absent or check.errors):  # part of the experts: an error under strict=False too, never half a load
                error_msgs.append(
                    f"The experts under '{prefix}' were left unchanged: {len(check.missing_keys)} names are missing, "
                    f"{len(check.unexpected_keys)} are unknown; load a state dict that names every local expert once."
                )
            return
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        with torch.no_grad():
            for name, parameter in list(self.named_parameters(recurse=False)):
                places, stack = _local_part(parameter)
                given = [state_dict[f"{prefix}{self.expert_ids[place]}.{name}"] for place in places]
                if assign and given and stack is parameter:
                    self.register_parameter(name, nn.Parameter(torch.stack(given), parameter.requires_grad))
                    continue
                for own, weight in zip(stack, given, strict=True):
                    own.copy_(weight)
        self._mark_parameters()


def _gemm_dtype(rows: Tensor) -> torch.dtype:
    """The dtype of the GEMMs over these rows: that of autocast where it is on, as F.linear does."""
    kind, dtype = rows.device.type, rows.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return dtype


def _offsets_of(sizes: Sequence[int], device: torch.device) -> Tensor:
    """[L + 1] int32 on the device, from counts on the host, without a wait."""
    offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device="cpu")
    return offsets.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else offsets


def _local_part(parameter: Tensor) -> tuple[range, Tensor]:
    """The places in the stack of experts that this rank holds, and their weights: all, unless FSDP2 shards it."""
    if not isinstance(parameter, DTensor):
        return range(parameter.shape[0]), parameter
    num_experts, begin = parameter.shape[0], 0
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard(dim=0) and begin == 0 and num_experts == parameter.shape[0]:
            chunk = -(-parameter.shape[0] // parameter.device_mesh.size(dim))  # as torch.chunk divides
            begin = min(chunk * parameter.device_mesh.get_local_rank(dim), parameter.shape[0])
            num_experts = min(chunk, parameter.shape[0] - begin)
        elif not placement.is_replicate():
            raise ValueError(
                f"the experts' weights are placed as {parameter.placements}; shard them once, over dimension 0, so "
                "that every rank holds whole experts."
            )
    return range(begin, begin + num_experts), parameter.to_local()
