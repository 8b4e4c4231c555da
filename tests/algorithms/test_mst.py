"""MST: tables, guarantee, structures, the same rows on any split, and what it refuses."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bench.same_bits import GIVEN, table
from tests.helpers import refused

import fedfill
from fedfill.algorithms.mst import MST
from fedfill.data.schema import Schema, read_schema
from fedfill.privacy.sums import mu_for
from fedfill.runs.directory import RunDirectory
from fedfill.statistics.marginals import workload_error
from fedfill.synthesis.tables import samples_of


def schema() -> Schema:
    return read_schema(GIVEN["its schema"]())


def run(folder: Path, **more: Any) -> fedfill.Result:
    options: dict[str, Any] = {
        "clients": 4,
        "partition": "iid",
        "schema_file": GIVEN["its schema"](),
        "client_test": 0.0,
    }
    return fedfill.run("mst", **{"data": table(), **options, **more}, out=folder)


def kept(result: fedfill.Result) -> dict[str, Any]:
    checkpoint = RunDirectory(result.directory).read_checkpoint()
    assert checkpoint is not None
    return checkpoint["server"]


def trained_on(result: fedfill.Result) -> int:
    return sum(map(sum, json.loads((result.directory / "partition.json").read_text())["clients"]))


@pytest.mark.parametrize("structure", ["star", "tree", "label_tree", "augmented"])
def test_without_noise_tables_are_those_of_the_rows(structure: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", structure=structure)
    state = kept(result)
    assert result.rounds[0]["rows"] == trained_on(result)
    parents = {column: above for column, *above in state["parents"]}
    label = len(schema().sizes) - 1
    assert next(iter(parents)) == label, "drawing begins with the label"
    expected = {"star": 1, "augmented": 2}.get(structure, 1)
    assert max(map(len, parents.values())) == expected
    if structure in ("star", "augmented"):
        assert all(label in above for column, above in parents.items() if column != label)
    edge = max(parents, key=lambda column: len(parents[column]))
    wanted = sorted((*parents[edge], edge))
    assert set(state["tables"]) == {str(column) for column in parents}
    counts = state["tables"][str(edge)]
    assert counts.shape == tuple(schema().sizes[column] for column in (*parents[edge], edge)), wanted
    assert float(counts.sum()) == pytest.approx(result.rounds[0]["rows"], abs=1e-3)


def test_every_split_gives_the_same_bits(tmp_path: Path) -> None:
    found = [
        run(tmp_path / partition.replace(":", ""), partition=partition, clients=clients, structure="augmented")
        for partition, clients in (("iid", 4), ("classes:1", 2), ("domain", None))
    ]
    assert len({result.summary["weights_sha256"] for result in found}) == 1


@pytest.mark.parametrize("structure", ["star", "augmented"])
def test_the_exchanges_cost_what_was_asked_for_and_no_less(structure: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", structure=structure, target_epsilon=2.0)
    privacy = result.summary["privacy"]
    assert privacy["total_epsilon_added"] == pytest.approx(2.0, rel=1e-6)
    assert privacy["total_epsilon"] < 2 * 2.0
    spent = [
        (len(cliques), state["std"])
        for state in (kept(result)["columns"], kept(result)["pairs"])
        if state is not None
        for cliques in [state["cliques"]]
    ]
    # each client adds all of the noise, so the sum of four has twice the deviation of one
    algorithm = MST(structure=structure, target_epsilon=2.0)
    mu = mu_for(2.0, 1e-5)
    for (tables, std), step in zip(spent, ("columns", "pairs"), strict=False):
        assert std / 2 == pytest.approx(math.sqrt(tables) / (mu * math.sqrt(algorithm.share(step))))  # type: ignore[arg-type]


def test_rows_are_near_the_real_ones_and_nearer_with_more_structure(tmp_path: Path) -> None:
    rng, errors = np.random.default_rng(0), {}
    table().to_csv(tmp_path / "people.csv", index=False)
    real = schema().codes(pa.Table.from_pandas(table(), preserve_index=False), "the table")
    balanced = np.concatenate([rng.choice(real[real[:, -1] == c], 2000) for c in (0, 1)])
    for structure in ("star", "augmented"):
        result = run(tmp_path / structure, structure=structure, data=str(tmp_path / "people.csv"))
        made = fedfill.synthesise(result, per_class=2000, out=tmp_path / f"{structure}.safetensors").samples
        codes = schema().codes_of(made.inputs, made.labels)
        errors[structure] = workload_error(codes, balanced, schema().sizes)
    assert errors["augmented"] < errors["star"] < 0.3
    assert errors["augmented"] < 0.1


def test_a_drawn_row_has_the_cells_it_was_drawn_for() -> None:
    draw = np.random.default_rng(0)
    codes = np.stack([draw.integers(0, size, 50) for size in schema().sizes], axis=1)
    made = samples_of(schema(), codes, draw)
    assert schema().codes_of(made.inputs, made.labels).tolist() == codes.tolist()


def test_a_run_that_is_stopped_between_exchanges_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    options = {"structure": "tree", "target_epsilon": 5.0}
    whole = run(tmp_path / "whole", **options)

    class Stop(KeyboardInterrupt):
        pass

    steps = itertools.count()

    def stop(record: dict[str, Any], rounds: int) -> None:
        if next(steps) < 2:
            raise Stop

    with pytest.raises(Stop):
        run(tmp_path / "run", on_round=stop, **options)
    with pytest.raises(Stop):
        fedfill.resume(tmp_path / "run", data=table(), on_round=stop)
    again = fedfill.resume(tmp_path / "run", data=table(), on_round=stop)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.parametrize(
    ("more", "setting", "facts"),
    [
        ({"data": "digits", "schema_file": None}, "schema_file", ["mst", "table"]),
        ({"schema_file": None, "data": table().assign(label=1).drop(columns=["stage", "age"])}, "schema_file", ["mst"]),
        ({"structure": "bush"}, "structure", ["bush", "star"]),
        ({"share_one": 0.8}, "share_select", ["0.3", "0.8", "less than 1"]),
        ({"share_one": 0.0}, "share_one", [0]),
        ({"rows": 1}, "rows", [1, 2]),
        ({"trust": "secure"}, "trust", ["target_epsilon"]),
        ({"honest": 2}, "honest", ["secure"]),
    ],
)
def test_what_it_refuses(more: dict[str, Any], setting: str, facts: list[Any], tmp_path: Path) -> None:
    with refused(setting, *facts):
        run(tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


def test_noise_may_leave_hardly_any_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noisy counts may say that there is one; a network with batch norm is trained on two at the least."""
    monkeypatch.setattr("fedfill.algorithms.mst.total_of", lambda tables: 1.0)
    result = run(tmp_path / "run", structure="augmented", target_epsilon=1.0)
    assert result.rounds[0]["rows"] == 1
    assert math.isfinite(result.summary["loss"])


