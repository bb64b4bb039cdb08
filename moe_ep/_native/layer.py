"""The signatures of the layer's own kernels in `moe_ep._C`: routing and SwiGLU. See `moe_ep._native.loader`."""

from typing import Protocol


class LayerKernels(Protocol):
    """What `moe_ep.layers` calls. Pointers and streams are integers; 0 where a header says null."""

    def topk_route(
        self,
        *,
        logits: int,
        expert_bias: int,
        padding_mask: int,
        topk_idx: int,
        topk_weights: int,
        probs: int,
        counts: int,
        num_tokens: int,
        num_experts: int,
        score_function: str,
        num_topk: int,
        num_groups: int,
        group_topk: int,
        num_best: int,
        normalize: bool,
        scaling_factor: float,
        num_sms: int,
        stream: int,
    ) -> None:
        """Choose experts and weights from logits, count the choices; csrc/layer/topk.h."""

    def topk_route_backward(
        self,
        *,
        logits: int,
        topk_idx: int,
        grad_weights: int,
        grad_probs: int,
        probs_stride: int,
        grad_logits: int,
        num_tokens: int,
        num_experts: int,
        score_function: str,
        num_topk: int,
        normalize: bool,
        scaling_factor: float,
        num_sms: int,
        stream: int,
    ) -> None:
        """Gradient of the logits; csrc/layer/topk.h."""

    def slots_of_map(
        self,
        *,
        map: int,
        probs: int,
        idx: int,
        weights: int,
        num_tokens: int,
        num_experts: int,
        num_slots: int,
        num_sms: int,
        stream: int,
    ) -> None:
        """List the experts of each token from a map of them; csrc/layer/slots_of_map.h."""

    def slots_of_map_backward(
        self,
        *,
        idx: int,
        grad_weights: int,
        grad_probs: int,
        num_tokens: int,
        num_experts: int,
        num_slots: int,
        num_sms: int,
        stream: int,
    ) -> None:
        """Gradient of the probabilities; csrc/layer/slots_of_map.h."""

    def swiglu(
        self,
        *,
        projected: int,
        dtype: str,
        out: int,
        num_rows_device: int,
        num_rows: int,
        ffn: int,
        num_sms: int,
        stream: int,
    ) -> None:
        """silu(gate) * up; csrc/layer/swiglu.h."""

    def swiglu_backward(
        self,
        *,
        projected: int,
        grad_out: int,
        dtype: str,
        grad_projected: int,
        num_rows_device: int,
        num_rows: int,
        ffn: int,
        num_sms: int,
        stream: int,
    ) -> None:
        """Gradient of gate and up; csrc/layer/swiglu.h."""

    def weighted_swiglu(
        self,
        *,
        projected: int,
        row_weights: int,
        dtype: str,
        out: int,
        num_rows_device: int,
        num_rows: int,
        ffn: int,
        num_sms: int,
        stream: int,
    ) -> None:
        """weight * silu(gate) * up; csrc/layer/swiglu.h."""

    def weighted_swiglu_backward(
        self,
        *,
        projected: int,
        row_weights: int,
        grad_out: int,
        dtype: str,
        grad_projected: int,
        grad_weights: int,
        num_rows_device: int,
        num_rows: int,
        ffn: int,
        num_sms: int,
        stream: int,
    ) -> None:
        """Gradients of gate, up and the weight; csrc/layer/swiglu.h."""

    def zero_tail(
        self, *, rows: int, num_rows_device: int, num_rows: int, row_bytes: int, num_sms: int, stream: int
    ) -> None:
        """Zero the rows from a number in device memory on; csrc/layer/swiglu.h."""
