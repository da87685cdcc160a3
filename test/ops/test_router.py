"""Group-limited top-k routing: selection, weights, ties."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sgling_kernel.router import RouterConfig, grouped_topk


def _oracle_ids(biased: list[float], config: RouterConfig) -> list[int]:
    """Selection for one row with Python sorts: higher score first, then lower id."""
    size = len(biased) // config.n_group
    groups = [range(g * size, (g + 1) * size) for g in range(config.n_group)]
    score = [float(sum(torch.tensor(sorted((biased[e] for e in group), reverse=True)[:2]))) for group in groups]
    kept = sorted(range(config.n_group), key=lambda g: (-score[g], g))[: config.topk_group]
    candidates = [e for g in kept for e in groups[g]]
    return sorted(candidates, key=lambda e: (-biased[e], e))[: config.top_k]


CONFIGS = [
    (32, RouterConfig(4, 2, 4, True, 2.5)),
    (512, RouterConfig(8, 4, 8, True, 2.5)),
    (128, RouterConfig(8, 4, 8, True, 2.5)),
    (32, RouterConfig(1, 1, 4, True, 1.0)),  # no groups
    (32, RouterConfig(4, 4, 4, False, 2.5)),  # every group kept
    (8, RouterConfig(8, 4, 3, True, 2.5)),  # one expert per group
    (16, RouterConfig(8, 2, 4, True, 2.5)),  # every expert of the kept groups chosen
]


@pytest.mark.parametrize(("num_experts", "config"), CONFIGS)
@pytest.mark.parametrize("levels", [None, 3])
def test_ids_equal_a_sorting_oracle_with_and_without_ties(num_experts, config, levels):
    generator = torch.Generator().manual_seed(num_experts)
    if levels is None:
        logits, bias = torch.randn(40, num_experts, generator=generator), torch.randn(num_experts, generator=generator)
    else:  # few distinct logits and no bias: most choices are ties, between groups too
        logits = torch.randint(levels, (40, num_experts), generator=generator).float()
        bias = torch.zeros(num_experts)
    _, ids = grouped_topk(logits, bias, config)
    scores = 1 / (1 + torch.exp(-logits)) + bias
    assert ids.dtype == torch.int64
    assert ids.tolist() == [_oracle_ids(row, config) for row in scores.tolist()]


def test_all_equal_scores_choose_the_lowest_groups_and_ids():
    _, ids = grouped_topk(torch.zeros(2, 32), torch.zeros(32), RouterConfig(4, 2, 6, True, 2.5))
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_weights_are_unbiased_normalised_over_the_chosen_and_scaled():
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0]])
    bias = torch.tensor([-10.0, 0.0, 5.0, 0.0])
    weights, ids = grouped_topk(logits, bias, RouterConfig(1, 1, 2, True, 2.5))
    assert ids.tolist() == [[2, 3]]  # the bias moves the choice, off the best logit
    chosen = logits.sigmoid()[0, [2, 3]]
    torch.testing.assert_close(weights[0], 2.5 * chosen / chosen.sum())
    raw, _ = grouped_topk(logits, bias, RouterConfig(1, 1, 2, False, 2.5))
    torch.testing.assert_close(raw[0], 2.5 * chosen)


def test_best_expert_of_a_dropped_group_is_not_chosen():
    logits = torch.tensor([[9.0, -9.0, 1.0, 1.0, 0.9, 0.9]])  # group 0 holds the best expert and the worst pair
    _, ids = grouped_topk(logits, torch.zeros(6), RouterConfig(3, 2, 3, True, 1.0))
    assert ids.tolist() == [[2, 3, 4]]


def test_dropped_experts_are_minus_infinity_not_zero():
    logits, bias = torch.zeros(1, 8), torch.full((8,), -3.0)
    bias[5] = -2.9  # all biased scores are negative: a zero mask would prefer the dropped groups
    _, ids = grouped_topk(logits, bias, RouterConfig(4, 1, 2, True, 1.0))
    assert ids.tolist() == [[5, 4]]


def test_vanishing_scores_give_finite_weights():
    weights, _ = grouped_topk(torch.full((1, 8), -200.0), torch.zeros(8), RouterConfig(1, 1, 2, True, 2.5))
    assert weights.tolist() == [[0.0, 0.0]]


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    generator = torch.Generator().manual_seed(5)
    for num_experts, config in CONFIGS:
        logits, bias = torch.randn(9, num_experts, generator=generator), torch.zeros(num_experts)
        weights, ids = grouped_topk(logits, bias, config)
        for row in range(9):
            alone = grouped_topk(logits[row : row + 1].clone(), bias, config)
            assert torch.equal(alone[0][0], weights[row]) and torch.equal(alone[1][0], ids[row])


@pytest.mark.parametrize(
    "config",
    [RouterConfig(5, 2, 4, True, 1.0), RouterConfig(4, 5, 4, True, 1.0), RouterConfig(4, 1, 9, True, 1.0)],
)
def test_configs_that_do_not_fit_the_experts_are_refused(config):
    with pytest.raises(ValueError):
        grouped_topk(torch.zeros(1, 32), torch.zeros(32), config)


def test_routing_reads_no_device_value_on_the_host():
    with FakeTensorMode():
        weights, ids = grouped_topk(torch.zeros(6, 32), torch.zeros(32), RouterConfig(4, 2, 4, True, 2.5))
    assert weights.shape == ids.shape == (6, 4)
