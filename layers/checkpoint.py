"""Checkpoints that do not know how many ranks shared the experts.

Every tensor is stored under a name that all EP sizes agree on: an expert's weights and its optimizer moments under its
global id, everything else under its usual name. `torch.distributed.checkpoint` writes the files: each rank writes its
own experts, replicated tensors are written once, and each rank reads what it needs.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from moe_ep.layers.experts import GroupedExperts

_EXTRA = "extra.json"


def save_checkpoint(
    path: str | Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a checkpoint into the folder `path`. Collective over `group`.

    Args:
        path: folder, the same on every rank; made if needed.
        module: any module that contains `MoELayer` or `GroupedExperts`.
        optimizer: its per-parameter state is stored too (not its hyperparameters).
        extra: what else to keep, as JSON (a step number, say); the first rank's is written.
        group: the ranks that hold the model; None for all ranks, or this process alone without `torch.distributed`.
    """
    folder = Path(path)
    tensors = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    if optimizer is not None:
        tensors |= _optimizer_tensors(module, optimizer)
    folder.mkdir(parents=True, exist_ok=True)
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        (folder / _EXTRA).write_text(json.dumps(extra or {}))
    with _one_process_is_no_news():
        save(tensors, storage_writer=FileSystemWriter(folder), process_group=group, no_dist=not dist.is_initialized())


def load_checkpoint(
    path: str | Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint of any EP size into this rank's module and optimizer. Collective like `save_checkpoint`.

    All names and shapes are compared with the file before anything is changed.

    Args:
        path: the folder that `save_checkpoint` was given, the same on every rank.
        module: built with the configuration that was saved, at any EP size.
        optimizer: over the parameters of `module`; its per-parameter state is read too. None leaves it in the file.
        group: as in `save_checkpoint`.

    Returns:
        The `extra` that was saved.

    Raises:
        FileNotFoundError: there is no checkpoint in `path`.
        ValueError: a name is missing or unknown, or a shape differs; the module and the optimizer are unchanged.
    """
    folder = Path(path)
    if not (folder / ".metadata").exists():
        raise FileNotFoundError(f"{folder} holds no checkpoint (no .metadata file); give the folder that was saved to.")
    reader = FileSystemReader(folder)
    stored = {
        name: tuple(entry.size)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    wanted = {f"model.{name}": torch.empty_like(tensor) for name, tensor in module.state_dict().items()}
    _check_names(module, wanted, stored, folder)
    slots = [] if optimizer is None else list(_optimizer_slots(module, optimizer, stored))
    wanted |= {name: tensor for _, _, name, tensor in slots}
    with _one_process_is_no_news():
        load(wanted, storage_reader=reader, process_group=group, no_dist=not dist.is_initialized())
    module.load_state_dict({name.removeprefix("model."): t for name, t in wanted.items() if name.startswith("model.")})
    if optimizer is not None:
        _fill_optimizer(optimizer, slots)
    extra: dict[str, Any] = json.loads((folder / _EXTRA).read_text())
    return extra


@contextmanager
def _one_process_is_no_news() -> Iterator[None]:
    """Without torch.distributed, PyTorch warns that it takes this for a single process; it was told so (no_dist)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


# -- names ------------------------------------------------------------------------------------------------------------


def _shards(module: nn.Module) -> dict[nn.Parameter, list[tuple[str, int | None]]]:
    """The stored names of every parameter's parts, each with its place in a stack of experts (None: not stacked)."""
    parts: dict[nn.Parameter, list[tuple[str, int | None]]] = {}
    for prefix, child in module.named_modules():
        dotted = f"{prefix}." if prefix else ""
        for name, parameter in child.named_parameters(recurse=False):
            if isinstance(child, GroupedExperts):
                parts[parameter] = [(f"{dotted}{e}.{name}", place) for place, e in enumerate(child.expert_ids)]
            else:
                parts[parameter] = [(dotted + name, None)]
    return parts


def _check_names(
    module: nn.Module, wanted: dict[str, Tensor], stored: dict[str, tuple[int, ...]], folder: Path
) -> None:
    elsewhere = {
        f"model.{prefix + '.' if prefix else ''}{expert}.{name}"
        for prefix, child in module.named_modules()
        if isinstance(child, GroupedExperts)
        for expert in range(child.config.num_experts)
        for name, _ in child.named_parameters(recurse=False)
    }
    missing = sorted(wanted.keys() - stored.keys())
    unknown = sorted(n for n in stored.keys() - wanted.keys() - elsewhere if n.startswith("model."))
    wrong = [
        f"{name} is {list(stored[name])} in the file and {list(tensor.shape)} here"
        for name, tensor in wanted.items()
        if name in stored and stored[name] != tuple(tensor.shape)
    ]
    if missing or unknown or wrong:
        raise ValueError(
            f"the checkpoint in {folder} does not fit this model, and nothing was changed. Missing in the file: "
            f"{_listed(missing)}. Unknown here: {_listed(unknown)}. Shapes: {_listed(wrong)}. Build the model with the "
            "configuration that was saved."
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown or "none"


# -- optimizer state --------------------------------------------------------------------------------------------------


def _optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for parameter, parts in _shards(module).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            for name, place in parts:
                tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                stacked = place is not None and tensor.shape == parameter.shape
                tensors[f"optim.{name}.{key}"] = tensor[place] if stacked else tensor
    return tensors


def _optimizer_slots(
    module: nn.Module, optimizer: torch.optim.Optimizer, stored: dict[str, tuple[int, ...]]
) -> Iterator[tuple[nn.Parameter, int | None, str, Tensor]]:
    """(parameter, place in the stack, stored name, tensor to read into) for all state that the file has for us."""
    owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    keys_of: dict[str, list[str]] = {}
    for name in stored:
        if name.startswith("optim."):
            base, _, key = name.removeprefix("optim.").rpartition(".")
            keys_of.setdefault(base, []).append(key)
    for parameter, parts in _shards(module).items():
        for name, place in parts if parameter in owned else []:
            for key in keys_of.get(name, []):
                full = f"optim.{name}.{key}"
                like_weight = stored[full] == tuple(parameter.shape[1:] if place is not None else parameter.shape)
                device = parameter.device if like_weight and stored[full] else torch.device("cpu")
                dtype = parameter.dtype if like_weight and stored[full] else torch.float32
                yield parameter, place, full, torch.empty(stored[full], dtype=dtype, device=device)


def _fill_optimizer(
    optimizer: torch.optim.Optimizer, slots: list[tuple[nn.Parameter, int | None, str, Tensor]]
) -> None:
    optimizer.state.clear()
    for parameter, place, name, tensor in slots:
        key = name.rpartition(".")[2]
        state = optimizer.state[parameter]
        if place is None or tensor.dim() == 0:
            state[key] = tensor
        else:
            stack = state.setdefault(key, torch.empty_like(parameter, dtype=tensor.dtype))
            stack[place].copy_(tensor)
