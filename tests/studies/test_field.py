"""experiments/field: what new runs replace, what is counted, and that the page says what is stored."""

from __future__ import annotations

import csv
import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedfill.studies.rules import NOT_TRIED

FIELD = Path(__file__).parents[2] / "experiments" / "field"
SCRIPTS = ("stored", "choice", "counts", "picture", "table", "personal", "everyone", "pages")


@pytest.fixture
def field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The scripts of a copy of the folder, so that they write there."""
    folder = Path(shutil.copytree(FIELD, tmp_path / "field"))
    monkeypatch.syspath_prepend(str(folder))
    for name in SCRIPTS:
        sys.modules.pop(name, None)
    yield SimpleNamespace(folder=folder, **{name: importlib.import_module(name) for name in SCRIPTS})
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def lines_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def run_of(
    place: Path, settings: dict[str, str], summary: dict[str, Any], last: dict[str, Any], **options: Any
) -> None:
    """A finished run, as far as the scripts read it."""
    place.mkdir(parents=True)
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
    text += "\n[settings]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
    (place / "experiment.toml").write_text(text)
    (place / "summary.json").write_text(json.dumps(summary))
    (place / "rounds.jsonl").write_text(json.dumps({"round": 1, **last}) + "\n")


def run_of_the_field(field: SimpleNamespace, place: Path, seed: int, accuracy: float, **changed: Any) -> None:
    """A run of FedAvg with one class per client and a learning rate of .1, but for what is changed."""
    options = field.choice.asked()["fedavg"].options | {"algorithm": "fedavg"} | changed
    local = {name: json.dumps(options.pop(name)) for name in ("optimizer", "local_epochs", "batch_size", "head")}
    summary = {
        "algorithm": "fedavg", "partition": "classes:1", "seed": seed, "seconds": 7.0, "bytes_up": 3_000_000, "bytes_down": 2_000_000,
        "bytes_by_handler": {"head_sums": {"up": 900_000, "down": 100_000}}, "validation_samples": [30, 10],
    }  # fmt: skip
    last = {
        "accuracy": accuracy, "accuracy_of_trained_head": 0.5,
        "validation_by_client": [0.8, 0.4], "validation_of_trained_head": [0.4, None],
    }  # fmt: skip
    run_of(place / "grid" / f"seed{seed}", {**local, "learning_rate": "0.1"}, summary, last, **options)


def test_the_pages_tables_and_counts_are_what_is_stored(field: SimpleNamespace) -> None:
    before = (field.folder / "README.md").read_text()
    for script in (field.table, field.personal):
        script.show(field.stored.read(script.FILE))
    assert (field.folder / "README.md").read_text() == before


def test_new_runs_replace_their_own_figures_and_all_others_stay(
    field: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lines_of(field.table.FILE)
    run_of_the_field(field, tmp_path / "runs", seed=1, accuracy=0.61)
    run_of_the_field(field, tmp_path / "more", seed=7, accuracy=0.62)
    monkeypatch.setattr(sys, "argv", ["table.py", str(tmp_path / "runs"), str(tmp_path / "more")])
    monkeypatch.setattr(field.table, "draw", lambda lines: None)
    field.table.main()
    after = lines_of(field.table.FILE)

    def others(lines: list[dict[str, str]]) -> list[dict[str, str]]:
        own = {"partition": "classes:1", "algorithm": "fedavg", "learning_rate": "0.1"}
        return [line for line in lines if not (line.items() >= own.items() and line["seed"] in "17")]

    assert others(after) == others(before)
    new = [line for line in after if line not in others(after)]
    assert len(after) == len(before) + 2
    common = {"partition": "classes:1", "algorithm": "fedavg", "learning_rate": "0.1", "seconds": "7.0"}
    # 30 records of the one client and 10 of the other; a client without a share is out
    trained = common | {"head": "trained", "validation": "0.4", "accuracy": "0.5", "megabytes": "4.0"}
    ccvr = common | {"head": "ccvr", "validation": "0.7", "megabytes": "5.0"}
    assert new == [
        trained | {"seed": "1"}, ccvr | {"seed": "1", "accuracy": "0.61"},
        trained | {"seed": "7"}, ccvr | {"seed": "7", "accuracy": "0.62"},
    ]  # fmt: skip
    # sorted as before: new runs stand beside those of the same method and learning rate
    at = [after.index(line) for line in new]
    assert at == [at[0], at[0] + 1, at[0] + 4, at[0] + 5]


def test_small_amounts_have_a_decimal_and_nothing_is_nothing(field: SimpleNamespace) -> None:
    found = [field.stored.amount(values) for values in ([0.0, 0.0], [0.2, 0.4], [0.02], [9.94], [9.96], [12.6, 12.0])]
    assert found == ["0", "0.3", "0.0", "9.9", "10", "12"]


@pytest.mark.parametrize(
    ("changed", "word"),
    [({"rounds": "11"}, "rounds"), ({"model": "resnet18"}, "model"), ({"local_epochs": "3"}, "local_epochs")],
)
def test_runs_that_no_grid_asks_for_are_refused(
    field: SimpleNamespace, tmp_path: Path, changed: dict[str, str], word: str
) -> None:
    run_of_the_field(field, tmp_path / "runs", seed=1, accuracy=0.6, **changed)
    with pytest.raises(SystemExit, match=f"{word}: found"):
        list(field.table.collected(tmp_path / "runs"))


def test_what_takes_one_round_was_asked_for_one(field: SimpleNamespace) -> None:
    options = field.choice.asked()["fedcgs"].options
    document = {**options, "settings": {}}
    assert (options["rounds"], field.choice.asked()["softmax"].options["rounds"]) == ("1", "10")
    name_of = field.table.name_of
    assert name_of(Path("run"), "fedcgs", "classes:1", {**document, "model": "cnn2"}) == "fedcgs"
    with pytest.raises(SystemExit, match="rounds: found 10; allowed: 1"):
        name_of(Path("run"), "fedcgs", "classes:1", {**document, "model": "cnn2", "rounds": 10})


def test_a_folder_without_runs_is_refused(field: SimpleNamespace, tmp_path: Path) -> None:
    for script in (field.table, field.personal):
        with pytest.raises(SystemExit, match="no finished run"):
            list(script.collected(tmp_path))


def test_new_personal_runs_join_those_that_are_stored(
    field: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lines_of(field.personal.FILE)
    domains = list(field.personal.DOMAINS)
    summary = {
        "client_names": domains, "accuracy_by_client": [0.5, 0.25, 0.75, 0.5], "seed": 1,
        "bytes_up": 1_000_000, "bytes_down": 2_000_000, "seconds": 9.0,
    }  # fmt: skip
    run_of(tmp_path / "runs" / "grid" / "fedbn-seed1", {}, summary, {})
    monkeypatch.setattr(sys, "argv", ["personal.py", str(tmp_path / "runs")])
    field.personal.main()
    after = lines_of(field.personal.FILE)
    assert len(after) == len(before)
    (changed,) = (k for k, line in enumerate(after) if line != before[k])
    expected = ["fedbn", "1", "0.5", "0.25", "0.5", "0.25", "0.75", "0.5", "3.0", "9.0"]
    assert (before[changed]["algorithm"], before[changed]["seed"]) == ("fedbn", "1")
    assert list(after[changed].values()) == expected


def test_each_clients_model_is_scored_on_everyones_test_sets(
    field: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    domains = field.personal.DOMAINS
    # of ten images of each source, all of class 0: model i calls 0 what has at most as many bright pixels as i says
    bright = {name: torch.arange(10).view(10, 1, 1, 1).float() + k for k, name in enumerate(domains)}
    tests = {name: (images, torch.zeros(10, dtype=torch.int64)) for name, images in bright.items()}

    class Threshold(torch.nn.Module):
        def __init__(self, most: int) -> None:
            super().__init__()
            self.most = most

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            above = (inputs.flatten(1).sum(1) > self.most).float()
            return torch.stack([1 - above, above], dim=1)

    most = dict(zip(domains, (9, 9, 4, 0), strict=True))
    shares = {name: [min(max(most[name] - k + 1, 0), 10) / 10 for k in range(4)] for name in domains}
    summary = {
        "client_names": list(domains),
        "accuracy_by_client": [shares[n][k] for k, n in enumerate(domains)],
        "seed": 2,
        "personal": True,
    }
    run_of(tmp_path / "runs" / "grid" / "fedper-seed2", {}, summary, {})
    monkeypatch.setattr(field.everyone.fedfill, "load", lambda run, client: Threshold(most[client]))
    (line,) = field.everyone.scored(tmp_path / "runs", tests)
    # by hand: 1, .9, .8, .7 twice; .5, .4, .3, .2; .1, 0, 0, 0
    assert (line["algorithm"], line["seed"]) == ("fedper", "2")
    assert float(line["everyone"]) == pytest.approx((2 * 3.4 + 1.4 + 0.1) / 16)
    summary["accuracy_by_client"] = [1, 0.9, 0.4, 0]
    (tmp_path / "runs" / "grid" / "fedper-seed2" / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(SystemExit, match=r"svhn: found 0\.3"):
        list(field.everyone.scored(tmp_path / "runs", tests))


def made_up(
    name: str, by_seed: list[float], rate: str = "0.1", head: str = "ccvr", validation: float = 0.5
) -> list[dict[str, str]]:
    return [
        {
            "partition": "classes:1", "algorithm": name, "learning_rate": rate, "seed": str(seed), "head": head,
            "validation": str(validation), "accuracy": str(accuracy), "megabytes": "1", "seconds": "1800",
        }
        for seed, accuracy in enumerate(by_seed)
    ]  # fmt: skip


@pytest.fixture
def small() -> list[dict[str, str]]:
    """FedAvg at .50, .60 and .70 with a last layer from sums, and others around it."""
    return [
        *made_up("fedavg", [0.50, 0.60, 0.70]),
        *made_up("fedavg", [0.40, 0.50, 0.30], head="trained"),
        *made_up("fedprox", [0.505, 0.604, 0.694]),  # .1 points above in the mean, two seeds of three
        *made_up("feddyn", [0.52, 0.62, 0.723]),  # 2.1 above, surely
        *made_up("fedavgm", [0.51, 0.61, 0.76]),  # 2.67 above with every seed, and not surely
        *made_up("moon", [0.482, 0.581, 0.683]),  # 1.8 below, surely
        *made_up("qffl", [0.47, 0.70, 0.70], rate="0.02", validation=0.4),  # not chosen
        *made_up("qffl", [0.40, 0.50, 0.60]),  # 10 below with every seed alike, which has no interval
        *made_up("fedma", [0.9, 0.9]),  # a seed is not finished: not counted
        *made_up("fed3r", [0.8, 0.9, 0.9], rate="", head="trained"),  # has no last layer of its own: not counted
        *made_up("softmax", [0.8, 0.8, 0.9], rate="", head="trained"),
        *made_up("feddyn", [0.45, 0.55, 0.35], head="trained"),
        *made_up("fedprox", [0.41, 0.51, 0.31], head="trained"),
        *made_up("fedavgm", [0.41, 0.51, 0.31], head="trained"),
        *made_up("moon", [0.30, 0.40, 0.20], head="trained"),
        *made_up("qffl", [0.30, 0.40, 0.20], head="trained"),
    ]


def test_methods_are_counted_by_hand(field: SimpleNamespace, small: list[dict[str, str]]) -> None:
    ccvr = "| one class per client | with `ccvr` | 5 | 1 | 2 | 2 | 2 | 1 | 1: `feddyn` | 2: `feddyn`, `fedavgm` |"
    found = field.counts.counted(small).splitlines()
    assert found[-1] == ccvr
    assert len(found) == 4  # a header of two, and two last layers of the one division with runs


def test_gains_are_counted_by_hand(field: SimpleNamespace, small: list[dict[str, str]]) -> None:
    # FedAvg gains 10, 10 and 40 points; FedDyn as trained 5; fed3r is 30, 30 and 20 above the 50, 60 and 70, softmax 30, 20 and 20
    expected = "| one class per client | +20.0 ± 17.3 | `feddyn` +5.0 ± 0.0 | +26.7 ± 5.8 | +23.3 ± 5.8 |"
    assert field.counts.gains(small).splitlines()[2:] == [expected]


def test_totals_are_counted_by_hand(field: SimpleNamespace, small: list[dict[str, str]]) -> None:
    # runs: three seeds of five methods and of two that send sums, two seeds of one, and three of q-FFL with another learning rate
    runs, networks = 3 * 6 + 3 * 2 + 2 + 3, 3 * 6 + 2 + 3
    first, second = field.counts.totals(small).splitlines()
    assert first == f"{runs} finished runs, {networks} of them of networks in rounds; {runs / 2:.1f} hours."
    # six with two last layers, FedMA with one: only q-FFL with its last layer from sums ran with two rates, .02 and .1, and takes .1
    assert second == "In 13 of 13 cases the highest learning rate that was run there is taken, in 12 the lowest."
    low = [
        line | {"validation": "0.3"} if line["algorithm"] == "qffl" and line["head"] == "ccvr" else line
        for line in small
    ]
    low += made_up("qffl", [0.1, 0.1, 0.1], rate="0.05", validation=0.35)  # between two ends
    assert field.counts.totals(low).splitlines()[1].startswith("In 12 of 13 cases")


@pytest.mark.parametrize(("weighting", "name"), [("uniform", "fedavg, uniform"), ("samples", "fedavg")])
def test_a_method_that_is_asked_for_twice_has_its_settings_in_its_name(
    field: SimpleNamespace, tmp_path: Path, weighting: str, name: str
) -> None:
    assert field.choice.baseline_of("fedavg, uniform") == "fedavg"
    assert field.choice.baseline_of("fedavg, cnn2bn, uniform") == "fedavg, cnn2bn"
    run_of_the_field(field, tmp_path / "runs", seed=1, accuracy=0.6, weighting=weighting)
    assert {line["algorithm"] for line in field.table.collected(tmp_path / "runs")} == {name}


def test_fedavg_with_other_weights_is_not_counted_as_a_method(
    field: SimpleNamespace, small: list[dict[str, str]]
) -> None:
    before = field.counts.counted(small)
    assert field.counts.counted([*small, *made_up("fedavg, uniform", [0.9, 0.9, 0.9])]) == before


def test_pages_of_methods_say_what_is_stored(field: SimpleNamespace) -> None:
    stored, pages = field.stored.read(field.folder / "runs.csv"), FIELD.parents[1] / "docs" / "algorithms"
    texts = {page.name: page.read_text() for page in pages.glob("*.md")}
    assert sum(len(field.pages.TABLE.findall(text)) for text in texts.values()) >= 19
    assert [name for name, text in texts.items() if field.pages.brought_up(text, stored) != text] == []


def test_the_studys_points_are_those_of_the_stored_runs(field: SimpleNamespace) -> None:
    lines = field.stored.read(field.folder / "runs.csv")

    def points(names: str, head: str, *divisions: str) -> list[int]:
        """Mean differences to FedAvg, whole, in ascending order."""
        gaps = (field.counts.gaps_of(lines, d, name, head) for name in names.split(", ") for d in divisions)
        return sorted(round(fmean(found)) for found in gaps)

    def losses(names: str, *divisions: str) -> str:
        found = points(names, "trained", *divisions)
        return f"{-found[-1]} to {-found[0]} points"

    every, hard, one = tuple(field.choice.PARTITIONS), ("dirichlet:0.1", "classes:1"), "classes:1"
    personal = field.stored.read(field.folder / "personal.csv")
    own = {
        name: fmean(100 * float(line["mean"]) for line in personal if line["algorithm"] == name)
        for name in ("pfedavg", "perfedavg")
    }
    said = {
        "feddpms, sdafl, fedzdac, fedzdas": f"{fmean(field.counts.gaps_of(lines, one, 'feddpms', 'trained')):.1f} (feddpms)",
        "feddyn": "by {} to {} points with ccvr".format(*points("feddyn", "ccvr", *every)[::2]),
        "fedavgm": f"{points('fedavgm', 'trained', one)[0]} points above fedavg there, {points('fedavgm', 'ccvr', one)[0]} with ccvr",
        "fedadam, fedyogi, fedadagrad": f"they lost {losses('fedadam, fedyogi, fedadagrad', *every)}",
        "fedsam, mofedsam": "{} and {} points above fedavg there, {} to {} with ccvr".format(
            *points("fedsam, mofedsam", "trained", one), *points("fedsam, mofedsam", "ccvr", one)
        ),
        "feddc": f"it lost {losses('feddc', *hard)}",
        "moon": f"it lost {losses('moon', *every)}",
        "qffl": f"it lost {losses('qffl', *every)}",
        "fedma": "{} to {} points above fedavg, {} to {} with ccvr".format(
            *points("fedma", "trained", *every)[::2], *points("fedma", "ccvr", *every)[::2]
        ),
        "perfedavg": f"{round(own['pfedavg'] - own['perfedavg'])} points below it on digits",
    }
    assert [(names, words) for names, words in said.items() if words not in NOT_TRIED[names]] == []
    assert all(abs(gap) <= 1 for gap in points("fedcurv", "trained", *every))
    assert min(min(field.counts.gaps_of(lines, d, "feddyn", head)) for d in every for head in ("trained", "ccvr")) > 0


def test_a_page_is_brought_up_by_hand(field: SimpleNamespace, small: list[dict[str, str]]) -> None:
    header = "| | `feddyn` | with `ccvr` | `fedavg` | with `ccvr` |\n|---|---|---|---|---|\n"
    row = "| One class per client | .450 ± .100 | .621 ± .102 | .400 ± .100 | .600 ± .100 |\n"
    page = f"Words.\n\n{header}| Dirichlet .5 | .1 | .2 | .3 | .4 |\n\nMore words.\n"
    assert field.pages.brought_up(page, small) == f"Words.\n\n{header}{row}\nMore words.\n"
    other = "| | `feddyn` | others |\n|---|---|---|\n| mean | 1 | 2 |\n"  # a table of another kind stays
    assert field.pages.brought_up(other, small) == other


def test_a_damaged_summary_is_told_of_in_a_sentence(field: SimpleNamespace, tmp_path: Path) -> None:
    run_of(tmp_path / "grid" / "fedbn-seed1", {}, {}, {})
    (tmp_path / "grid" / "fedbn-seed1" / "summary.json").write_text("{")
    for script in (field.table, field.personal):
        with pytest.raises(SystemExit, match="not the summary of a finished run"):
            list(script.collected(tmp_path))
