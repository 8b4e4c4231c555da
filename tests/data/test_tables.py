"""Tables: numbers and words become the inputs that their columns say, and an odd cell gets a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.data.made import says
from tests.helpers import refused

import fedfill
from fedfill.data import sources
from fedfill.data.cells import told_cell, without_rows
from fedfill.data.columns import Columns
from fedfill.data.dataset import TEST_SHARE
from fedfill.data.division import federate
from fedfill.data.schema import read_schema
from fedfill.data.sources import load
from fedfill.data.stratified import hold_out
from fedfill.deployment.host_data import Task, load_host
from fedfill.streams import numpy_stream

HEADER = "age,job,label,domain,member"
TRAIN = ["10,cook,no,north,true", "20,vet,yes,north,true", "30,cook,no,south,true", "40,vet,yes,south,true"]
TEST = ["50,cook,no,south,true", "25,pilot,yes,north,false"]


def write(path: Path, lines: list[str], header: str = HEADER) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *lines]) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "people" / "train.csv", TRAIN)
    write(tmp_path / "people" / "test.csv", TEST)
    return tmp_path


def test_by_hand(folder: Path) -> None:
    source = load("people", folder)
    # inputs are age, member, job=cook, job=vet; ages 10, 20, 30, 40 have mean 25 and deviation sqrt(125)
    deviation = 125**0.5
    expected = [
        [-15 / deviation, 0, 1, 0],
        [-5 / deviation, 0, 0, 1],
        [5 / deviation, 0, 1, 0],
        [15 / deviation, 0, 0, 1],
    ]
    torch.testing.assert_close(source.train.inputs, torch.tensor(expected))
    assert source.train.inputs.dtype == torch.float32
    # domains come in their order, here north first; a word that the training table lacks has no input, and what never
    # changed there is only shifted
    torch.testing.assert_close(source.test.inputs, torch.tensor([[0, -1, 0, 0], [25 / deviation, 0, 1, 0]]))
    assert (source.class_names, source.train.labels.tolist(), source.test.labels.tolist()) == (
        ("no", "yes"),
        [0, 1, 0, 1],
        [1, 0],
    )
    assert source.domains is not None
    assert source.domains.names == ("north", "south")
    assert (source.domains.train.tolist(), source.domains.test.tolist()) == ([0, 0, 1, 1], [0, 1])
    federation = federate("people", data_dir=folder, partition="domain", seed=0)
    assert [len(client.train) for client in federation.clients] == [2, 2]
    assert federation.shape == (4,)


def test_numbers_are_those_of_the_training_samples_alone(tmp_path: Path) -> None:
    """Also where the test set is held out: moving a held-out sample's number moves no training sample's."""
    rows = [f"{k},{k % 2}" for k in range(40)]
    write(tmp_path / "t.csv", rows, "x,label")
    before = load("t.csv", tmp_path)
    assert (len(before.train), len(before.test), before.domains) == (32, 8, None)
    assert before.train.inputs.mean().abs() < 1e-6
    assert abs(float(before.train.inputs.std(correction=0)) - 1) < 1e-6
    _, held = hold_out(np.arange(40) % 2, TEST_SHARE, numpy_stream(0, "fixed-test"))
    rows[held[0]] = f"1000,{held[0] % 2}"
    write(tmp_path / "t.csv", rows, "x,label")
    sources._load.cache_clear()
    after = load("t.csv", tmp_path)
    assert torch.equal(after.train.inputs, before.train.inputs)
    assert int((after.test.inputs != before.test.inputs).sum()) == 1


def test_parquet_and_csv_say_the_same(folder: Path) -> None:
    names = HEADER.split(",")
    for split, lines in (("train", TRAIN), ("test", TEST)):
        cells = list(zip(*(line.split(",") for line in lines), strict=True))
        columns = dict(zip(names, map(list, cells), strict=True))
        table = pa.table(
            columns
            | {"age": pa.array(map(int, columns["age"])), "member": [word == "true" for word in columns["member"]]}
            | {"job": pa.array(columns["job"]).dictionary_encode(), "__index_level_0__": list(range(len(lines)))}
        )
        (folder / "same").mkdir(exist_ok=True)
        pq.write_table(table, folder / "same" / f"{split}.parquet")
    one, other = load("people", folder), load("same", folder)
    assert torch.equal(one.train.inputs, other.train.inputs)
    assert torch.equal(one.test.inputs, other.test.inputs)
    assert one.class_names == other.class_names
    pq.write_table(pa.table({"x": np.arange(12.0), "label": [0, 2] * 6}), folder / "plain.parquet")
    assert load("plain.parquet", folder).class_names == ("0", "2")


@pytest.mark.parametrize(
    ("header", "lines", "facts"),
    [
        ("age,kind", ["1,a", "2,b"], ["'label'", "age, kind"]),
        ("label", ["1", "2"], ["'label' and 'domain'"]),
        ("age,label", ["1,a", ",b"], ["'age'", "1 empty cell"]),
        ("job,label", ["cook,a", ",b"], ["'job'", "1 empty cell"]),
        ("age,label", ["1,a", "2,", "3,b"], ["'label'", "1 empty cell"]),
        ("age,label,domain", ["1,a,x", "2,b,"], ["'domain'", "1 empty cell"]),
        ("age,label,domain", ["1,a,x", "2,b,  ", "3,b,"], ["'domain'", "2 empty cells"]),
        (",age,label", ["0,1,a", "1,2,b"], ["without a name,", "index=False"]),
        ("Unnamed: 0.1,age,label", ["0,1,a", "1,2,b"], ["'Unnamed: 0.1'", "index=False"]),
        ("Unnamed: 0,age,label", ["0,1,a", "1,2,b"], ["'Unnamed: 0'", "index=False"]),
        ("age,label", ["1,a", "-1e200,b"], ["'age'", "1e+200", "1e+100"]),
        ("age,label", ["1,a", "inf,b"], ["'age'", "infinite"]),
        ("age,label", ["1,0.5", "2,1.5"], ["'label'", "type double"]),
        ("day,label", ["2020-01-01,a", "2020-01-02,b"], ["'day'", "type date32"]),
        ("age,age,label", ["1,1,a", "2,2,b"], ["two columns of one name"]),
        ("age,label", [], ["no samples"]),
        ("age,label", ["1,a", "2"], ["can't be read as a table", "row 3,", "1 cell,", "header 2;", "allowed: "]),
        ("name,label", [f"n{k},a" for k in range(1001)], ["'name'", "1,001", "1,000"]),
        ("age,label", ["1,a", "2,b"], ["no test set", "2 samples"]),
    ],
)
def test_bad_tables(tmp_path: Path, header: str, lines: list[str], facts: list[str]) -> None:
    write(tmp_path / "t" / "train.csv", lines, header)
    with refused("data") as caught:
        load("t", tmp_path)
    says(caught, *facts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rows", [3, 200_000])  # the latter are more than Arrow reads at once
def test_a_torn_row_is_numbered_and_not_told(tmp_path: Path, rows: int) -> None:
    write(tmp_path / "t" / "train.csv", [*["1,a"] * rows, "Hans Castorp,1907,phthisis", "2,b"], "age,label")
    with refused("data", f"row {rows + 2:,},", "3 cells", "header 2", "allowed: ") as caught:
        load("t", tmp_path)
    assert not any(word in str(caught.value) for word in ("Hans", "1907", "phthisis"))
    assert caught.value.__suppress_context__  # or Python would show what Arrow said


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        (None, "nothing"),
        ("", "nothing"),
        (7.0, "'7'"),
        ("x" * 60, f"'{'x' * 60}'"),
        ("x" * 61, f"'{'x' * 60}...'"),
        ("Hans\nClawdia,secret", "'Hans...'"),
    ],
)
def test_a_cell_is_told_up_to_its_first_line(cell: object, told: str) -> None:
    assert told_cell(cell) == told


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "CSV parse error: Row #1200: Expected 3 columns, got 1: Hans",
            "row 1,200, the header being the first, has 1 cell, ",
        ),
        ("CSV parse error: Expected 3 columns, got 4: a,b,c,d", "a row has 4 cells, and the header 3; allowed: "),
        ("Empty CSV file", "Empty CSV file"),
        ("Could not convert 'it's' with type str: tried to convert to int64", None),
        (f"invalid value '{'y' * 99}'", f"invalid value '{'y' * 60}...'"),
        (f"invalid value '{'y' * 99}\nz'", f"invalid value '{'y' * 60}...'"),
    ],
)
def test_what_arrow_says_without_rows(said: str, told: str | None) -> None:
    assert without_rows(pa.ArrowInvalid(said)).startswith(said if told is None else told)
    assert not without_rows(pa.ArrowInvalid(said)).endswith(("Hans", "a,b,c,d", "y" * 61))


def test_a_cell_that_took_the_next_rows_with_it_is_cut(tmp_path: Path) -> None:
    write(tmp_path / "t" / "train.csv", ["1,a", '"Hans', "Clawdia,secret", '2",b'], "age,label")
    agreed = tmp_path / "schema.toml"
    agreed.write_text(
        '[target]\ncolumn = "label"\nvalues = ["a", "b"]\n[columns.age]\nkind = "integer"\nlow = 0\nhigh = 9\n'
    )
    with refused("data", "'age'", "'Hans...'", "row 2") as caught:
        load("t", tmp_path, schema=read_schema(agreed))
    assert "Clawdia" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "line", "facts"),
    [
        ("age,label", "1,maybe", ["test.csv'", "'maybe'"]),
        ("age,label,more", "1,yes,2", ["'more'"]),
        ("age,label", "old,yes", ["test.csv'", "'age'", "type string"]),
    ],
)
def test_bad_test_tables(tmp_path: Path, header: str, line: str, facts: list[str]) -> None:
    write(tmp_path / "t" / "train.csv", ["1,yes", "2,no"], "age,label")
    write(tmp_path / "t" / "test.csv", [line], header)
    with refused("data") as caught:
        load("t", tmp_path)
    says(caught, *facts)


def test_blanks_around_a_domain_s_name_make_no_other_domain(tmp_path: Path) -> None:
    write(tmp_path / "t" / "train.csv", ["1,a,north", "2,b, north", "3,a,south ", "4,b,south"], "age,label,domain")
    write(tmp_path / "t" / "test.csv", ["1,a,north ", "2,b, south"], "age,label,domain")
    source = load("t", tmp_path)
    assert source.domains is not None
    assert source.domains.names == ("north", "south")
    assert (source.domains.train.tolist(), source.domains.test.tolist()) == ([0, 0, 1, 1], [0, 1])


def test_words_of_the_test_table_that_look_like_something_else(tmp_path: Path) -> None:
    """A file alone doesn't tell what its columns are: the training table does."""
    header = "smokes,code,seen,label,domain"
    train = ["true,01,2020-01-01,1,01", "false,02,2020-01-02,2,02", "unknown,A1,never,x,A1", "true,01,never,1,01"]
    write(tmp_path / "t" / "train.csv", train, header)
    write(tmp_path / "t" / "test.csv", ["true,02,2020-01-01,2,01", "false,01,2020-01-02,1,02"], header)
    source = load("t", tmp_path)
    # smokes=false, true, unknown; code=01, 02, A1; seen=2020-01-01, 2020-01-02, never
    assert source.test.inputs[:2].tolist() == [[0, 1, 0, 0, 1, 0, 1, 0, 0], [1, 0, 0, 1, 0, 0, 0, 1, 0]]
    assert source.class_names == ("1", "2", "x")
    assert source.test.labels[:2].tolist() == [1, 0]
    assert source.domains is not None
    assert source.domains.names == ("01", "02", "A1")