def test_a_table_is_written_by_the_schema(tmp_path: Path) -> None:
    """In the shares of the classes, with its guarantee, and the same again."""
    import pyarrow.parquet as pq

    result = run(
        tmp_path / "run",
        target_epsilon=5.0,
        structure="augmented",
        partition="dirichlet:0.5",
        data=written(tmp_path),
    )
    made = fedfill.synthesise(result, out=tmp_path / "made.parquet")
    found = pq.read_table(made.path)
    assert found.column_names == list(schema().names)
    assert len(found) == len(made.samples) == result.rounds[0]["rows"]
    codes = schema().codes(found, "made")
    assert np.array_equal(codes, schema().codes_of(made.samples.inputs, made.samples.labels))
    origin = json.loads(found.schema.metadata[b"fedfill"])
    assert origin["epsilon_added"] == pytest.approx(5.0, rel=1e-6)
    assert found.schema.metadata[b"schema"].decode() == schema().toml()
    before = made.path.read_bytes()
    assert fedfill.synthesise(result, out=made.path).path.read_bytes() == before
    each = fedfill.synthesise(result, out=tmp_path / "each.parquet", per_class=30)
    assert each.samples.counts(2) == [30, 30]


def test_a_run_without_a_schema_makes_no_table(tmp_path: Path) -> None:
    result = fedfill.run(
        "fedgauss", clients=2, images_per_class=20, classifier_epochs=1, data_fraction=0.2, out=tmp_path / "run"
    )
    with refused("out", "made.parquet", ".safetensors"):
        fedfill.synthesise(result, out=tmp_path / "made.parquet")


def written(folder: Path) -> str:
    table().to_csv(folder / "people.csv", index=False)
    return str(folder / "people.csv")
