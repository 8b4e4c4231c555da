"""Cox regression over sites: equal to that of all rows together, within sites, what sites refuse, and what is told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from bench.same_bits import GIVEN, table, times
from numpy.typing import NDArray
from statsmodels.duration.hazard_regression import PHReg
from tests.algorithms.survival_world import GRID, given, on_grid, run
from tests.helpers import refused
from tests.protocol.world import ENGINES

import fedfill
from fedfill.algorithms.cox import AskAt, Cox, design
from fedfill.data.schema import from_document, read_schema
from fedfill.experiment.loop import make_server
from fedfill.experiment.prepare import arrange
from fedfill.statistics.survival import concordance, kaplan_meier
from fedfill.tree import sha256


def coefficients(result: fedfill.Result) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result.summary["findings"]["coefficients"]}


def pooled(rows: pd.DataFrame, strata: bool = False) -> Any:
    """statsmodels' fit of the same covariates in one place, in the columns' own units."""
    seen, events = on_grid(rows)
    steps = rows["grade"].map({"low": 0.0, "middle": 1.0, "high": 2.0})
    x: NDArray[Any] = np.stack(
        [rows["age"], steps.fillna(1.0), steps.isna(), rows["arm"] == "new"], axis=1
    ).astype(np.float64)  # fmt: skip
    sites = rows["hospital"].to_numpy() if strata else None
    return PHReg(seen, x, status=events.astype(int), ties="breslow", strata=sites).fit(tol=1e-13)


NAMES = ["age", "grade", "grade is missing", "arm: new against old"]


@pytest.mark.parametrize("strata", ["none", "site"])
def test_the_coefficients_are_those_of_all_rows_together(strata: str, tmp_path: Path) -> None:
    data, rows = given(tmp_path / "data")
    result, known = run("cox", tmp_path / "run", data=data, strata=strata), pooled(rows, strata == "site")
    found = coefficients(result)
    assert [found[name]["coefficient"] for name in NAMES] == pytest.approx(known.params, abs=1e-6)
    assert [found[name]["se"] for name in NAMES] == pytest.approx(known.bse, abs=1e-6)
    assert [found[name]["p"] for name in NAMES] == pytest.approx(known.pvalues, abs=1e-6)
    assert result.summary["findings"]["log_likelihood"] == pytest.approx(known.llf, abs=1e-6)
    for name in NAMES:
        row, z = found[name], 1.959963984540054
        ends = [math.exp(row["coefficient"] + sign * z * row["se"]) for sign in (0, -1, 1)]
        assert [row["hazard_ratio"], row["low"], row["high"]] == pytest.approx(ends)
    assert result.summary["findings"]["converged"]


def test_nothing_is_held_out_on_demand(tmp_path: Path) -> None:
    result, known = run("cox", tmp_path / "run", test_fraction=0), pooled(times())
    assert [coefficients(result)[name]["coefficient"] for name in NAMES] == pytest.approx(known.params, abs=1e-6)
    assert result.summary["findings"]["log_likelihood"] == pytest.approx(known.llf, abs=1e-6)


def test_every_split_gives_one_result(tmp_path: Path) -> None:
    splits: list[dict[str, Any]] = [
        {"partition": "iid", "clients": 1}, {}, {"partition": "iid", "clients": 5, "workers": 3, "fewest": 1},
    ]  # fmt: skip
    found = [run("cox", tmp_path / str(k), **split) for k, split in enumerate(splits)]
    first, *others = ([row["coefficient"] or 0 for row in coefficients(result).values()] for result in found)
    for other in others:
        assert other == pytest.approx(first, abs=1e-10)
    twice = run("cox", tmp_path / "again", workers=1)
    assert twice.summary["weights_sha256"] == found[1].summary["weights_sha256"]


def test_the_network_holds_the_fit(tmp_path: Path) -> None:
    """Its risk ranks as the coefficients do, and its hazards are Breslow's."""
    data, rows = given(tmp_path / "data")
    result = run("cox", tmp_path / "run", data=data)
    schema = read_schema(GIVEN["their schema"]())
    risk = result.weights["classifier.risk.weight"][0].double()
    inputs = {one.name: one for one in design(schema)}
    for name, row in coefficients(result).items():
        own = float(risk[inputs[name].place]) * inputs[name].unit
        assert own == pytest.approx(row["coefficient"] or 0, abs=1e-6)
    fit = pooled(rows)
    seen, events = on_grid(rows)
    factor = np.exp(fit.model.exog @ fit.params)  # of the columns' own units; the network's begin in the middle
    middle = math.exp(float(np.dot(fit.params, [57.5, 1, 0, 0])))
    hazard = [events[seen == time].sum() / factor[seen >= time].sum() * middle for time in GRID]
    assert result.weights["classifier.log_hazard"].double().exp().numpy() == pytest.approx(np.array(hazard), rel=1e-5)


