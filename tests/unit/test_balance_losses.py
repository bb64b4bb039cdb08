"""Values and gradients of the auxiliary losses, against plain loops in Python floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.layers import balance
from tests.unit.router_helpers import assert_close, logit_router, softmax_logits


class FakeBuffer:
    """Adds what the other ranks would bring; stands in for the buffer's all_reduce."""

    def __init__(self, others: list[list[int]]) -> None:
        self.others = others
        self.dtypes: list[torch.dtype] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.dtypes.append(tensor.dtype)
        for counts in self.others:
            tensor += torch.tensor([*counts, 1])
        return tensor


def plain_loss(probs: list[list[float]], ids: list[list[int]]) -> float:
    """E / (K T) * sum_i count_i * mean_t p_ti."""
    num_tokens, num_experts, topk = len(probs), len(probs[0]), len(ids[0])
    total = 0.0
    for expert in range(num_experts):
        count = sum(row.count(expert) for row in ids)
        total += count * sum(row[expert] for row in probs) / num_tokens
    return num_experts * total / (topk * num_tokens)


def test_batch_loss_counts_valid_tokens_only() -> None:
    """Case B05: 1.0, not 1.275."""
    router = logit_router(2, topk=1, aux_loss_coef=1.0)
    logits = softmax_logits([[0.7, 0.3], [0.4, 0.6], [1 - 1e-9, 1e-9], [1 - 1e-9, 1e-9]])
    _, weights = router(logits, torch.tensor([False, False, True, True]))
    assert_close(router.last_losses["aux_loss"], 1.0)
    weights.sum().backward()
    assert router.tokens_per_expert.tolist() == [1, 1]
    router(logits)
    assert_close(router.last_losses["aux_loss"], 1.275)


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
def test_loss_and_gradient_count_once_with_and_without_recompute(recompute: str | None) -> None:
    """Case B06: reported 0.013, gradient [[.0021, -.0021], [.0024, -.0024]]."""
    router = logit_router(2, topk=1, aux_loss_coef=0.01)
    logits = softmax_logits([[0.7, 0.3], [0.6, 0.4]]).requires_grad_()
    if recompute is None:
        ids, weights = router(logits)
    else:
        ids, weights = torch.utils.checkpoint.checkpoint(router, logits, use_reentrant=recompute == "reentrant")
    assert ids.tolist() == [[0], [0]]
    (weights * 0.0).sum().backward()
    assert_close(router.last_losses["aux_loss"], 0.013)
    assert logits.grad is not None
    assert_close(logits.grad, [[0.0021, -0.0021], [0.0024, -0.0024]])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_global_loss_does_not_depend_on_the_number_of_ranks(num_ranks: int) -> None:
    """Case B06: the mean over ranks of the global loss is the loss of the whole batch, gradients too."""
    torch.manual_seed(0)
    tokens = torch.randn(8, 4)
    whole = logit_router(4, topk=2, aux_loss_coef=0.5)
    whole_x = tokens.clone().requires_grad_()
    (whole(whole_x)[1] * 0.0).sum().backward()
    assert whole_x.grad is not None

    parts = tokens.chunk(num_ranks)
    counts = [balance.expert_counts(whole(part)[0], 4).tolist() for part in parts]
    values, grads = [], []
    for rank, part in enumerate(parts):
        buffer = FakeBuffer(counts[:rank] + counts[rank + 1 :])
        router = logit_router(4, buffer, topk=2, global_aux_loss_coef=0.5)
        x = part.clone().requires_grad_()
        (router(x)[1] * 0.0).sum().backward()
        assert x.grad is not None
        assert buffer.dtypes == [torch.int64]
        values.append(router.last_losses["global_aux_loss"])
        grads.append(x.grad / num_ranks)
    whole(tokens)
    assert_close(torch.stack(values).mean(), whole.last_losses["aux_loss"])
    assert_close(torch.cat(grads), whole_x.grad)


def test_global_loss_is_right_for_ranks_with_different_numbers_of_tokens() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(7, 4)
    whole = logit_router(4, topk=2, aux_loss_coef=1.0)
    parts = tokens.split([4, 0, 3])
    counts = [balance.expert_counts(whole(part)[0], 4).tolist() for part in parts]
    values = []
    for rank, part in enumerate(parts):
        router = logit_router(4, FakeBuffer(counts[:rank] + counts[rank + 1 :]), topk=2, global_aux_loss_coef=1.0)
        router(part)
        values.append(router.last_losses["global_aux_loss"])
    whole(tokens)
    assert values[1].item() == 0.0
    assert_close(torch.stack(values).mean(), whole.last_losses["aux_loss"])


