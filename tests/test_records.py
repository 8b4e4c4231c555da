"""RECORDS.md: every command names what there is, and the cheapest record comes out again."""

from __future__ import annotations

import csv
import json
import re
import shlex
import statistics
import tomllib
from pathlib import Path

import pytest
from scipy import stats

from fedfill.studies.benchmark_sets import DIGITS
from fedfill.studies.natural import natural

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^\| [^|]+ \| (\.\d+) ± (\.\d+) \|.*\| `(fedfill [^`]+)` \|$", re.MULTILINE)
RECORDS = [
    (float(mean), float(half), command) for mean, half, command in LINE.findall((ROOT / "RECORDS.md").read_text())
]
REPRODUCED = [record for record in RECORDS if record[2].startswith("fedfill reproduce")]
NATURAL = [record for record in RECORDS if record[2].startswith("fedfill bench natural")]


def options(command: str) -> tuple[list[str], dict[str, str]]:
    """The words of a command before its options, and its options."""
    words = shlex.split(command)
    first = next(k for k, word in enumerate(words) if word.startswith("--"))
    return words[:first], dict(zip(words[first::2], words[first + 1 :: 2], strict=True))


def moments(values: list[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), float(half)


def test_there_are_records_of_each_kind() -> None:
    assert REPRODUCED
    assert NATURAL
    assert len(RECORDS) == len(REPRODUCED) + len(NATURAL)


@pytest.mark.parametrize(("mean", "half", "command"), REPRODUCED)
def test_a_record_of_a_table_is_what_its_results_say(mean: float, half: float, command: str) -> None:
    words, given = options(command)
    place = ROOT / "experiments" / words[2]
    assert given["--only"] in [row["name"] for row in tomllib.loads((place / "table.toml").read_text())["rows"]]
    runs = [run for run in json.loads((place / "results.json").read_text()) if run["row"] == given["--only"]]
    assert sorted(run["seed"] for run in runs) == [0, 1, 2]
    found = moments([run["accuracy"] for run in runs])
    assert found == (pytest.approx(mean, abs=5.1e-5), pytest.approx(half, abs=5.1e-5))


@pytest.mark.parametrize(("mean", "half", "command"), NATURAL)
def test_a_record_of_the_benchmark_is_what_its_stored_figures_say(mean: float, half: float, command: str) -> None:
    given = options(command)[1]
    digits = given["--sets"] == DIGITS
    noise = f"-epsilon-{given['--epsilon']}" if "--epsilon" in given else ""
    stored = ROOT / "experiments" / "natural" / f"natural{'-digits' if digits else ''}{noise}.csv"
    run = {"set": given["--sets"], "method": given["--methods"], "figure": "accuracy" if digits else "auc"}
    with stored.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if run.items() <= line.items()]
    assert [line["seed"] for line in lines] == ["0", "1", "2"]
    found = moments([float(line["value"]) for line in lines])
    assert found == (pytest.approx(mean, abs=5.1e-5), pytest.approx(half, abs=5.1e-5))


def test_the_cheapest_record_comes_out_again(tmp_path: Path) -> None:
    mean, half, command = next(record for record in NATURAL if "penguins" in record[2])
    words, given = options(command)
    assert words == ["fedfill", "bench", "natural"]
    assert given.keys() == {"--sets", "--methods", "--out"}  # all else is as the benchmark has it
    found = natural(given["--sets"].split(","), methods=given["--methods"].split(","), out=tmp_path / "out", quiet=True)
    rows = [row for key, row in found.rows["penguins"].items()]
    assert len(rows) == 1
    # another processor may round otherwise, and so rank a pair of rows otherwise
    assert moments(rows[0].values("auc")) == (pytest.approx(mean, abs=1e-3), pytest.approx(half, abs=2e-3))