def test_the_network_tells_what_the_curves_tell_however_far_from_zero_the_rows_lie(tmp_path: Path) -> None:
    """A laboratory value at one end of wide bounds, which protects: a row whose inputs are 0 has next to no hazard."""
    draw = np.random.default_rng(0)
    lab = draw.lognormal(0.0, 0.6, 400).clip(0, 99)
    ends = draw.exponential(30, 400) * np.exp(0.7 * lab)
    data = pd.DataFrame(
        {"lab": lab, "weeks": ends.clip(max=48), "relapse": (ends <= 48).astype(int), "hospital": [*range(4)] * 100}
    )
    document = {
        "site": "hospital", "columns": {"lab": {"kind": "real", "low": 0, "high": 100}},
        "target": {"column": "weeks", "kind": "survival", "event": "relapse", "grid": GRID.tolist()},
    }  # fmt: skip
    (tmp_path / "schema.toml").write_text(from_document(document, "").toml())
    result = run("cox", tmp_path / "run", data=data, schema_file=tmp_path / "schema.toml", client_test=0.0)
    (row,) = (row for row in result.summary["findings"]["coefficients"] if row["name"] == "lab")
    assert row["coefficient"] < -0.5
    said = fedfill.predict(result, data[["lab"]]).survival.mean(0)
    cells = torch.from_numpy(read_schema(tmp_path / "schema.toml").target.labels(dict(data[["weeks", "relapse"]]), ""))
    seen = kaplan_meier(torch.bincount(cells, minlength=2 * len(GRID) + 1)).survival
    assert said.numpy() == pytest.approx(seen.numpy(), abs=0.02)


def test_within_sites_the_network_ranks_and_tells_no_probability(tmp_path: Path) -> None:
    """Nobody but a site knows its hazard over time."""
    result = run("cox", tmp_path / "run", strata="site")
    assert result.summary["findings"]["model_tells"] == "ranks"
    rows = pd.DataFrame({"age": [20, 90], "arm": ["new", "old"], "grade": ["low", "high"]})
    risk = {name: row["coefficient"] for name, row in coefficients(result).items()}
    for place in (result, fedfill.export(result, tmp_path / "model")):
        found = fedfill.predict(place, rows)
        assert next(iter(found.table())) == ("file", "row", "risk")
        by_hand = 70 * risk["age"] + 2 * risk["grade"] - risk["arm: new against old"]
        assert float(torch.log(found.risk[1] / found.risk[0])) == pytest.approx(by_hand, abs=1e-4)
        with refused("survival", "strata=none"):
            _ = found.medians
    assert "model_tells" not in run("cox", tmp_path / "whole").summary["findings"]
    place = result.directory / "summary.json"
    place.write_text(place.read_text().replace('"model_tells": "ranks"', '"ranks_only": true'))
    with refused("survival", "strata=none"):  # a run from before the word
        _ = fedfill.predict(result.directory, rows).medians