@pytest.mark.parametrize("values", [[1, 2], [True, False], [0.5, 1.5]])
@pytest.mark.parametrize("encoded", [False, True])
def test_words_of_a_parquet_table_stay_words(tmp_path: Path, values: list[object], encoded: bool) -> None:
    words = pa.array(["1", "2", "x"])
    train = pa.table({"code": words.dictionary_encode() if encoded else words, "label": ["1", "2", "2"]})
    pq.write_table(train, tmp_path / "train.parquet")
    pq.write_table(pa.table({"code": ["1", "y"], "label": [1, 2]}), tmp_path / "test.parquet")
    # labels are words, whatever they are written as
    assert load(tmp_path.name, tmp_path.parent).test.labels.tolist() == [0, 1]
    sources._load.cache_clear()
    pq.write_table(pa.table({"code": values, "label": [1, 2]}), tmp_path / "test.parquet")
    with refused("data") as caught:
        load(tmp_path.name, tmp_path.parent)
    says(caught, "test.parquet'", "'code'", "the training table has words")


@pytest.mark.parametrize("value", [0.1, 0.15, 1e-9, 3.3e7])
@pytest.mark.parametrize("count", [10, 57, 1000])
def test_a_number_that_never_changes_becomes_nothing(value: float, count: int) -> None:
    column = torch.full((count, 1), value, dtype=torch.float64)
    fitted = Columns(("value",), {}).fitted(column)
    assert torch.equal(fitted.scaled(column), torch.zeros(count, 1))
    assert fitted.scaled(column[:1] + 1).item() == pytest.approx(1)


