"""Markov random fields: elimination by hand, the network against the whole product, and the fit against proportional fitting."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import by_proportions

from fedfill.statistics.marginals import Network, Noisy
from fedfill.statistics.markov import cells, elimination, fitted, marginal, network_of

SIZES = (3, 2, 4, 2, 3)
CLIQUES = [(0, 1), (1, 2), (0, 2), (2, 3), (4,)]


def factors(seed: int = 0) -> dict[tuple[int, ...], np.ndarray]:
    rng = np.random.default_rng(seed)
    return {clique: rng.normal(size=[SIZES[k] for k in clique]) for clique in CLIQUES}


def field(seed: int = 0, root: int = 3, total: float = 100.0) -> Network:
    return network_of(SIZES, factors(seed), elimination(SIZES, CLIQUES, root), total)


def whole(found: dict[tuple[int, ...], np.ndarray], total: float) -> np.ndarray:
    """The product of all factors, with an axis for each column."""
    logs = sum(np.expand_dims(x, [k for k in range(len(SIZES)) if k not in c]) for c, x in found.items())
    joint = np.exp(logs)
    return total * joint / joint.sum()


def test_elimination_by_hand():
    # the lone column goes first, with 3 cells; then 0 or 1, at 3 * 2 * 4 cells each; then 1, with 2 alone; the root stays
    assert list(elimination(SIZES, CLIQUES, 3).items()) == [(3, ()), (2, (3,)), (1, (2,)), (0, (1, 2)), (4, ())]
    assert cells(SIZES, elimination(SIZES, CLIQUES, 3)) == 2 + 8 + 8 + 24 + 3
    # a square gets a diagonal
    square = elimination((2, 2, 2, 2), [(0, 1), (1, 2), (2, 3), (0, 3)], 3)
    assert square == {3: (), 2: (3,), 1: (2, 3), 0: (1, 3)}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=9), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_parents_come_first_and_every_clique_lies_with_one_column(pairs: list[tuple[int, int]], root: int):
    cliques = [tuple(sorted({*pair})) for pair in pairs]
    found = elimination((2, 3, 4, 2, 3, 5), cliques, root)
    order = list(found)
    assert sorted(order) == list(range(6))
    assert order[0] == root
    assert found[root] == ()
    assert all(order.index(a) < order.index(column) for column, above in found.items() for a in above)
    assert all(any({*clique} <= {column, *above} for column, above in found.items()) for clique in cliques)
    # what a column's parents are tied to is among the parents of the last of them
    for above in filter(None, found.values()):
        last = max(above, key=order.index)
        assert {*above} - {last} <= {*found[last]}


@pytest.mark.parametrize("root", [0, 2, 3, 4])
def test_the_network_is_the_product_of_the_factors(root: int):
    made, joint = field(root=root), whole(factors(), 100.0)
    for n in (1, 2, 3):
        for columns in itertools.permutations(range(5), n):
            rest = tuple(k for k in range(5) if k not in columns)
            wanted = joint.sum(rest).transpose([sorted(columns).index(k) for k in columns])
            assert marginal(made, columns) == pytest.approx(wanted)
    assert all(table == pytest.approx(marginal(made, (*made.parents[k], k))) for k, table in made.tables.items()), (
        "its tables are counts, as those of other networks"
    )


def test_large_factors_do_not_overflow():
    made = network_of((2, 2), {(0, 1): np.array([[800.0, 0.0], [0.0, 801.0]])}, elimination((2, 2), [(0, 1)], 1), 1.0)
    assert marginal(made, (0, 1)) == pytest.approx(np.array([[1, 0], [0, np.e]]) / (1 + np.e))


def test_drawing_a_class_leaves_columns_alone_that_it_says_nothing_of():
    """Column 4 has no parents either, and the root's values are not its own."""
    made, draw = field(root=3), np.random.default_rng(0)
    rows = made.sample(600, draw, np.repeat([0, 1], 300))
    assert rows[:, 3].tolist() == [0] * 300 + [1] * 300
    assert np.bincount(rows[:, 4], minlength=3) == pytest.approx(6 * marginal(made, (4,)), abs=1)


def test_the_fit_agrees_with_consistent_tables():
    """And is the one of the largest entropy: that of proportional fitting."""
    pytest.importorskip("mbi")
    known = field()
    tables = [Noisy(clique, marginal(known, clique), 0.0) for clique in CLIQUES]
    made, other = fitted(SIZES, tables, 100.0, 3), by_proportions(SIZES, tables, 100.0, 3)
    for columns in itertools.combinations(range(5), 2):
        assert marginal(made, columns) == pytest.approx(marginal(known, columns), abs=1e-5)
        assert marginal(other, columns) == pytest.approx(marginal(known, columns), abs=1e-5)


def test_the_fit_weighs_tables_by_their_noise():
    """Of one column there are two counts, 60 with deviation 1 and 40 with deviation 2: (60 / 1 + 40 / 4) / (1 + 1 / 4)."""
    pytest.importorskip("mbi")
    tables = [
        Noisy((0,), np.array([60.0, 40.0]), 1.0),
        Noisy((0, 1), np.array([[20.0, 20.0], [30.0, 30.0]]), 2.0 / np.sqrt(2)),
    ]
    made = fitted((2, 2), tables, 100.0, 1)
    assert marginal(made, (0,)) == pytest.approx([56.0, 44.0], abs=1e-3)


def test_a_table_may_have_more_columns_than_einsum_has_letters():
    sizes, pair = (2,) * 60, np.array([[0.0, 1.0], [2.0, 0.0]])
    made = network_of(sizes, {(57, 58): pair}, elimination(sizes, [(57, 58)], 59), 10.0)
    assert marginal(made, (57, 58)) == pytest.approx(10 * np.exp(pair) / np.exp(pair).sum())
    assert marginal(made, (58, 57)) == pytest.approx(marginal(made, (57, 58)).T)