def test_how_well_it_ranks(tmp_path: Path) -> None:
    data, rows = given(tmp_path / "data")
    result = run("cox", tmp_path / "run", data=data)
    found = result.summary["findings"]
    fit, schema = pooled(rows), read_schema(GIVEN["their schema"]())
    cells = torch.from_numpy(schema.target.labels({"weeks": [*rows["weeks"]], "relapse": [*rows["relapse"]]}, ""))
    risk = torch.from_numpy(fit.model.exog @ fit.params)
    whole = concordance(risk, cells, len(GRID)).index
    assert whole is not None
    assert found["c_index_by_ranges"] == pytest.approx(whole, abs=0.005)
    parts = [
        concordance(risk[site], cells[site], len(GRID)) for site in (rows["hospital"].to_numpy() == i for i in range(4))
    ]
    assert found["c_index_within_sites"] == pytest.approx(sum(parts[1:], parts[0]).index)
    assert result.summary["c_index"] > 0.6, "on rows that it has not seen, too"
    assert result.summary["verdicts"] == []


def test_curves_of_thirds_stand_beside_the_models(tmp_path: Path) -> None:
    result = run("cox", tmp_path / "run")
    found = pd.read_csv(result.directory / "curves.csv")
    labels = ["lowest risk", "middle risk", "highest risk"]
    assert [*found["curve"].unique()] == [word for label in labels for word in (label, f"model, {label}")]
    at_risk = found[(found["time"] == 0) & ~found["curve"].str.startswith("model")]["at_risk"]
    assert at_risk.max() < 1.5 * at_risk.min()
    last = found[found["time"] == GRID[-1]].set_index("curve")["survival"]
    for label in labels:
        assert last[f"model, {label}"] == pytest.approx(last[label], abs=0.12)
    assert last["lowest risk"] > last["middle risk"] > last["highest risk"]
    assert (result.directory / "curves.png").exists()
    own = run("cox", tmp_path / "own", strata="site")
    assert not (own.directory / "curves.csv").exists(), "no site tells its hazards"


def test_it_says_that_there_is_no_epsilon_and_what_to_do(tmp_path: Path) -> None:
    result = run("cox", tmp_path / "run", strata="site")
    assert result.summary["privacy"]["total_epsilon"] is None
    (warning,) = result.summary["warnings"]
    assert all(word in warning for word in ("no epsilon", "mst", "docs/survival.md"))


def test_times_at_which_few_leave_are_told(tmp_path: Path) -> None:
    """Whoever leaves alone between two times is the difference of their sums."""
    data = times()
    event, weeks = data["relapse"] == 1, data["weeks"]
    last = (event & weeks.between(9, 12)) | (~event & weeks.between(12, 15))  # at risk at 12, and not at 16
    data = pd.concat([data[~last], data[last][:3]])
    for name, more, told in (("few", {}, 1), ("all", {"fewest": 1}, 0)):
        warnings = run("cox", tmp_path / name, data=data, **more).summary["warnings"]
        assert len([warning for warning in warnings if "rows leave" in warning]) == told


def test_a_grid_that_is_too_coarse_is_told(tmp_path: Path) -> None:
    """Coefficients shrink by about the share of those at risk who have their event at the same time."""
    draw = np.random.default_rng(0)
    age = draw.uniform(20, 90, 4000)
    ends, left = draw.exponential(12 * np.exp(-0.03 * (age - 55))), draw.uniform(0, 48, 4000)
    data = pd.DataFrame(
        {
            "age": age,
            "weeks": np.minimum(ends, left),
            "relapse": (ends <= left).astype(int),
            "hospital": [*range(4)] * 1000,
        }
    )
    for size, told in ((6, True), (100, False)):
        document = {
            "site": "hospital", "columns": {"age": {"kind": "real", "low": 20, "high": 90}},
            "target": {"column": "weeks", "kind": "survival", "event": "relapse", "grid": np.linspace(0, 24, size + 1)[1:].tolist()},
        }  # fmt: skip
        (tmp_path / f"{size}.toml").write_text(from_document(document, "").toml())
        result = run("cox", tmp_path / str(size), data=data, schema_file=tmp_path / f"{size}.toml")
        words = [warning for warning in result.summary["warnings"] if "grid: on average" in warning]
        assert bool(words) == told
        shrunk = 1 - coefficients(result)["age"]["coefficient"] / 0.03
        if words:
            assert shrunk == pytest.approx(int(words[0].split("average ")[1].split("%")[0]) / 100, rel=0.4)
        else:
            assert abs(shrunk) < 0.07


