"""The tables of the benchmark natural: sound, small, licensed, with their schemas; the split; tables of the user's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from tests.helpers import refused

from fedfill.data import natural
from fedfill.data.natural import PLACE, divide, known_tables, read

BUNDLED = [name for name, table in known_tables().items() if table.sha256 is not None]
OTHERS = [name for name, table in known_tables().items() if table.sha256 is None]


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_table_fits_its_schema(name: str) -> None:
    table = known_tables()[name]
    rows, schema = read(table), table.schema
    assert sorted(rows.column_names) == sorted(["site", schema.target.column, *schema.columns])
    codes = schema.codes(rows, name)
    assert codes.shape == (rows.num_rows, len(schema.sizes))
    assert set(codes[:, -1]) == {0, 1}
    sites = rows.column("site").to_pylist()
    assert len(set(sites)) >= 3
    assert sites == sorted(sites, key=str)
    # a bound that hardly a row reaches, or that most exceed, would be no public bound
    for k, column in enumerate(schema.columns.values()):
        if column.kind in ("integer", "real"):
            assert len(set(codes[:, k])) > 1


@pytest.mark.parametrize("name", BUNDLED)
def test_only_what_may_be_passed_on_is_bundled(name: str) -> None:
    table = known_tables()[name]
    assert table.licence.split()[0] in ("MIT", "CC0")
    assert f"`{name}`" in (PLACE / "LICENSES.md").read_text()


def test_the_others_are_not_there_and_all_are_small() -> None:
    assert not [name for name in OTHERS if (PLACE / f"{name}.parquet").exists()]
    assert sum(file.stat().st_size for file in PLACE.iterdir()) < 1e6
    assert {file.stem for file in PLACE.glob("*.toml")} == {*known_tables(), "sources"}


def test_a_damaged_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = known_tables()["penguins"]
    shutil.copytree(PLACE, tmp_path / "tables")
    with (tmp_path / "tables" / "penguins.parquet").open("ab") as file:
        file.write(b"x")
    monkeypatch.setattr(natural, "PLACE", tmp_path / "tables")
    with refused("sets"):
        read(table)


@pytest.mark.parametrize("name", ["penguins", "social_insure", "flights"])
def test_the_split_is_stratified_within_each_site(name: str) -> None:
    table = known_tables()[name]
    rows, schema = read(table), table.schema
    train, test = divide(rows, schema, 0)
    assert train.num_rows + test.num_rows == rows.num_rows

    def counts(part: pa.Table) -> dict[tuple[str, str], int]:
        pairs = zip(part.column("site").to_pylist(), part.column(schema.target.column).to_pylist(), strict=True)
        keys, sizes = np.unique([json.dumps(pair) for pair in pairs], return_counts=True)
        return {tuple(json.loads(key)): int(size) for key, size in zip(keys, sizes, strict=True)}

    held, whole = counts(test), counts(rows)
    assert counts(train).keys() == whole.keys()  # every class of every site is learned from
    for site in {site for site, _ in whole}:
        own = {key: size for key, size in whole.items() if key[0] == site}
        assert sum(held.get(key, 0) for key in own) <= 0.3 * sum(own.values()) + 0.5
        assert all(abs(held.get(key, 0) - 0.3 * size) < 1 for key, size in own.items() if size > 3)


def test_another_seed_is_another_split() -> None:
    table = known_tables()["penguins"]
    rows = read(table)
    first, again, other = (divide(rows, table.schema, seed)[1] for seed in (0, 0, 1))
    assert first.equals(again)
    assert not first.equals(other)


def write(folder: Path, name: str, columns: dict[str, list[object]]) -> None:
    pa.csv.write_csv(pa.table(columns), folder / f"{name}.csv")


PUPILS: dict[str, list[object]] = {
    "rownames": [1, 2, 3], "school": [1224, 1224, 1288], "minrty": ["No", "Yes", "No"], "sx": ["Female", "Male", "Male"],
    "ses": [-1.5, 0.0, 0.3], "mAch": [5.9, 13.131, 20.0], "meanses": [-0.4, -0.4, 0.1], "sector": ["Public", "Public", "Catholic"],
    "cses": [-1.1, 0.4, 0.2],
}  # fmt: skip


def ten_times(columns: dict[str, list[object]]) -> dict[str, list[object]]:
    """So many rows that no site is left out."""
    return {name: cells * 10 for name, cells in columns.items()}


def test_a_table_of_the_users_is_read_as_its_package_has_it(tmp_path: Path) -> None:
    write(tmp_path, "hsb82", ten_times(PUPILS))
    table = known_tables()["hsb82"]
    rows = read(table, tmp_path)
    assert rows.column("mach").to_pylist() == ["no", "no", "yes"] * 10  # above the median, not at it
    assert "cses" not in rows.column_names
    assert table.schema.codes(rows, "pupils").shape == (30, 6)


def test_small_sites_are_left_out(tmp_path: Path) -> None:
    columns = {name: (cells * 10)[:-3] for name, cells in PUPILS.items()}  # 18 rows of school 1224, 9 of 1288
    write(tmp_path, "hsb82", columns)
    rows = read(known_tables()["hsb82"], tmp_path)
    assert rows.column("school").to_pylist() == [1224] * 18
    write(tmp_path, "hsb82", PUPILS)
    with refused("tables", "10"):
        read(known_tables()["hsb82"], tmp_path)


def test_rows_without_a_target_are_left_out(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {
        "idNum": [1, 2], "problem": ["traffic", "suspicious"], "personSearch": ["NO", None], "preRace": ["White", "Unknown"],
        "race": ["White", "Black"], "gender": ["Male", None], "policePrecinct": [1, 2],
    }  # fmt: skip
    write(tmp_path, "mpls_stops", ten_times(columns))
    rows = read(known_tables()["mpls_stops"], tmp_path)
    assert rows.column("personsearch").to_pylist() == ["NO"] * 10


def test_bad_tables_of_the_users(tmp_path: Path) -> None:
    table = known_tables()["hsb82"]
    with refused("tables"):
        read(table)
    with refused("tables"):
        read(table, tmp_path)
    write(tmp_path, "hsb82", {name: cells for name, cells in PUPILS.items() if name != "ses"})
    with refused("tables"):
        read(table, tmp_path)
    write(tmp_path, "hsb82", {**PUPILS, "mAch": ["5.9", "high", "20"]})
    with refused("tables"):
        read(table, tmp_path)
