"""How alike updates are: inner products, cosines, distances, and groups by these."""

from itertools import combinations

import pytest
import torch

from fedfill.training.similarity import cosines, distances, hierarchical, products

FOUR = [{"w": torch.tensor(v)} for v in ([1.0, 0.0], [0.9, 0.1], [-1.0, 0.2], [-0.8, 0.0])]


def drawn(n: int, seed: int) -> list[dict[str, torch.Tensor]]:
    stream = torch.Generator().manual_seed(seed)
    return [{"a": torch.randn(2, 3, generator=stream), "b": torch.randn(1, generator=stream)} for _ in range(n)]


def flat(update: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in update.values()])


def test_cosines_by_hand():
    found = cosines(products(FOUR))
    expected = [
        [1, 0.9939, -0.9806, -1],
        [0.9939, 1, -0.9529, -0.9939],
        [-0.9806, -0.9529, 1, 0.9806],
        [-1, -0.9939, 0.9806, 1],
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=5e-5, rtol=0)


def test_products_and_distances_are_those_of_the_flat_updates():
    updates = drawn(5, 0)
    rows = torch.stack([flat(update) for update in updates])
    torch.testing.assert_close(products(updates), rows @ rows.T)
    torch.testing.assert_close(distances(products(updates)), torch.cdist(rows, rows), atol=1e-6, rtol=0)


def test_an_update_of_nothing_is_at_a_right_angle_to_all_others():
    still = {name: torch.zeros_like(tensor) for name, tensor in FOUR[0].items()}
    found = cosines(products([still, still, FOUR[0]]))
    assert found.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_no_updates_and_one():
    assert products([]).shape == (0, 0)
    assert hierarchical(distances(products([])), "ward", 2).tolist() == []
    assert hierarchical(distances(products(FOUR[:1])), "ward", 2).tolist() == [0]


def across(alike: torch.Tensor, groups: torch.Tensor) -> float:
    return float(alike[groups == 0][:, groups == 1].max())


def test_single_linkage_has_the_least_largest_cosine_across_of_all_halves():
    """Sattler et al.'s formula for the division, against all divisions; complete linkage does not always solve it."""
    worse = 0
    for seed in range(20):
        alike = cosines(products(drawn(6, seed)))
        halves = [
            torch.tensor([i in half for i in range(6)]).long() for k in (1, 2, 3) for half in combinations(range(6), k)
        ]
        best = min(across(alike, groups) for groups in halves)
        assert across(alike, hierarchical(1 - alike, "single", 2)) == pytest.approx(best)
        worse += across(alike, hierarchical(1 - alike, "complete", 2)) > best + 1e-9
    assert worse


@pytest.mark.parametrize("by", ["complete", "single", "average", "ward"])
def test_three_bundles_are_found_by_the_jump(by: str):
    stream = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    kinds = [2, 0, 0, 1, 2, 1, 0, 2, 1]
    points = [{"w": centres[k] + 0.1 * torch.randn(2, generator=stream)} for k in kinds]
    expected = [0, 1, 1, 2, 0, 2, 1, 0, 2]  # numbered by their first members
    for groups in (None, 3):
        assert hierarchical(distances(products(points)), by, groups).tolist() == expected


def test_equal_distances_give_as_many_groups_as_were_asked_for():
    apart = 1 - torch.eye(4, dtype=torch.float64)
    for groups in (1, 2, 3, 4, 9):
        found = hierarchical(apart, "complete", groups).tolist()
        assert sorted(set(found)) == list(range(min(groups, 4)))