def test_sequence_loss_looks_at_each_sequence() -> None:
    """Case B07: 1.8 per sequence, 1.0 over the batch, for both orders of the tokens."""
    first, second = [0.9, 0.1], [0.1, 0.9]
    layouts = {
        "batch first": ([first, first, second, second], [0, 0, 1, 1]),
        "sequence first": ([first, second, first, second], [0, 1, 0, 1]),
        "any numbers": ([first, second, first, second], [900, -3, 900, -3]),
    }
    for rows, sequence_idx in layouts.values():
        router = logit_router(2, topk=1, aux_loss_coef=1.0, seq_aux_loss_coef=1.0)
        router(softmax_logits(rows), sequence_idx=torch.tensor(sequence_idx))
        assert_close(router.last_losses["seq_aux_loss"], 1.8)
        assert_close(router.last_losses["aux_loss"], 1.0)
    router(softmax_logits([first, first, second, second]))
    assert_close(router.last_losses["seq_aux_loss"], 1.0)  # without numbers all tokens are one sequence


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("pre_softmax", [True, False])
def test_all_losses_agree_with_plain_loops(score_function: str, pre_softmax: bool) -> None:
    torch.manual_seed(1)
    coefs: dict[str, Any] = {"aux_loss_coef": 0.3, "seq_aux_loss_coef": 0.2, "z_loss_coef": 0.1}
    router = logit_router(6, topk=2, score_function=score_function, pre_softmax=pre_softmax, **coefs)
    logits = torch.randn(9, 6)
    sequence_idx = torch.tensor([4, 4, 0, 1, 1, 1, 0, 4, 8])
    padding = torch.tensor([False, True, False, False, False, True, False, False, True])
    ids, _ = router(logits, padding, sequence_idx)
    probs: dict[int, list[float]] = {}
    squares = []
    for token, row in enumerate(logits.tolist()):
        if padding[token]:
            continue
        sigmoid = score_function == "sigmoid"
        scores = [1 / (1 + math.exp(-value)) if sigmoid else math.exp(value) for value in row]
        probs[token] = [score / sum(scores) for score in scores]
        squares.append(math.log(sum(math.exp(value) for value in row)) ** 2)
    valid = sorted(probs)
    batch = plain_loss([probs[token] for token in valid], [ids[token].tolist() for token in valid])
    per_sequence = []
    for sequence in sorted({int(sequence_idx[token]) for token in valid}):
        members = [token for token in valid if sequence_idx[token] == sequence]
        per_sequence.append(plain_loss([probs[t] for t in members], [ids[t].tolist() for t in members]))
    assert_close(router.last_losses["aux_loss"], 0.3 * batch, 1e-5)
    assert_close(router.last_losses["seq_aux_loss"], 0.2 * sum(per_sequence) / len(per_sequence), 1e-5)
    assert_close(router.last_losses["z_loss"], 0.1 * sum(squares) / len(squares), 1e-5)


def test_every_loss_sends_its_gradient_scaled_and_added_to_the_main_one() -> None:
    """The injected gradient equals that of the losses written out by hand, times aux_loss_scale."""
    torch.manual_seed(2)
    coefs = {"aux_loss_coef": 0.3, "seq_aux_loss_coef": 0.2, "global_aux_loss_coef": 0.4, "z_loss_coef": 0.1}
    router = logit_router(4, topk=2, **coefs)
    router.aux_loss_scale = 0.25
    logits = torch.randn(6, 4, requires_grad=True)
    sequence_idx = torch.tensor([0, 0, 0, 1, 1, 1])
    ids, weights = router(logits, sequence_idx=sequence_idx)
    pull = torch.randn(6, 2)
    (weights * pull).sum().backward()

    copy = logits.detach().double().requires_grad_()
    probs = torch.softmax(copy, 1)
    one_hot = torch.zeros(6, 4, dtype=torch.float64).scatter_(1, ids, 1.0)

    def loss(rows: slice) -> Tensor:
        num_rows = one_hot[rows].shape[0]
        return 4 / (2 * num_rows) * (one_hot[rows].sum(0) * probs[rows].mean(0)).sum()

    z = (torch.logsumexp(copy, 1) ** 2).mean()
    aux = 0.7 * loss(slice(0, 6)) + 0.2 * (loss(slice(0, 3)) + loss(slice(3, 6))) / 2 + 0.1 * z
    ((probs.gather(1, ids) * pull.double()).sum() + 0.25 * aux).backward()
    assert logits.grad is not None
    assert copy.grad is not None
    assert_close(logits.grad, copy.grad.float(), 1e-5)


def test_losses_do_not_follow_the_default_dtype() -> None:
    """Case B08, the losses' part: counts beyond bfloat16 are used exactly."""
    counts, probs = torch.tensor([257, 256]), torch.full((513, 2), 0.5)
    torch.set_default_dtype(torch.bfloat16)
    try:
        value = balance.batch_aux_loss(probs, counts, 1, 1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert value.dtype == torch.float32
    assert_close(value, 1.0)
