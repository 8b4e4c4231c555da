"""Pictures: the right colours in the right places, whole files only, no global state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from tests.helpers import refused

from fedfill.data.samples import Samples
from fedfill.runs.pictures import (
    _colour,
    _many,
    _step,
    accuracy_bars,
    accuracy_curves,
    class_bars,
    heat_map,
    image_grid,
)  # fmt: skip


def pixels(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def test_heat_map_is_dark_where_samples_are(tmp_path: Path) -> None:
    # two maps without numbers that differ only in where the samples are: in the last clients and classes, or the first
    pictures = []
    for clients, classes in ((slice(25, 50), slice(15, 30)), (slice(0, 25), slice(0, 15))):
        counts = np.zeros((50, 30), int)
        counts[clients, classes] = 7
        heat_map(counts.tolist(), [str(index) for index in range(30)], tmp_path / "map.png")
        pictures.append(pixels(tmp_path / "map.png").astype(int).sum(axis=2))
    last, first = np.argwhere(pictures[0] < pictures[1]), np.argwhere(pictures[1] < pictures[0])
    # each block is one rectangle, a quarter of the map, and they touch in the middle of it
    for block in (last, first):
        assert len(block) == pytest.approx(np.prod(np.ptp(block, axis=0) + 1), rel=0.01)
    assert len(first) == pytest.approx(len(last), rel=0.02)
    np.testing.assert_allclose(last.min(axis=0), first.max(axis=0) + 1, atol=2)


@pytest.mark.parametrize(
    ("clients", "classes"), [(1, 1), (1, 2), (3, 10), (40, 20), (41, 2), (100, 10), (1000, 100), (5, 1000)]
)
def test_heat_map_of_any_size(tmp_path: Path, clients: int, classes: int) -> None:
    heat_map(
        np.full((clients, classes), 3).tolist(), [f"class number {i}" for i in range(classes)], tmp_path / "map.png"
    )
    height, width, _ = pixels(tmp_path / "map.png").shape
    assert 150 < height < 2600
    assert 150 < width < 2800


def test_heat_map_of_empty_clients(tmp_path: Path) -> None:
    heat_map([[0, 0], [0, 0]], ["a", "b"], tmp_path / "map.png")
    assert pixels(tmp_path / "map.png").size


@pytest.mark.parametrize(("counts", "names"), [([], ["a"]), ([[1, 2]], ["a"]), ([1, 2], ["a", "b"])])
def test_heat_map_of_nonsense(tmp_path: Path, counts: list[list[int]], names: list[str]) -> None:
    with refused("heat map", f"{len(names)} class names"):
        heat_map(counts, names, tmp_path / "map.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("channels", [1, 3])
def test_image_grid_shows_classes_in_rows(tmp_path: Path, channels: int) -> None:
    shades = torch.tensor([40, 90, 140, 190], dtype=torch.uint8)
    images = shades.view(4, 1, 1, 1).expand(4, channels, 14, 14).contiguous()
    # class 0: 140, 40; class 1: 90, 190; in the order in which they come
    image_grid(Samples(images[[2, 1, 0, 3]], torch.tensor([0, 1, 0, 1])), ["first", "second"], tmp_path / "grid.png")
    picture = pixels(tmp_path / "grid.png")
    places = {shade: np.argwhere((picture == shade).all(axis=2)).mean(axis=0) for shade in (40, 90, 140, 190)}
    assert places[140][0] == pytest.approx(places[40][0], abs=2)
    assert places[140][1] < places[40][1]
    assert places[90][0] == pytest.approx(places[190][0], abs=2)
    assert places[90][1] < places[190][1]
    assert places[140][0] < places[90][0]


def test_image_grid_draws_at_most_so_many_and_leaves_empty_classes_empty(tmp_path: Path) -> None:
    samples = Samples(torch.full((9, 1, 8, 8), 100, dtype=torch.uint8), torch.zeros(9, dtype=torch.int64))
    image_grid(samples, ["some", "none"], tmp_path / "two.png", per_class=2)
    image_grid(samples, ["some", "none"], tmp_path / "four.png", per_class=4)
    two, four = (int((pixels(tmp_path / name) == 100).all(axis=2).sum()) for name in ("two.png", "four.png"))
    assert four == pytest.approx(2 * two, rel=0.05)


def test_image_grid_shows_below_each_its_nearest(tmp_path: Path) -> None:
    shades = torch.tensor([40, 90, 140, 190], dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 1, 14, 14).contiguous()
    image_grid(Samples(shades[:2], torch.tensor([0, 1])), ["a", "b"], tmp_path / "grid.png", below=shades[2:])
    picture = pixels(tmp_path / "grid.png")
    places = {shade: np.argwhere((picture == shade).all(axis=2)).mean(axis=0) for shade in (40, 90, 140, 190)}
    for above, under in ((40, 140), (90, 190)):
        assert places[above][1] == pytest.approx(places[under][1], abs=2)
    assert places[40][0] < places[140][0] < places[90][0] < places[190][0]
    assert places[140][0] - places[40][0] < places[90][0] - places[140][0]  # pairs stand closer than rows


def test_image_grid_of_many_classes(tmp_path: Path) -> None:
    samples = Samples(torch.zeros(100, 3, 32, 32, dtype=torch.uint8), torch.arange(100))
    image_grid(samples, [f"class {i}" for i in range(100)], tmp_path / "grid.png")
    assert pixels(tmp_path / "grid.png").shape[0] > 4000


@pytest.mark.parametrize(
    "inputs", [torch.zeros(2, 1, 4, 4), torch.zeros(2, 2, 4, 4, dtype=torch.uint8), torch.zeros(2, 5)]
)
def test_image_grid_of_what_is_no_image(tmp_path: Path, inputs: torch.Tensor) -> None:
    with refused("image grid", "2 inputs", list(inputs.shape[1:]), inputs.dtype):
        image_grid(Samples(inputs, torch.zeros(2, dtype=torch.int64)), ["a"], tmp_path / "grid.png")


def places(path: Path, colour: str) -> NDArray[np.int64]:
    """Where a colour stands, ``[n, 2]`` rows and columns."""
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return np.argwhere((pixels(path) == (red, green, blue)).all(axis=2))


def test_accuracy_curves_rise_and_fall(tmp_path: Path) -> None:
    accuracy_curves({"up": [{1: 0.1, 2: 0.5, 3: 0.9}], "down": [{1: 0.9, 2: 0.5, 3: 0.1}]}, tmp_path / "curves.png")
    up, down = (places(tmp_path / "curves.png", _colour(k)) for k in (0, 1))
    # only the axes' part: the legend repeats both colours to the right of it
    for found, sign in ((up, -1), (down, 1)):
        found = found[found[:, 1] < 1000]
        assert np.sign(np.corrcoef(found.T)[0, 1]) == sign  # rows are counted from the top


def test_accuracy_curves_of_several_seeds_have_a_band(tmp_path: Path) -> None:
    accuracy_curves({"a": [{1: 0.2, 2: 0.4}, {1: 0.2, 2: 0.4}]}, tmp_path / "narrow.png")
    accuracy_curves({"a": [{1: 0.0, 2: 0.1}, {1: 0.4, 2: 0.7}]}, tmp_path / "wide.png")
    tinted = []
    for name in ("narrow.png", "wide.png"):
        picture = pixels(tmp_path / name).astype(int)
        tinted.append(int((picture[..., 2] - picture[..., 0] > 20).sum()))
    assert tinted[1] > 5 * tinted[0]


def test_accuracy_curves_of_one_round_and_of_many_algorithms(tmp_path: Path) -> None:
    accuracy_curves({"one": [{1: 0.5}]}, tmp_path / "one.png")
    assert len(places(tmp_path / "one.png", _colour(0))) > 20  # a dot, since a line needs two
    accuracy_curves({f"algorithm {k}": [{1: 0.1 * k, 2: 0.5}] for k in range(10)}, tmp_path / "many.png")
    assert all(len(places(tmp_path / "many.png", _colour(k))) for k in range(8))


def test_accuracy_curves_stand_at_their_rounds(tmp_path: Path) -> None:
    accuracy_curves({"every": [dict.fromkeys(range(1, 101), 0.5)]}, tmp_path / "all.png")
    accuracy_curves({"few": [{50: 0.5, 100: 0.5}], "every": [dict.fromkeys(range(1, 101), 0.9)]}, tmp_path / "few.png")
    widths = [
        np.ptp(found[found[:, 1] < 1000][:, 1])
        for found in (places(tmp_path / f"{name}.png", _colour(0)) for name in ("all", "few"))
    ]
    assert widths[1] == pytest.approx(widths[0] / 2, rel=0.1)


def test_the_title_counts_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_title", lambda _axes, title, **_: titles.append(title))
    one, two = [{1: 0.5}], [{1: 0.5}, {1: 0.6}]
    for curves in ({"a": one}, {"a": two, "b": two}, {"a": one, "b": two}):
        accuracy_curves(curves, tmp_path / "curves.png")
    ends = [title.removeprefix("accuracy per round") for title in titles]
    assert ends == [", one seed", ": mean and range of 2 seeds", ": mean and range of 1 to 2 seeds"]


def test_accuracy_bars_are_as_long_as_their_means(tmp_path: Path) -> None:
    def shades(finals: dict[str, tuple[list[float], list[float | None]]]) -> dict[bool, int]:
        accuracy_bars(finals, tmp_path / "bars.png")
        picture = pixels(tmp_path / "bars.png").astype(int)
        bluish = picture[..., 2] - picture[..., 0]
        return {True: int((bluish > 100).sum()), False: int((bluish < -100).sum())}

    short, long = shades({"a": ([0.2, 0.3], [0.5, 0.5])}), shades({"a": ([0.7, 0.8], [0.5, 0.5])})
    assert long[True] > 2 * short[True]
    assert long[False] == pytest.approx(short[False], rel=0.05)
    # clients without test splits: no bar for the worst of them
    assert shades({"a": ([0.7, 0.8], [None, None])})[False] < 0.01 * long[False]


@pytest.mark.parametrize("curves", [{}, {"a": []}, {"a": [{}]}, {"a": [{1: 0.5}], "b": []}])
def test_no_curves(tmp_path: Path, curves: dict[str, list[dict[int, float]]]) -> None:
    with refused("accuracy curves", "no round"):
        accuracy_curves(curves, tmp_path / "curves.png")
    assert not list(tmp_path.iterdir())


def test_no_bars(tmp_path: Path) -> None:
    with refused("accuracy bars", "no run"):
        accuracy_bars({}, tmp_path / "bars.png")
    assert not list(tmp_path.iterdir())


def test_a_failed_picture_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "map.png"
    path.write_bytes(b"the old one")

    def half(self: Figure, file: object, **_: object) -> None:
        file.write(b"half a pict")  # type: ignore[attr-defined]
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="disk full"):
        heat_map([[1]], ["a"], path)
    assert path.read_bytes() == b"the old one"
    assert [found.name for found in tmp_path.iterdir()] == ["map.png"]


def test_a_new_picture_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    path.write_bytes(b"the old one")
    heat_map([[1]], ["a"], path)
    assert pixels(path).size
    assert [found.name for found in tmp_path.iterdir()] == ["map.png"]


def svg_of(path: Path) -> str:
    text = path.with_suffix(".svg").read_text()
    assert text.lstrip().startswith("<?xml")
    return text


def test_charts_are_written_as_svg_too_and_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    curves = {"a": [{1: 0.2, 2: 0.4}]}
    finals: dict[str, tuple[list[float], list[float | None]]] = {"a": ([0.2], [0.1])}
    texts = []
    for _ in range(2):
        accuracy_curves(curves, tmp_path / "curves.png")
        accuracy_bars(finals, tmp_path / "bars.png")
        texts.append([svg_of(tmp_path / name) for name in ("curves.png", "bars.png")])
    assert texts[0] == texts[1]
    assert not list(tmp_path.glob("*.tmp"))
    image_grid(
        Samples(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)),
        ["a"],
        tmp_path / "g.png",
    )
    assert not (tmp_path / "g.svg").exists()


def test_rounds_are_whole_numbers_and_the_title_names_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr("fedfill.runs.pictures._save", lambda figure, *_: figures.append(figure))
    for last in (2, 3, 7, 50):
        accuracy_curves({"a": [{t: t / 50 for t in range(1, last + 1)}]}, tmp_path / "c.png", title="digits, iid")
        axes = figures[-1].axes[0]
        assert all(tick == int(tick) for tick in axes.get_xticks())
        assert axes.get_title(loc="left").splitlines()[0] == "digits, iid"
    accuracy_bars({"a": ([0.2], [0.1])}, tmp_path / "b.png", title="digits, iid")
    assert figures[-1].axes[0].get_title(loc="left").splitlines()[0] == "digits, iid"


def test_identical_curves_are_both_seen(tmp_path: Path) -> None:
    same = [dict.fromkeys(range(1, 41), 0.5)]
    accuracy_curves({"under": same, "above": same}, tmp_path / "curves.png")
    under, above = (places(tmp_path / "curves.png", _colour(k)) for k in (0, 1))
    for found in (under, above):
        assert len(found[found[:, 1] < 1000]) > 300  # the chart's part; the legend stands to the right of it


def test_no_pyplot() -> None:
    code = "import sys, fedfill.runs.pictures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_labels_are_thinned_in_round_steps() -> None:
    assert [_step(items, 20) for items in (1, 20, 21, 40, 41, 100, 101, 200, 1000)] == [1, 1, 2, 2, 5, 5, 10, 10, 50]


def test_counting_words() -> None:
    assert [_many(1, "class"), _many(2, "class"), _many(1797, "sample")] == ["1 class", "2 classes", "1,797 samples"]


def test_class_bars_are_as_high_as_their_shares(tmp_path: Path) -> None:
    sizes = []
    for share in (None, 0.25, 0.5, 1.0):
        class_bars({"one": [share, 0.5], "other": [0.5, None]}, ["a", "b"], tmp_path / "bars.png", "title")
        sizes.append(len(places(tmp_path / "bars.png", _colour(0))))
    nothing, *shares = (size - sizes[0] for size in sizes)
    assert nothing == 0
    assert [size / shares[-1] for size in shares] == pytest.approx([0.25, 0.5, 1], rel=0.02)


@pytest.mark.parametrize("classes", [1, 2, 100, 1000])
def test_class_bars_of_any_number(tmp_path: Path, classes: int) -> None:
    names = [f"class number {c}" for c in range(classes)]
    class_bars({"one": [0.5] * classes, "other": [None] * classes}, names, tmp_path / "bars.png", "title")
    height, width, _ = pixels(tmp_path / "bars.png").shape
    assert 400 < height < 1000
    assert 700 < width < 2800


@pytest.mark.parametrize(("bars", "names"), [({}, ["a"]), ({"one": [0.5]}, ["a", "b"]), ({"one": []}, [])])
def test_class_bars_of_nonsense(tmp_path: Path, bars: dict[str, list[float]], names: list[str]) -> None:
    with refused("class bars", [len(values) for values in bars.values()], f"{len(names)} class names"):
        class_bars(bars, names, tmp_path / "bars.png", "title")
    assert not list(tmp_path.iterdir())