def test_what_a_table_is_not(folder: Path) -> None:
    with refused("image_size"):
        load("people", folder, 8)
    task = Task("people", 2, ("no", "yes"), (4,), "float32")
    with refused("data") as caught:
        load_host(folder / "people", "parquet", task)
    says(caught, "train.csv'", "safetensors")
    (folder / "loose.csv").write_text("x,label\n1,a\n")
    with refused("data") as caught:
        load("lose.csv", folder)
    says(caught, "'lose.csv'", "did you mean 'loose.csv'")


def test_what_the_columns_were_taken_for_is_said(folder: Path) -> None:
    assert load("people", folder).note.endswith(
        "Columns: 2 of numbers (age, member) and 1 of words (job: 2), one input for each word."
    )
    write(folder / "numbers.csv", ["1,2,3,4,5,6,a", "2,3,4,5,6,7,b"] * 3, "a,b,c,d,e,f,label")
    assert load("numbers.csv", folder).note.endswith("Columns: 6 of numbers (a, b, c, d, e, ...).")


def test_files_that_are_no_part_of_the_table(folder: Path) -> None:
    pq.write_table(pa.table({"x": [1.0]}), folder / "people" / "train_notes.parquet")
    assert len(load("people", folder).train) == 4


def test_train_and_test_of_two_kinds(folder: Path) -> None:
    (folder / "people" / "test.csv").unlink()
    pq.write_table(pa.table({"age": [1.0], "label": ["no"]}), folder / "people" / "test.parquet")
    with refused("data") as caught:
        load("people", folder)
    says(caught, "train.csv'", "'test.parquet'", "two kinds")


