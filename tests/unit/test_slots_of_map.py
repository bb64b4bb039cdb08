"""The experts of a token in order, from the router's map of them."""

import torch

from moe_ep.layers.slots_of_map import expert_slots, slots_of_map


def test_the_slots_of_a_token_are_its_experts_in_order_and_then_none() -> None:
    chosen = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    assert expert_slots(chosen, 3).tolist() == [[1, 3, -1], [-1, -1, -1], [0, 1, 2]]
    assert expert_slots(chosen[:0], 3).shape == (0, 3)


def test_slots_give_back_the_map() -> None:
    source = torch.Generator().manual_seed(0)
    for num_experts, topk in ((8, 2), (37, 5), (256, 8)):
        chosen = torch.rand(50, num_experts, generator=source).topk(topk).indices
        routing_map = torch.zeros(50, num_experts, dtype=torch.bool).scatter(1, chosen, True)
        assert torch.equal(expert_slots(routing_map, topk), chosen.sort(dim=1).values)


def test_probabilities_go_with_their_experts_and_gradients_come_back_to_them_alone() -> None:
    chosen = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    probs = torch.arange(1.0, 13.0).view(3, 4).requires_grad_()
    idx, weights = slots_of_map(chosen, probs, 3)
    assert idx.tolist() == [[1, 3, -1], [-1, -1, -1], [0, 1, 2]]
    assert weights.tolist() == [[2.0, 4.0, 0.0], [0.0, 0.0, 0.0], [9.0, 10.0, 11.0]]
    weights.backward(torch.arange(1.0, 10.0).view(3, 3))
    assert probs.grad is not None
    assert probs.grad.tolist() == [[0.0, 1.0, 0.0, 2.0], [0.0] * 4, [7.0, 8.0, 9.0, 0.0]]
