"""`Buffer`: the object that owns the group, the memory and the time limit of one expert-parallel exchange."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep._native import load as load_native
from moe_ep.backends.base import Backend
from moe_ep.backends.internode import InternodeBackend
from moe_ep.backends.internode_choice import make_internode, moves_cuda
from moe_ep.backends.internode_kernels import InternodeKernelsBackend
from moe_ep.backends.intranode import IntranodeBackend
from moe_ep.backends.node_memory import why_unavailable
from moe_ep.backends.torch_dist import TorchDistBackend
from moe_ep.deep_ep_v1.normal_mode import NormalMode
from moe_ep.errors import ConfigError
from moe_ep.low_latency.mode import LowLatency
from moe_ep.low_latency.state import LowLatencyState
from moe_ep.placement import ExpertPlacement

MAX_TIMEOUT_SECS = 1e6  # what the waits of torch.distributed can hold, with a margin
BACKENDS = ("auto", "torch", "intranode", "internode")

# Lets custom ops, which take tensors and ints, find a buffer by its number. Weak: it keeps no buffer alive.
BUFFERS: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
_KEYS = itertools.count(1)


class Buffer(NormalMode, LowLatency):
    """Exchanges rows of tokens between the ranks of an EP group.

    All ranks of the group construct it together and then call the same operations in the same order. Two buffers with
    different settings live side by side; layers may share one. Release it with `close()` or `with`.

    Args:
        group: the EP group, any subgroup of the world; None stands for a single rank (no process group needed).
        num_nvl_bytes: bytes that the kernels inside a node begin with, which grow with need, and the size of the
            scratch memory that `get_local_buffer_tensor` hands out.
        num_rdma_bytes: the size of that scratch memory with `use_rdma_buffer`; otherwise without effect.
        low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, explicitly_destroy:
            arguments of DeepEP V1, accepted and without effect here.
        enable_shrink: allow ranks to be left out of the low-latency calls: those that are masked, and those that do
            not come within the limit, from then on until `reset`.
        comm: DeepEP's mpi4py communicator; refused, give a torch.distributed group.
        backend: "torch" (torch.distributed: gloo on CPU, NCCL on CUDA), "intranode", "internode", or "auto" for the
            fastest one that this machine can run. What was chosen is `buffer.backend_name`. "internode" sends a token
            once to each node and takes it round there.
        expert_placement: E group ranks, the owner of each expert; None for the balanced contiguous split.
        num_sms: SM budget of this buffer's kernels; None follows `Buffer.set_num_sms`. The torch backend has no
            kernels of its own to bound.
        timeout_secs: limit in seconds of every wait for a peer.
        ranks_per_node: for backend "internode" only: ranks of the group, one after the other, that make a node; None
            for those on one host.
        hop: for backend "internode" only: what carries rows between nodes: "ipc" (nodes that are one machine),
            "nvshmem", "torch" (torch.distributed), or "auto": kernels where the group moves CUDA tensors and they can
            run, "ipc" on one host and "nvshmem" otherwise; torch.distributed in all other cases.

    Raises:
        ConfigError: a backend that this build or machine does not have, or a limit out of range; on every rank, nodes
            that do not hold equal numbers of ranks.
        EPTimeoutError: not all ranks constructed their buffer within the limit.
    """

    _default_num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object | None = None,
        *,
        backend: str = "auto",
        expert_placement: Sequence[int] | None = None,
        num_sms: int | None = None,
        timeout_secs: float = 100.0,
        ranks_per_node: int | None = None,
        hop: str = "auto",
    ) -> None:
        if comm is not None:
            raise ConfigError(
                "comm was given; this library meets over torch.distributed. Pass a process group as group."
            )
        if not 0 < timeout_secs <= MAX_TIMEOUT_SECS:
            raise ConfigError(
                f"timeout_secs is {timeout_secs}; it must lie above 0 and at most at {MAX_TIMEOUT_SECS:g} s."
            )
        if num_sms is not None and num_sms < 1:
            raise ConfigError(f"num_sms is {num_sms}; it must be at least 1, or None for the default.")
        if ranks_per_node is not None and backend != "internode":
            raise ConfigError(
                f"ranks_per_node is {ranks_per_node}, but backend is {backend!r}, which knows no nodes; give "
                "backend='internode', or leave ranks_per_node out."
            )
        if hop != "auto" and backend != "internode":
            raise ConfigError(
                f"hop is {hop!r}, but backend is {backend!r}, which knows no nodes; give backend='internode', or leave "
                "hop out."
            )
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.timeout_secs = timeout_secs
        self._num_sms = num_sms
        self._backend = _make_backend(backend, group, timeout_secs, num_nvl_bytes, ranks_per_node, hop)
        self._closed = False
        # Puts a rank whose own inputs need no gradient into the graph, so that it joins the backward of the others.
        # Made on the CPU whatever the default device: a meta tensor would turn the custom ops into fake ones.
        self.anchor = torch.empty(0, device="cpu", requires_grad=True)
        self._placement = (
            None if expert_placement is None else ExpertPlacement.of(expert_placement, self._backend_size())
        )
        self._scratch: dict[bool, Tensor] = {}
        self._low_latency = LowLatencyState(enable_shrink)
        self._balanced: dict[int, ExpertPlacement] = {}
        self.key = next(_KEYS)
        BUFFERS[self.key] = self

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> Backend:
        """The backend that moves the rows.

        Raises:
            RuntimeError: the buffer is closed.
        """
        if self._closed:
            raise RuntimeError("the buffer is closed; construct a new Buffer on every rank of the group.")
        self._backend.num_sms = self._default_num_sms if self._num_sms is None else self._num_sms
        return self._backend

    @property
    def backend_name(self) -> str:
        """The backend in use: "torch", "intranode" or "internode"."""
        return self._backend.name

    @property
    def rank(self) -> int:
        """This rank's place in the EP group."""
        return self._backend.rank

    @property
    def group_size(self) -> int:
        """W, the number of ranks in the EP group."""
        return self._backend_size()

    @property
    def num_sms(self) -> int:
        """SM budget of this buffer: its own, else the class-wide default, read at each call."""
        return self._default_num_sms if self._num_sms is None else self._num_sms

    @property
    def num_channels(self) -> int:
        """DeepEP V1's channels, two SMs each; only the tuple form of a handle knows them."""
        return max(1, self.num_sms // 2)

    @classmethod
    def set_num_sms(cls, num_sms: int) -> None:
        """Sets the SM budget of every buffer that was given none of its own (DeepEP's class-wide default).

        Raises:
            ValueError: `num_sms` is below 1.
        """
        if num_sms < 1:
            raise ValueError(f"num_sms is {num_sms}; it must be at least 1.")
        Buffer._default_num_sms = num_sms

    def placement(self, num_experts: int) -> ExpertPlacement:
        """The owner of each of `num_experts` experts.

        Raises:
            ValueError: `expert_placement` was given for another number of experts.
        """
        if self._placement is None:
            if num_experts not in self._balanced:
                self._balanced[num_experts] = ExpertPlacement.balanced(num_experts, self.group_size)
            return self._balanced[num_experts]
        if self._placement.num_experts != num_experts:
            raise ValueError(
                f"num_experts is {num_experts}, but expert_placement of this buffer places "
                f"{self._placement.num_experts} experts; give the same number."
            )
        return self._placement

    # -- what it does -------------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor that the other ranks read where it lies: rows sent from it are not copied first.

        Collective: every rank calls it, shapes may differ. A buffer has room for eight such tensors, and their memory
        lives as long as the buffer: allocate once, write anew for every call. The torch backend has no such memory: it
        is an ordinary tensor of that `shape` and `dtype`, on the current CUDA device if the group runs on NCCL, on the
        CPU otherwise.

        Raises:
            RuntimeError: the buffer already has eight.
            EPTimeoutError: a rank did not come.
        """
        tensor = self.backend.empty(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=self._device()) if tensor is None else tensor

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` in place over the EP group, under the buffer's time limit, and returns it. Collective."""
        return self.backend.all_reduce(tensor)

    def check(self) -> None:
        """Raises what went wrong in calls that had no host wait (`max_rows`): overflow, or a bad expert id.

        Local and without a device synchronisation; call it before `optimizer.step()`.

        Raises:
            RuntimeError: the faults, one sentence each; they are forgotten then.
        """
        faults = self.backend.take_faults()
        if faults:
            raise RuntimeError(" ".join(faults))

    def reset(self) -> None:
        """Makes the buffer usable again after an `EPTimeoutError`. Collective: every rank must call it.

        Raises:
            EPTimeoutError: a rank did not come within the limit.
        """
        self._low_latency.lose("Buffer.reset()")
        self.backend.reset()
        self._low_latency.num_calls = 0  # a rank that was left out has counted fewer

    def close(self) -> None:
        """Releases the group and the memory, without communication; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._low_latency.lose("Buffer.close()")
            self._backend.close()

    def destroy(self) -> None:
        """`close` under DeepEP V1's name."""
        self.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether the CUDA extension is built and loads here."""
        return load_native() is not None

    def get_comm_stream(self) -> torch.cuda.Stream | None:
        """The stream that communication runs on: the current one with the torch backend, None without CUDA."""
        if self._backend.stream is not None:
            return self._backend.stream
        return torch.cuda.current_stream() if self._device().type == "cuda" else None

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """Scratch memory of `num_nvl_bytes` (or `num_rdma_bytes`) bytes of this rank, from byte `offset` on.

        Args:
            dtype: to view it as.
            size: shape of the view; None for all of it, flat.
            offset: in bytes, a multiple of the element size.
            use_rdma_buffer: take the memory of `num_rdma_bytes`.

        Raises:
            ValueError: the view does not fit.
        """
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        scratch = self._scratch.get(use_rdma_buffer)
        if scratch is None:
            scratch = self._scratch[use_rdma_buffer] = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device())
        usable = (num_bytes - offset) // dtype.itemsize * dtype.itemsize
        wanted = usable if size is None else size.numel() * dtype.itemsize
        if offset < 0 or offset % dtype.itemsize or wanted > usable:
            raise ValueError(
                f"a view of {wanted} bytes of {dtype} from byte {offset} does not fit the {num_bytes} bytes that the "
                "buffer was constructed with; give a larger num_nvl_bytes or num_rdma_bytes."
            )
        view = scratch[offset : offset + wanted].view(dtype)
        return view if size is None else view.view(size)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffer:
        """A copied model shares the buffer of the original: the group cannot be copied."""
        return self

    def __reduce__(self) -> NoReturn:
        """A buffer is not pickled, not at W = 1 either: what saves a model on one rank must do so on many."""
        raise TypeError(
            "a Buffer cannot be pickled: it holds connections to the other ranks. Save the state_dict() of the model, "
            "or use moe_ep.save_checkpoint; to load it, make the model anew on every rank first."
        )

    def __repr__(self) -> str:
        over = ""
        if isinstance(self._backend, InternodeBackend):
            over = f", num_nodes={self._backend.topology.num_nodes}, hop={self._backend.hop!r}"
        return f"Buffer(backend={self.backend_name!r}, rank={self.rank}, group_size={self.group_size}{over})"

    def _backend_size(self) -> int:
        return len(self._backend.ranks)

    def _device(self) -> torch.device:
        if isinstance(self._backend, (IntranodeBackend, InternodeKernelsBackend)):
            return self._backend.device
        if self.group is not None and "nccl" in str(dist.get_backend_config(self.group)):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _make_backend(
    name: str,
    group: dist.ProcessGroup | None,
    timeout_secs: float,
    num_bytes: int,
    ranks_per_node: int | None,
    hop: str,
) -> Backend:
    if name not in BACKENDS:
        raise ConfigError(f"backend is {name!r}; it must be one of {', '.join(BACKENDS)}.")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group is {group!r}; give a torch.distributed process group that this rank belongs to, or None for a "
            "single rank."
        )
    if name == "internode":
        return make_internode(group, timeout_secs, ranks_per_node, hop)
    if name == "intranode" or (name == "auto" and moves_cuda(group)):
        obstacle = why_unavailable(group, timeout_secs)
        if obstacle is None:
            return IntranodeBackend(group, timeout_secs, num_bytes)
        if name == "intranode":
            raise ConfigError(f"backend is 'intranode', but {obstacle}; use backend='torch', or 'auto'.")
        warnings.warn(f"moe_ep runs on torch.distributed, not on its kernels: {obstacle}.", stacklevel=3)
    return TorchDistBackend(group, timeout_secs)