@pytest.mark.parametrize("file", ["train.parquet", "train-00000-of-00001.parquet", "test.parquet"])
def test_the_same_table_twice(folder: Path, file: str) -> None:
    pq.write_table(pa.table({"age": [1.0], "label": ["no"]}), folder / "people" / file)
    with refused("data") as caught:
        load("people", folder)
    says(caught, f"{file.split('-')[0].split('.')[0]}.csv'", f"'{file}'", "twice")


@pytest.mark.parametrize(
    ("column", "kind"), [([[1.0], [2.0]], "type list<"), (pa.array([0, 1], pa.date32()), "type date32")]
)
def test_columns_that_are_no_input(tmp_path: Path, column: object, kind: str) -> None:
    (tmp_path / "odd").mkdir()
    pq.write_table(pa.table({"a": column, "label": ["x", "y"]}), tmp_path / "odd" / "train.parquet")
    with refused("data") as caught:
        load("odd", tmp_path)
    says(caught, "'a'", kind)


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes("job,label\nköchin,a\nvet,b\n".encode("latin-1"))
    (tmp_path / "header.csv").write_bytes("köchin,label\n1,a\n2,b\n".encode("latin-1"))
    for name, facts in (("header.csv", ["header.csv'", "UTF-8"]), ("latin.csv", ["'job'", "type binary", "UTF-8"])):
        with refused("data") as caught:
            load(name, tmp_path)
        says(caught, *facts)


@pytest.mark.parametrize("name", ["fraug", "fedbn"])
def test_two_regions_whose_people_differ(tmp_path: Path, name: str) -> None:
    """What is asked for is learnt from a table of numbers and words, with a personal model in each region."""
    rng = np.random.default_rng(0)
    lines = []
    for k in range(240):
        domain, label = ("north", "south")[k % 2], ("no", "yes")[(k // 2) % 2]
        # the same question at another level in each region
        age = rng.normal((20, 60)[k % 2] + 8 * (label == "yes"), 2)
        lines.append(
            f"{age:.3f},{('cook', 'vet')[rng.integers(2)]},{label},{domain},{('true', 'false')[rng.integers(2)]}"
        )
    write(tmp_path / "people" / "train.csv", lines[:160])
    write(tmp_path / "people" / "test.csv", lines[160:])
    own = {"local_steps": 10} if name == "fraug" else {"local_epochs": 3, "learning_rate": 0.05, "optimizer": "sgd"}
    options = {
        "data": "people",
        "data_dir": tmp_path,
        "partition": "domain",
        "model": "auto",
        "batch_size": 16,
        "rounds": 12,
    }
    result = fedfill.run(name, **options, **own, out=tmp_path / "run")
    assert len(result.summary["accuracy_by_client"]) == 2
    assert min(result.summary["accuracy_by_client"]) > 0.85
