"""Kaplan-Meier over sites: the curve of all rows, the noise and its account, groups, files, and what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from bench.same_bits import GIVEN, table, times
from statsmodels.duration.survfunc import SurvfuncRight, survdiff
from tests.algorithms.survival_world import GRID, given, on_grid, run
from tests.helpers import refused
from tests.protocol.world import ENGINES

import fedfill
from fedfill.algorithms.kaplanmeier import KaplanMeier
from fedfill.data.schema import read_schema
from fedfill.experiment.prepare import arrange
from fedfill.runs.curves import StepCurve, _at
from fedfill.statistics.survival import encoding, kaplan_meier, noisy_kaplan_meier


def curves(result: fedfill.Result) -> dict[str, pd.DataFrame]:
    found = pd.read_csv(result.directory / "curves.csv")
    return {
        str(name): part[part["time"] > 0].reset_index(drop=True) for name, part in found.groupby("curve", sort=False)
    }


def test_the_curve_is_that_of_all_rows_together(tmp_path: Path) -> None:
    data, rows = given(tmp_path / "data")
    result = run("kaplanmeier", tmp_path / "run", data=data)
    times_seen, events = on_grid(rows)
    known = SurvfuncRight(times_seen, events)
    found = curves(result)["all"]
    at = [int(np.flatnonzero(known.surv_times == time)[0]) for time in GRID]
    assert found["survival"].to_numpy() == pytest.approx(known.surv_prob[at], abs=1e-9)
    assert found["se"].to_numpy() == pytest.approx(known.surv_prob_se[at], abs=1e-9)
    assert found["at_risk"].tolist() == known.n_risk[at].tolist()
    assert found["events"].sum() == events.sum() == result.summary["findings"]["groups"]["all"]["events"]
    assert result.summary["privacy"]["total_epsilon"] is None


@pytest.mark.parametrize("split", [{}, {"partition": "iid", "clients": 3}])
def test_nothing_is_held_out_on_demand(split: dict[str, Any], tmp_path: Path) -> None:
    rows, part = times(), run("kaplanmeier", tmp_path / "part", **split)
    result = run("kaplanmeier", tmp_path / "run", test_fraction=0, **split)
    assert part.summary["findings"]["groups"]["all"]["rows_at_risk"] < 0.85 * len(rows)
    seen, events = on_grid(rows)
    known, found = SurvfuncRight(seen, events), curves(result)["all"]
    at = [int(np.flatnonzero(known.surv_times == time)[0]) for time in GRID]
    assert found["survival"].to_numpy() == pytest.approx(known.surv_prob[at], abs=1e-9)
    assert found["se"].to_numpy() == pytest.approx(known.surv_prob_se[at], abs=1e-9)
    assert found["at_risk"].tolist() == known.n_risk[at].tolist()
    assert result.summary["test_fraction"] == 0
    assert any("none was held out (test_fraction 0)" in note for note in result.summary["notes"])
    assert result.summary["verdicts"] == [], "nothing is judged"
    assert not [note for note in result.summary["notes"] if "judged" in note or "fitted to" in note]
    assert fedfill.resume(tmp_path / "run", data=rows).was_finished


def test_what_is_told_by_the_figures_of_training_rows_is_in_the_account(tmp_path: Path) -> None:
    for share, method, told in ((0, "fed3r", True), (0.1, "fed3r", False), (0, "kaplanmeier", False)):
        account = run(method, tmp_path / f"{method}{share}", target_epsilon=3.0, test_fraction=share).summary["privacy"]
        assert ("test_fraction 0" in account["statement"]) == told


def test_every_split_gives_the_same_bits(tmp_path: Path) -> None:
    splits: list[dict[str, Any]] = [
        {}, {"partition": "iid", "clients": 3}, {"partition": "dirichlet:0.5", "clients": 3}, {"target_epsilon": 2.0, "trust": "server"},
        {"target_epsilon": 2.0, "trust": "server", "partition": "iid", "clients": 5},
    ]  # fmt: skip
    found = [run("kaplanmeier", tmp_path / str(k), **split) for k, split in enumerate(splits)]
    assert len({result.summary["weights_sha256"] for result in found}) == 2
    files = [(result.directory / "curves.csv").read_bytes() for result in found]
    assert files[0] == files[1] == files[2]
    assert files[3] == files[4] != files[0]


@pytest.mark.parametrize("trust", ["site", "secure", "server"])
@pytest.mark.parametrize("group", [None, "arm"])
def test_the_one_exchange_costs_what_was_asked_for(trust: str, group: str | None, tmp_path: Path) -> None:
    result = run("kaplanmeier", tmp_path / "run", target_epsilon=3.0, trust=trust, group=group)
    account = result.summary["privacy"]
    (entry,) = account["entries"]
    added = entry["conditional_epsilon_added"] if trust == "server" else account["total_epsilon_added"]
    assert added == pytest.approx(3.0, rel=1e-6)
    # a replaced record leaves one cell for another, and the two columns of the encoding are no further apart than the root of 2
    replaced = entry["conditional_epsilon"] if trust == "server" else account["total_epsilon"]
    assert 3.0 < replaced < 3.0 * 1.6
    assert "log_rank" not in result.summary["findings"]


def many(n: int) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    event, left = draw.exponential(30, n), draw.uniform(10, 60, n)
    return pd.DataFrame(
        {
            "hospital": draw.integers(0, 10, n), "age": 50, "arm": "old", "grade": "low",
            "weeks": np.minimum(event, left), "relapse": (event <= left).astype(int),
        }
    )  # fmt: skip


def test_at_epsilon_one_ten_sites_come_close_and_the_band_holds_the_curve_of_all_rows(tmp_path: Path) -> None:
    exact = curves(run("kaplanmeier", tmp_path / "exact", data=many(4000)))["all"]
    for seed in range(3):
        result = run("kaplanmeier", tmp_path / str(seed), data=many(4000), target_epsilon=1.0, seed=seed)
        found = curves(result)["all"]
        assert result.summary["clients"] == 10
        assert (found["survival"] - exact["survival"]).abs().max() <= 0.05
        assert ((found["low"] <= exact["survival"]) & (exact["survival"] <= found["high"])).all()
        assert (found["high"] - found["low"]).mean() < 0.08, "nor is it as wide as it would have to be for nothing"


@pytest.mark.parametrize("strata", ["none", "site"])
def test_groups_are_compared_as_by_statsmodels(strata: str, tmp_path: Path) -> None:
    data, rows = given(tmp_path / "data")
    result = run("kaplanmeier", tmp_path / "run", data=data, group="arm", strata=strata)
    seen, events = on_grid(rows)
    sites = rows["hospital"].to_numpy() if strata == "site" else None
    # who left before the first time of the grid is at risk at none
    statistic, p = survdiff(seen, events, rows["arm"].to_numpy(), strata=sites)
    test = result.summary["findings"]["log_rank"]
    assert (test["chi_square"], test["p"]) == (pytest.approx(statistic), pytest.approx(p))
    assert test["degrees_of_freedom"] == 1
    assert sum(test["observed"].values()) == events.sum()
    new = SurvfuncRight(seen[rows["arm"] == "new"], events[rows["arm"] == "new"])
    assert [*curves(result)] == ["arm: old", "arm: new"]
    at = [int(np.flatnonzero(new.surv_times == time)[0]) for time in GRID if time in new.surv_times]
    assert curves(result)["arm: new"]["survival"].to_numpy()[: len(at)] == pytest.approx(new.surv_prob[at], abs=1e-9)


def test_sites_and_ranges_may_be_groups(tmp_path: Path) -> None:
    by_site, by_age = (run("kaplanmeier", tmp_path / group, group=group) for group in ("site", "age"))
    assert [*curves(by_site)] == [f"site: {i}" for i in range(4)]
    assert [*curves(by_age)] == ["age: 18 to 37", "age: 38 to 57", "age: 58 to 77", "age: 78 to 97"]
    whole = curves(run("kaplanmeier", tmp_path / "all"))["all"]
    for result in (by_site, by_age):
        assert sum(part["events"] for part in curves(result).values()).tolist() == whole["events"].tolist()
    assert by_site.summary["findings"]["log_rank"]["degrees_of_freedom"] == 3


def test_the_median_and_its_limits(tmp_path: Path) -> None:
    result = run("kaplanmeier", tmp_path / "run", band_level=0.9)
    found, curve = result.summary["findings"]["groups"]["all"], curves(result)["all"]
    for name, column in (("median", "survival"), ("median_low", "low"), ("median_high", "high")):
        below = curve[curve[column] <= 0.5]["time"]
        assert found[name] == (None if below.empty else below.iloc[0])
    assert found["median_low"] <= found["median"] <= found["median_high"]


def test_a_run_leaves_curves_and_a_model_that_knows_them(tmp_path: Path) -> None:
    result = run("kaplanmeier", tmp_path / "run", group="arm")
    for name in ("curves.csv", "curves.png", "curves.svg"):
        assert (result.directory / name).stat().st_size > 0
    rows = list(csv.reader((result.directory / "curves.csv").read_text().splitlines()))
    assert rows[0] == ["curve", "time", "at_risk", "events", "survival", "se", "low", "high"]
    assert len(rows) == 1 + 2 * (1 + len(GRID))
    assert result.summary["target"] == "survival"
    assert not any("c_index" in name for name in result.summary), "it ranks nobody"
    assert result.summary["accuracy"] is None
    assert not any("accuracy" in record for record in result.rounds)
    assert "accuracy" not in repr(result)
    assert result._repr_html_()
    assert json.loads((result.directory / "summary.json").read_text())["findings"] == result.summary["findings"]
    # of the rows, the model's curve is that of the counts
    weights = run("kaplanmeier", tmp_path / "one").weights
    survival = np.exp(-np.exp(weights["classifier.log_hazard"].double().numpy()).cumsum())
    assert survival == pytest.approx(
        curves(run("kaplanmeier", tmp_path / "two"))["all"]["survival"].to_numpy(), abs=1e-4
    )


def test_every_group_has_a_name() -> None:
    schema = read_schema(GIVEN["their schema"]())
    sizes = {None: 1, "site": 3, "age": 5, "arm": 3, "grade": 4}  # bins and empty; values and other; values and empty
    for group, size in sizes.items():
        method = KaplanMeier(group=group)
        assert method.number_of_groups(schema, 3) == len(method.groups(schema, ["a", "b", "c"])) == size


def test_a_model_of_curves_beats_one_that_knows_nothing(tmp_path: Path) -> None:
    run("kaplanmeier", tmp_path / "run")
    as_it_is: dict[str, Any] = {"model": "hazards", "rounds": 1, "learning_rate": 1e-9}
    begun = run("fedavg", tmp_path / "begun", **as_it_is).summary["loss"]
    found = run("fedavg", tmp_path / "found", **as_it_is, start_from=str(tmp_path / "run")).summary["loss"]
    assert found < begun - 0.1


def test_who_left_before_the_first_time_of_the_grid_was_at_risk_at_the_start(tmp_path: Path) -> None:
    """Of ten rows two are censored before any time of the grid: they are at risk at time 0, and at no time of the grid."""
    rows = times().iloc[:40].assign(hospital="north", weeks=[1.0] * 8 + [9.0] * 32, relapse=[0] * 8 + [1] * 32)
    rows.loc[rows.index % 2 == 1, "hospital"] = "south"
    result = run("kaplanmeier", tmp_path / "run", data=rows, group="site")
    found = pd.read_csv(result.directory / "curves.csv")
    by_site = dict(result.summary["findings"]["groups"])
    assert list(by_site) == ["site: north", "site: south"]
    assert result.summary["client_names"] == ["north", "south"]
    shares = []
    for name, part in found.groupby("curve"):
        first, second = part.sort_values("time")["at_risk"].iloc[:2]
        assert first == by_site[name]["rows_at_risk"]
        shares.append((first, second))
    assert sum(first for first, _ in shares) > sum(second for _, second in shares) > 0
    counts = torch.tensor([0, 32, 8, 0, 0])  # of two times: events, and who left before the first, between, after
    curve = StepCurve(
        "all", (4.0, 8.0), (1.0, 0.0), at_risk=kaplan_meier(counts).at_risk.tolist(), rows=kaplan_meier(counts).rows
    )
    assert [_at(curve, time) for time in (0, 2, 4, 8)] == [40, 32, 32, 32]
    assert noisy_kaplan_meier(encoding(2) @ counts.double(), encoding(2), 0.0).rows == pytest.approx(40)


def test_hosts_score_no_model_that_ranks_nobody(tmp_path: Path) -> None:
    """Exact scores have no guarantee, and that of a model which says the same of every row is worth nothing."""
    options = {"data": times(), "schema_file": GIVEN["their schema"](), "partition": "domain", "client_test": 0.2}
    for name, told in (("kaplanmeier", False), ("cox", True)):
        prepared = arrange(name, model="auto", **options)
        carrier = ENGINES["flower"](
            prepared.algorithm, prepared.federation, prepared.model, prepared.initial, 0, 2, None
        )
        assert (carrier.evaluation is not None) == told
        carrier.close()


@pytest.mark.parametrize(
    ("options", "setting", "facts"),
    [
        ({"group": "arms"}, "group", ("arms", "arm")),
        ({"strata": "site"}, "strata", ("site",)),
        ({"strata": "site", "group": "site"}, "strata", ("site",)),
        ({"strata": "site", "group": "arm", "target_epsilon": 1.0}, "strata", ("target_epsilon",)),
        ({"trust": "secure"}, "trust", ("secure",)),
        ({"model": "mlp"}, "model", ("hazards",)),
        ({"data": table(), "schema_file": GIVEN["its schema"]()}, "schema_file", ("classes", "survival")),
        ({"schema_file": None, "data": times()[["age", "relapse"]].rename(columns={"relapse": "label"})}, "schema_file", ("none", "survival")),
        ({"data": "digits", "schema_file": None, "partition": "iid"}, "schema_file", ("none",)),
    ],
)  # fmt: skip
def test_slips_are_one_sentence_and_nothing_is_written(
    options: dict[str, Any], setting: str, facts: tuple[str, ...], tmp_path: Path
) -> None:
    if (
        options.get("data") is not None
        and options.get("schema_file", 0) is None
        and not isinstance(options["data"], str)
    ):
        options = {**options, "partition": "iid"}
    with refused(setting, *facts):
        run("kaplanmeier", tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
