"""The picture of a synthetic table: any number of columns and cells, the same file again, and what does not fit."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.helpers import refused

from fedfill.runs.table_pictures import table_picture


def parts(sizes: list[int], seed: int = 0) -> tuple[list[list[str]], list[np.ndarray], list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    cells = [[f"$cell {k}" for k in range(size)] for size in sizes]
    made, real = ([rng.dirichlet(np.ones(size)) for size in sizes] for _ in range(2))
    errors = rng.random((len(sizes), len(sizes))) / 3
    return cells, made, real, (errors + errors.T) / 2


@pytest.mark.parametrize("sizes", [[2, 1], [2, 5, 24, 25, 300], [3] * 14, [4] * 25])
def test_a_picture_of_any_table_is_the_same_again(sizes: list[int], tmp_path: Path):
    names = [f"column {'x' * k}" for k in range(len(sizes))]
    for name in ("one", "two"):
        table_picture(names, *parts(sizes), tmp_path / f"{name}.png", "mst on $people.csv")
    with Image.open(tmp_path / "one.png") as picture:
        assert picture.format == "PNG"
        assert max(picture.size) < 6000
    for kind in ("png", "svg"):
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()
    assert len(list(tmp_path.iterdir())) == 4


def test_other_shares_and_other_errors_are_other_pictures(tmp_path: Path):
    cells, made, real, errors = parts([2, 3])
    table_picture(["a", "b"], cells, made, real, errors, tmp_path / "one.png", "")
    table_picture(["a", "b"], cells, real, made, errors, tmp_path / "two.png", "")
    table_picture(["a", "b"], cells, made, real, errors / 2 + 0.1, tmp_path / "three.png", "")
    assert len({(tmp_path / f"{name}.png").read_bytes() for name in ("one", "two", "three")}) == 3


def test_parts_that_do_not_fit(tmp_path: Path):
    cells, made, real, errors = parts([2, 3, 4])
    with refused("table picture", "[3, 3]", "2 columns"):
        table_picture(["a", "b"], cells, made, real, errors, tmp_path / "one.png", "")
    assert not list(tmp_path.iterdir())
