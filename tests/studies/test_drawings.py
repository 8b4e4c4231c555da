"""Drawings of a report: lengths and places are the figures', colours can be told apart and read in light and dark."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import pytest

from fedfill.studies.reporting.bars import Bar, bars_of, forest, strip
from fedfill.studies.reporting.drawings import STYLES, Curve, lines, powers_of_ten, thinned, ticks
from fedfill.studies.reporting.heat import LEVELS, heat, level
from fedfill.studies.reporting.values import amount, duration, percent, quantiles, spread

SAID = {"title": "a title", "description": "what it shows"}
CSS = files("fedfill.studies.reporting").joinpath("page/report.css").read_text()


def path_of(svg: str, kind: str) -> list[str]:
    return re.findall(rf'<path class="{kind}" d="([^"]*)"', svg)


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0, 100, False, [0, 20, 40, 60, 80, 100]),
        (1, 12, True, [2, 4, 6, 8, 10, 12]),
        (1, 3, True, [1, 2, 3]),
        (1, 2, True, [1, 2]),
        (1, 1000, True, [200, 400, 600, 800, 1000]),
        (0, 0.5, False, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (-40, 60, False, [-40, -20, 0, 20, 40, 60]),
        (7, 7, True, [7]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, whole: bool, expected: list[float]) -> None:
    assert ticks(low, high, 6, whole) == expected


def test_ticks_of_powers_of_ten() -> None:
    assert powers_of_ten(0.9, 21) == [1, 2, 5, 10, 20]
    assert powers_of_ten(1, 1e6) == [10.0**k for k in range(7)]


def test_lines_stand_at_their_figures() -> None:
    svg = lines(
        [Curve("a", [(1, 0.0), (2, 50.0), (3, 100.0)])], **SAID, x_label="round", y_label="percent", y_range=(0, 100)
    )
    (path,) = path_of(svg, "c s0")
    points = [tuple(map(float, pair.split())) for pair in re.findall(r"[\d.]+ [\d.]+", path)]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x2 == pytest.approx((x1 + x3) / 2, abs=0.1)
    assert y2 == pytest.approx((y1 + y3) / 2, abs=0.1)
    grid = [float(y) for y in re.findall(r'class="grid" d="M[\d.]+ ([\d.]+)H', svg)]
    assert y1 == pytest.approx(max(grid))  # upward is more
    assert y3 == pytest.approx(min(grid))


def test_curves_are_told_apart_without_colour() -> None:
    curves = [Curve(f"c{k}", [(t, 50.0) for t in range(1, 41)], style=k) for k in range(STYLES)]
    svg = lines(curves, **SAID, x_label="round", y_label="percent", y_range=(0, 100))
    dashes = re.findall(r'<path class="c s\d" d="[^"]*"(?: stroke-dasharray="([^"]*)")?/>', svg)
    assert len(dashes) == len(set(dashes)) == STYLES
    markers = {k: path_of(svg, f"m s{k}") for k in range(STYLES)}
    shapes = {re.sub(r"^M[\d.]+ [\d.]+", "", marks[0]) for marks in markers.values()}
    assert len(shapes) == STYLES
    first = [float(re.match(r"M([\d.]+)", markers[k][0])[1]) for k in range(3)]  # type: ignore[index]
    assert len(set(first)) > 1  # a curve upon another one shows its own marks


def test_long_curves_are_thinned_with_their_ends() -> None:
    points = [(float(t), float(t)) for t in range(1, 10_001)]
    kept = thinned(points, 100)
    assert (len(kept), kept[0], kept[-1]) == (100, points[0], points[-1])
    assert len(lines([Curve("a", points)], **SAID, x_label="", y_label="", y_range=(0, 1e4))) < 6000


def test_bars_are_as_long_as_their_values() -> None:
    svg = bars_of([Bar("a", 25.0), Bar("b", 100.0), Bar("c", None)], **SAID, x_label="percent")
    ends = [tuple(map(float, found)) for found in re.findall(r'class="bar s0" d="M([\d.]+) [\d.]+H([\d.]+)', svg)]
    lengths = [end - start for start, end in ends]
    assert len(lengths) == 2
    assert lengths[0] / lengths[1] == pytest.approx(0.25, abs=0.01)


def test_strips_have_a_dot_for_each_value_and_quantiles_of_many() -> None:
    few = strip([Bar("a", 50.0, [0.0, 50.0, 100.0])], **SAID, x_label="percent")
    places = sorted(float(x) for x in re.findall(r'class="spot s0" cx="([\d.]+)"', few))
    assert len(places) == 3
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)
    many = strip([Bar("a", 50.0, [float(k) for k in range(101)])], **SAID, x_label="percent")
    assert 'class="spot' not in many
    box = re.search(r'class="box s0" d="M([\d.]+) [\d.]+H([\d.]+)', many)
    assert box is not None
    grid = [float(x) for x in re.findall(r'class="grid" d="M([\d.]+)', many)]
    wide = max(grid) - min(grid)
    assert (float(box[2]) - float(box[1])) / wide == pytest.approx(0.5, abs=0.01)  # 25 to 75


def test_differences_stand_on_both_sides_of_zero() -> None:
    svg = forest(
        [Bar("a", -10.0, interval=(-20.0, 0.0)), Bar("b", 10.0, style=1, interval=(0.0, 20.0))],
        **SAID,
        x_label="points",
    )
    zero = float(re.search(r'class="axis" d="M([\d.]+)', svg)[1])  # type: ignore[index]
    left, right = (
        tuple(map(float, re.findall(r"M([\d.]+) [\d.]+H([\d.]+)", path_of(svg, f"c s{k}")[0])[0])) for k in (0, 1)
    )
    assert left[1] == pytest.approx(zero, abs=0.11)
    assert right[0] == pytest.approx(zero, abs=0.11)
    assert zero - left[0] == pytest.approx(right[1] - zero, abs=0.21)


def test_shades_grow_with_the_value() -> None:
    assert [level(v, 100) for v in (0, 0.001, 25, 100, 200)] == [0, 1, 4, LEVELS, LEVELS]
    assert [level(v, 100, even=True) for v in (0, 1, 25, 50, 100)] == [0, 1, 2, 4, LEVELS]
    assert level(5, 0) == 0


def test_a_heat_map_has_every_cell_and_its_figure() -> None:
    svg = heat(
        [[0, 3], [12, None]], ["x", "y"], ["a", "b"], **SAID, x_label="class", y_label="client", totals=["3", "12"]
    )
    cells = [cell for k in range(LEVELS + 1) for path in path_of(svg, f"h{k}") for cell in path.split("M")[1:]]
    assert len(cells) == 3  # one has no figure
    assert re.findall(r'class="a-middle n\d">(\d+)<', svg) == ["0", "3", "12"]
    assert re.findall(r'class="a-middle n0">(\d+)<', svg) == ["0"]
    wide = heat(
        [[1] * 100] * 40,
        [str(k) for k in range(40)],
        [f"class {k}" for k in range(100)],
        **SAID,
        x_label="",
        y_label="",
    )
    assert not re.search(r'class="a-middle n\d"', wide)  # no room for figures
    assert len(wide) < 100_000


def luminance(colour: str) -> float:
    shares = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def schemes() -> list[dict[str, str]]:
    found = []
    for block in re.findall(r":root \{(.*?)\}", CSS, re.S):
        colours = dict(re.findall(r"--(\w+): ([^;]+);", block))
        found.append(
            {name: colours[value[6:-1]] if value.startswith("var(") else value for name, value in colours.items()}
        )
    return found


def test_contrast_is_enough_in_light_dark_and_print() -> None:
    assert len(schemes()) == 3
    for scheme in schemes():
        for text in ("ink", "soft", "link"):
            assert contrast(scheme[text], scheme["bg"]) >= 4.5
        assert contrast(scheme["ink"], scheme["panel"]) >= 4.5
        for k in range(STYLES):
            assert contrast(scheme[f"s{k}"], scheme["bg"]) >= 3  # what is drawn
        for k in range(LEVELS + 1):
            text = scheme["n0" if k == 0 else "low" if k < 5 else "turn" if k == 5 else "high"]
            assert contrast(text, scheme[f"h{k}"]) >= 4.5, k
        for one, other in itertools.combinations(range(STYLES), 2):
            assert scheme[f"s{one}"] != scheme[f"s{other}"]
        steps = [luminance(scheme[f"h{k}"]) for k in range(LEVELS + 1)]
        assert steps in (sorted(steps), sorted(steps, reverse=True))


def test_figures_are_written_shortly() -> None:
    assert [percent(0.8024), percent(None)] == ["80.2 %", "–"]
    assert [spread([0.5, 0.7]), spread([0.5]), spread([])] == ["60.0 ± 14.1 %", "50.0 %", "–"]
    assert [amount(0), amount(999), amount(1500), amount(123_456_789), amount(2.5e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "123 MB",
        "2500 GB",
    ]
    assert [duration(7.11), duration(600), duration(9000)] == ["7.1 s", "10 min", "2.5 h"]
    assert quantiles([4, 1, 2, 3, 5]) == [1, 2, 3, 4, 5]