def test_a_site_with_few_at_risk_sends_nothing(tmp_path: Path) -> None:
    data = times()
    data = data[(data["hospital"] != 2) | (data["weeks"] <= 20) | (np.arange(400) % 40 == 2)]
    with refused("fewest", "client 2", "5", "strata") as caught:
        run("cox", tmp_path / "few", data=data)
    assert not (tmp_path / "few" / "summary.json").exists()
    ends = float(str(caught.value).split("ends at ")[1].split(";")[0])
    schema = read_schema(GIVEN["their schema"]())
    document = schema.document()
    document["target"]["grid"] = [time for time in GRID.tolist() if time <= ends]
    (tmp_path / "short.toml").write_text(from_document(document, "").toml())
    for name, options in (
        ("short", {"schema_file": tmp_path / "short.toml"}), ("one", {"fewest": 1}), ("site", {"strata": "site"}),
    ):  # fmt: skip
        assert run("cox", tmp_path / name, data=data, **options).summary["findings"]["converged"]


def test_what_no_row_tells_is_named(tmp_path: Path) -> None:
    """Nobody's arm is another word, and an age that all have says nothing."""
    result = run("cox", tmp_path / "run", data=times().assign(age=50))
    found = coefficients(result)
    assert found["age"] == {"name": "age", "coefficient": None, "why": "the rows say nothing of it"}
    assert found["arm: other against old"]["coefficient"] is None
    assert found["arm: new against old"]["se"] > 0


def test_what_no_row_tells_apart_is_named(tmp_path: Path) -> None:
    """Where nobody has the word with which the others are compared, they can't be."""
    data = times()
    result = run("cox", tmp_path / "run", data=data.assign(arm=data["arm"].replace({"old": "other"})))
    found = coefficients(result)
    assert found["arm: new against old"]["why"] == "no row tells it apart from 'arm: other against old'"
    assert found["arm: other against old"]["why"] == "no row tells it apart from 'arm: new against old'"
    assert found["age"]["se"] > 0


def test_a_column_that_tells_the_event_is_told(tmp_path: Path) -> None:
    data = times().assign(arm=lambda rows: np.where(rows["relapse"] == 1, "new", "old"))
    for most in (6, 40):
        result = run("cox", tmp_path / str(most), data=data, most_steps=most)
        assert not result.summary["findings"]["converged"]
        assert any("most_steps" in warning and "arm: new" in warning for warning in result.summary["warnings"])


def laboratory(folder: Path, high: float) -> dict[str, Any]:
    """Values of which most are below 10 and none above 125, under an upper bound as wide as this."""
    draw = np.random.default_rng(0)
    lab, age = draw.exponential(15, 500).clip(0, 125), draw.uniform(20, 90, 500)
    ends = draw.exponential(30, 500) * np.exp(-0.02 * lab - 0.02 * age + 1.5)
    data = pd.DataFrame({
        "lab": lab, "age": age, "weeks": ends.clip(max=36), "relapse": (ends <= 36).astype(int), "hospital": [*range(4)] * 125
    })  # fmt: skip
    document = {
        "site": "hospital",
        "columns": {"lab": {"kind": "real", "low": 0, "high": high}, "age": {"kind": "real", "low": 20, "high": 90}},
        "target": {"column": "weeks", "kind": "survival", "event": "relapse", "grid": GRID.tolist()},
    }
    place = folder / f"{high:g}.toml"
    place.write_text(from_document(document, "").toml())
    return {"data": data, "schema_file": place}


