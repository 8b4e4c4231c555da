"""AIM: what is chosen, how the budget is spent and who watches it, the same rows on any split, and what it refuses."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bench.same_bits import GIVEN, table
from tests.helpers import refused, without_mbi

import fedfill
from fedfill.algorithms import aim
from fedfill.algorithms._tables import AskCounts
from fedfill.algorithms.aim import AIM, AskTable, joined, score
from fedfill.data.schema import Schema, read_schema
from fedfill.privacy.sums import mu_for
from fedfill.runs.directory import RunDirectory
from fedfill.statistics.marginals import Noisy, workload_error

SHARES = {"share_one": 0.2, "share_select": 0.3}
REST = 0.5


@pytest.fixture
def _no_mbi(monkeypatch: pytest.MonkeyPatch) -> None:
    without_mbi(monkeypatch)


def schema() -> Schema:
    return read_schema(GIVEN["its schema"]())


def run(folder: Path, **more: Any) -> fedfill.Result:
    options: dict[str, Any] = {
        "clients": 4, "partition": "iid", "schema_file": GIVEN["its schema"](), "client_test": 0.0, "turns": 4, "classifier_epochs": 1,
    }  # fmt: skip
    return fedfill.run("aim", **{"data": table(), **options, **more}, out=folder)


def kept(result: fedfill.Result) -> dict[str, Any]:
    checkpoint = RunDirectory(result.directory).read_checkpoint()
    assert checkpoint is not None
    return checkpoint["server"]


# Without mbi


def test_a_score_by_hand() -> None:
    told = np.array([[10.0, 20.0], [30.0, 40.0]])
    # without noise: two columns times 3 + 0 + 0 + 1
    assert score(Noisy((0, 1), told + np.array([[3, 0], [0, -1]]), 0.0), told, 0.0) == 8.0
    # 25 of squared distance, less 4 cells of 2^2 + 1^2, over 2^2 sqrt(8), times two columns
    assert score(Noisy((0, 1), told + np.array([[3, 0], [0, -4]]), 2.0), told, 1.0) == pytest.approx(
        2 * (25 - 20) / (4 * math.sqrt(8))
    )


def test_noise_alone_has_a_score_near_nothing_in_tables_of_any_size() -> None:
    rng = np.random.default_rng(0)
    for shape in ((2, 2), (16, 16)):
        told = np.full(shape, 50.0)
        found = [score(Noisy((0, 1), told + rng.normal(0, 3, shape), 3.0), told, 0.0) for _ in range(400)]
        assert np.mean(found) == pytest.approx(0, abs=5 * 2 / 20)
        assert np.std(found) == pytest.approx(2, rel=0.3)


def test_tables_of_one_clique_are_joined_by_how_exact_they_are() -> None:
    """(10 / 1 + 20 / 4) / (1 + 1 / 4), with the variance of 1 / (1 + 1 / 4)."""
    made = joined(
        [Noisy((0,), np.array([10.0]), 1.0), Noisy((1,), np.array([7.0]), 1.0), Noisy((0,), np.array([20.0]), 2.0)]
    )
    assert [(x.clique, x.counts.tolist(), x.std) for x in made] == [
        ((0,), [12.0], pytest.approx(math.sqrt(0.8))), ((1,), [7.0], 1.0),
    ]  # fmt: skip
    assert joined([Noisy((0,), np.array([3.0]), 0.0)] * 2)[0].std == 0.0


def test_without_the_extra_nothing_is_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AIM, "packages", ("json", "no_such_package"))
    with refused("algorithm", "aim", "no_such_package", "pip install 'fedfill[aim]'") as caught:
        run(tmp_path / "run", data=str(tmp_path / "no such file.csv"))
    assert "json" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("_no_mbi")
def test_without_noise_the_largest_gap_is_counted_first(tmp_path: Path) -> None:
    result = run(tmp_path / "run")
    state = kept(result)
    found = table()
    found.to_csv(tmp_path / "people.csv", index=False)
    codes = schema().codes(pa.Table.from_pandas(found, preserve_index=False), "the table")
    gaps = {}
    for a, b in itertools.combinations(range(4), 2):
        pair = np.zeros((schema().sizes[a], schema().sizes[b]))
        np.add.at(pair, (codes[:, a], codes[:, b]), 1)
        gaps[a, b] = np.abs(pair - np.outer(pair.sum(1), pair.sum(0)) / len(codes)).sum()
    # client_test is 0 and the sealed test set apart, so that the largest gap of all rows is that of these
    assert tuple(state["measured"][0]["cliques"][0]) == max(gaps, key=lambda pair: gaps[pair])
    chosen = [tuple(x["cliques"][0]) for x in state["measured"]]
    assert len(set(chosen)) == len(chosen) == 4, "what is known exactly is not asked for again"
    assert result.rounds[0]["rows"] == sum(
        map(sum, json.loads((result.directory / "partition.json").read_text())["clients"])
    )


@pytest.mark.usefixtures("_no_mbi")
def test_every_split_gives_the_same_bits(tmp_path: Path) -> None:
    found = [
        run(tmp_path / partition.replace(":", ""), partition=partition, clients=clients)
        for partition, clients in (("iid", 4), ("classes:1", 2), ("domain", None))
    ]
    assert len({result.summary["weights_sha256"] for result in found}) == 1


@pytest.mark.usefixtures("_no_mbi")
@pytest.mark.parametrize("trust", ["site", "secure", "server"])
def test_all_exchanges_cost_what_was_asked_for(trust: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", target_epsilon=4.0, trust=trust)
    state, privacy = kept(result), result.summary["privacy"]
    assert state["spent"] == pytest.approx(REST)
    assert len(state["measured"]) <= 4
    # each table's noise says what it cost: mu squared is 1 / std squared, and four clients add all of it each
    replies = {"site": 4, "secure": 4 / 3, "server": 1}[trust]
    spent = sum(replies / x["std"] ** 2 for x in state["measured"])
    mu = mu_for(4.0, 1e-5)
    assert spent == pytest.approx(REST * mu**2)
    assert replies * 4 / state["columns"]["std"] ** 2 == pytest.approx(SHARES["share_one"] * mu**2)
    assert replies * 6 / state["candidates"]["std"] ** 2 == pytest.approx(SHARES["share_select"] * mu**2)
    # what a trusted server adds protects nobody from the server
    assert privacy["total_epsilon_added"] == (None if trust == "server" else pytest.approx(4.0, rel=1e-6))


@pytest.mark.usefixtures("_no_mbi")
def test_where_a_turn_teaches_nothing_the_next_has_half_the_noise(tmp_path: Path) -> None:
    """Under so much noise the first table moves the model by less than its noise; the budget is over sooner."""
    state = kept(run(tmp_path / "run", target_epsilon=0.2, turns=8))
    first, second = (x["std"] for x in state["measured"][:2])
    assert second == pytest.approx(first / 2)
    assert len(state["measured"]) < 8
    assert state["spent"] == pytest.approx(REST)


@pytest.mark.usefixtures("_no_mbi")
def test_rows_are_nearer_to_the_real_ones_than_columns_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    real = schema().codes(pa.Table.from_pandas(table(), preserve_index=False), "the table")
    balanced = np.concatenate([rng.choice(real[real[:, -1] == c], 2000) for c in (0, 1)])
    apart = np.stack([rng.permutation(column) for column in balanced.T], axis=1)
    table().to_csv(tmp_path / "people.csv", index=False)
    result = run(tmp_path / "run", turns=6, data=str(tmp_path / "people.csv"))
    made = fedfill.synthesise(result, per_class=2000, out=tmp_path / "made.safetensors").samples
    assert made.counts(2) == [2000, 2000]
    error = workload_error(schema().codes_of(made.inputs, made.labels), balanced, schema().sizes)
    assert error < 0.5 * workload_error(apart, balanced, schema().sizes)


@pytest.mark.usefixtures("_no_mbi")
def test_a_run_that_is_stopped_between_turns_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", target_epsilon=5.0, workers=2)

    class Stop(KeyboardInterrupt):
        pass

    def stop(record: dict[str, Any], rounds: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        run(tmp_path / "run", target_epsilon=5.0, workers=1, on_round=stop)
    for _ in range(20):
        try:
            again = fedfill.resume(tmp_path / "run", data=table(), on_round=stop)
        except Stop:
            continue
        break
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert again.summary["privacy"]["total_epsilon"] == whole.summary["privacy"]["total_epsilon"]


@pytest.mark.usefixtures("_no_mbi")
def test_a_small_model_takes_small_tables(tmp_path: Path) -> None:
    """With no room for more the smallest are taken; with triples allowed and room for them a triple is the first."""
    sizes = schema().sizes
    small = kept(run(tmp_path / "small", largest_model=1e-9, turns=1))
    cells = [math.prod(sizes[k] for k in pair) for pair in itertools.combinations(range(4), 2)]
    assert math.prod(sizes[k] for k in small["measured"][0]["cliques"][0]) == min(cells)
    large = kept(run(tmp_path / "large", degree=3, turns=1))
    assert len(large["measured"][0]["cliques"][0]) == 3


@pytest.mark.usefixtures("_no_mbi")
def test_without_noise_turns_go_on_while_the_model_may_grow(tmp_path: Path) -> None:
    """At first one pair alone is small enough; once it is known, nothing is counted until there is room for more."""
    # 80 cells in the end, 20 in the second turn; with the smallest pair the model has 21, with another one beside it 25 and more
    state = kept(run(tmp_path / "run", turns=8, largest_model=80 / aim.MEGABYTE))
    assert tuple(state["measured"][0]["cliques"][0]) == (1, 3)
    assert 1 < len(state["measured"]) < 8
    assert state["spent"] == pytest.approx(REST)


@pytest.mark.usefixtures("_no_mbi")
def test_two_columns_are_enough(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(
        '[target]\ncolumn = "died"\nvalues = ["no", "yes"]\n\n[columns.sex]\nkind = "category"\nvalues = ["f", "m"]\n'
    )
    rows = table()[["sex", "died"]]
    for noise in ({}, {"target_epsilon": 3.0}):
        result = run(tmp_path / f"run{len(noise)}", data=rows, schema_file=tmp_path / "two.toml", degree=3, **noise)
        assert {tuple(x["cliques"][0]) for x in kept(result)["measured"]} == {(0, 1)}


class Asked:
    """A client that is only asked."""

    def __init__(self) -> None:
        self.state = type("State", (), {"spent": 0.0})()


@pytest.mark.parametrize(
    ("share", "cliques"), [(0.3, [[0, 1]]), (0.0, [[0, 1]]), (math.nan, [[0, 1]]), (0.1, [[0, 1], [0, 2]])]
)
def test_a_client_does_not_answer_a_server_that_asks_for_too_much(
    share: float, cliques: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, algorithm = Asked(), AIM()
    monkeypatch.setattr(AIM, "counted", lambda *_: "counts")
    assert algorithm.measure(client, AskTable(4, "turn", [[0, 1]], 0.25)) == "counts"  # type: ignore[arg-type]
    with refused("share"):
        algorithm.measure(client, AskTable(4, "turn", cliques, share))  # type: ignore[arg-type]
    assert client.state.spent == 0.25


@pytest.mark.parametrize("step", ["turn", "turns", "other"])
def test_the_budget_of_turns_is_had_in_turns_alone(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AIM, "counted", lambda *_: "counts")
    with refused("step", step):
        AIM().count(Asked(), AskCounts(4, step, [[0, 1]]))  # type: ignore[arg-type]
    assert AIM().count(Asked(), AskCounts(4, "candidates", [[0, 1]])) == "counts"  # type: ignore[arg-type]


@pytest.mark.usefixtures("_no_mbi")
@pytest.mark.parametrize(
    ("more", "setting", "facts"),
    [
        ({"data": "digits", "schema_file": None}, "schema_file", ["aim", "table"]),
        ({"degree": 4}, "degree", [4]),
        ({"turns": 0}, "turns", [0]),
        ({"largest_model": 0}, "largest_model", [0]),
        ({"share_one": 0.8}, "share_select", ["0.3", "0.8", "less than 1"]),
        ({"trust": "secure"}, "trust", ["target_epsilon"]),
    ],
)
def test_what_it_refuses(more: dict[str, Any], setting: str, facts: list[Any], tmp_path: Path) -> None:
    with refused(setting, *facts):
        run(tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


# With mbi


def test_a_whole_run_with_mbi_is_near_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise all tables agree, so that both ways of fitting have one answer."""
    pytest.importorskip("mbi")
    by_mbi = kept(run(tmp_path / "mbi", turns=2))
    monkeypatch.setattr(aim, "fitted", aim.fitted)
    without_mbi(monkeypatch)
    other = kept(run(tmp_path / "other", turns=2))
    assert [x["cliques"] for x in by_mbi["measured"]] == [x["cliques"] for x in other["measured"]]
    for ours, theirs in zip(by_mbi["measured"], other["measured"], strict=True):
        assert ours["before"].numpy() == pytest.approx(theirs["before"].numpy(), abs=0.01)