@pytest.mark.parametrize("strata", ["none", "site"])
def test_wide_bounds_change_nothing(strata: str, tmp_path: Path) -> None:
    """The weight exp(beta' x) of a row is beyond what numbers hold where a wide bound puts all rows far from 0."""
    found = {}
    for high in (125.0, 20_000.0, 1e6):
        result = run("cox", tmp_path / f"{high:g}", strata=strata, **laboratory(tmp_path, high))
        found[high] = result.summary["findings"]
        assert [w for w in result.summary["warnings"] if "rounding" in w] == []
        row = coefficients(result)["lab"]
        assert [row["coefficient"], row["se"]] == pytest.approx(
            [found[125.0]["coefficients"][0][name] for name in ("coefficient", "se")], rel=2e-4
        )
        assert found[high]["log_likelihood"] == pytest.approx(found[125.0]["log_likelihood"], rel=1e-5)
        assert found[high]["c_index_within_sites"] == pytest.approx(found[125.0]["c_index_within_sites"], abs=1e-3)
        if strata == "none":
            assert found[high]["c_index_by_ranges"] == pytest.approx(found[high]["c_index_within_sites"], abs=0.01)
            said = fedfill.predict(result, laboratory(tmp_path, high)["data"][["lab", "age"]]).survival.mean(0)
            curves = pd.read_csv(result.directory / "curves.csv")
            model = curves[curves["curve"].str.startswith("model") & (curves["time"] > 0)]
            assert model.groupby("time")["survival"].mean().to_numpy() == pytest.approx(said.numpy(), abs=0.01)


def test_bounds_that_leave_nothing_of_the_values_are_named(tmp_path: Path) -> None:
    result = run("cox", tmp_path / "run", **laboratory(tmp_path, 1e8))
    assert [w for w in result.summary["warnings"] if "'lab'" in w and "'age'" not in w and "moments" in w]


def test_coefficients_are_of_the_columns_own_units() -> None:
    inputs = design(read_schema(GIVEN["their schema"]()))
    assert [one.name for one in inputs] == [
        "age", "age is missing", "grade", "grade is missing", "arm: new against old", "arm: other against old",
    ]  # fmt: skip
    assert inputs[0].unit == pytest.approx(1 / 39.5)


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"model": "mlp"}, "model"),
        ({"data": table(), "schema_file": GIVEN["its schema"]()}, "schema_file"),
        ({"fewest": 0}, "fewest"),
        ({"band_level": 1.0}, "band_level"),
        ({"target_epsilon": 1.0}, "setting"),
    ],
)
def test_slips_are_one_sentence_and_nothing_is_written(options: dict[str, Any], setting: str, tmp_path: Path) -> None:
    with refused(setting):
        run("cox", tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["cox", "kaplanmeier"])
def test_hosts_give_the_same_bits(name: str) -> None:
    options = {"data": times(), "schema_file": GIVEN["their schema"](), "partition": "domain", "client_test": 0.0}
    prepared = arrange(name, model="auto", **options)
    found = []
    for engine in (ENGINES["local"], ENGINES["flower"]):
        carrier = engine(prepared.algorithm, prepared.federation, prepared.model, prepared.initial, 0, 2, None)
        server = make_server(prepared, carrier, torch.device("cpu"))
        server.begin(0)
        prepared.algorithm.round(server, 0)
        findings = prepared.algorithm.findings(server)
        assert findings is not None
        found.append((sha256(server.state.weights), findings.figures, findings.curves, server.costs.bytes_up))
        carrier.close()
    assert found[0] == found[1]


def test_no_sum_tells_of_a_row_that_leaves_before_the_first_grid_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sum over all rows, that over the first risk set would tell the covariates of those who are not in it."""
    x, cells = torch.tensor([[1.0], [2.0], [100.0]]), torch.tensor([0, 3, 2])  # of two grid times; 2: left before them
    monkeypatch.setattr(Cox, "rows", lambda self, client: (x, cells, 2))
    ask, nobody = AskAt(torch.zeros(1), torch.zeros(1)), cast(Any, None)
    found, risks = (handler(nobody, ask).sums for handler in (Cox().counts, Cox().risks))
    assert found["sum"] == risks["s1"][0] == 3.0
