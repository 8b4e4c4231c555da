"""Domains: every sample keeps its own, partitions and test sets follow them, and a slip gets a sentence."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import fedfill
from fedfill.data import sources
from fedfill.data.dataset import OWN, Source
from fedfill.data.division import federate
from fedfill.data.federation import ClientData, Federation, class_table
from fedfill.data.hosts import Task, load_host, save_host
from fedfill.data.objects import from_python
from fedfill.data.partitions import parse, partition
from fedfill.data.samples import Samples
from fedfill.data.skew import domain
from fedfill.data.sources import load
from fedfill.data.stratified import set_aside
from fedfill.errors import FedfillError
from fedfill.streams import numpy_stream

SIZES = {"sea": 40, "air": 20, "land": 60}  # training samples; half as many test samples
CLASSES = ["ant", "bee"]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDFILL_DATA", raising=False)
    sources._load.cache_clear()


def floats(start: int, count: int) -> np.ndarray[Any, Any]:
    """Samples whose number is their content."""
    return np.arange(start, start + count, dtype=np.float32)[:, None]


def by_domain(test: bool = True) -> dict[Any, Any]:
    """Domain k has training samples 1000k, 1000k + 1, ... and test samples 1000k + 500, ..., classes in turn."""
    found: dict[Any, Any] = {}
    for number, (name, size) in enumerate(SIZES.items()):
        found[name] = (floats(1000 * number, size), np.arange(size) % 2)
        if test:
            found[name] += (floats(1000 * number + 500, size // 2), np.arange(size // 2) % 2)
    return found


def make(data: Any = None, **changes: Any) -> Federation:
    return federate(by_domain() if data is None else data, **{"partition": "domain", "seed": 0, **changes})


def numbers(samples: Samples) -> list[int]:
    return [int(value) for value in samples.inputs[:, 0]]


def png(value: int, size: int, colour: bool) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((size, size, 3) if colour else (size, size), value, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def write(path: Path, values: Any, labels: Any, domains: Any = None, size: int = 2, colour: bool = False) -> None:
    """A Parquet file of images of one brightness each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"image": [{"bytes": png(value, size, colour), "path": None} for value in values], "label": labels}
    pq.write_table(pa.table(columns | ({} if domains is None else {"domain": domains})), path)


def write_folder(folder: Path, start: int, each: int = 5, size: int = 2, classes: list[str] = CLASSES) -> None:
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            (folder / name / f"{i}.png").write_bytes(png(start + 10 * k + i, size, False))


def brightness(source: Source) -> dict[str, list[int]]:
    """The values of each domain's samples, training and test."""
    assert source.domains is not None
    values = {name: [] for name in source.domains.names}  # type: ignore[var-annotated]
    for samples, index in ((source.train, source.domains.train), (source.test, source.domains.test)):
        assert len(samples) == len(index)
        for image, number in zip(samples.inputs, index, strict=True):
            values[source.domains.names[number]].append(int(image.flatten()[0]))
    return {name: sorted(found) for name, found in values.items()}


# ---- sources


def test_parquet_with_a_column_of_names(tmp_path: Path) -> None:
    words = ["sea", "air"] * 6
    write(tmp_path / "d" / "train.parquet", range(12), [0, 0, 1, 1] * 3, words)
    write(tmp_path / "d" / "test.parquet", range(100, 104), [0, 0, 1, 1], words[:4])
    source = load("d", tmp_path)
    assert source.domains is not None
    assert source.domains.names == ("air", "sea")
    assert brightness(source) == {"air": [1, 3, 5, 7, 9, 11, 101, 103], "sea": [0, 2, 4, 6, 8, 10, 100, 102]}
    # labels stay with their images
    assert [k // 2 % 2 for k in source.train.inputs[:, 0, 0, 0].tolist()] == source.train.labels.tolist()
    assert (len(source.test), source.note) == (4, OWN)


def test_parquet_with_a_column_of_numbers_in_their_order(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train.parquet", range(30), [0, 1] * 15, [10] * 10 + [2] * 10 + [-1] * 10)
    source = load("d", tmp_path)
    assert source.domains is not None
    assert source.domains.names == ("-1", "2", "10")
    assert brightness(source) == {"-1": [*range(20, 30)], "2": [*range(10, 20)], "10": [*range(10)]}
    # a fifth of each class of each domain is the test set
    assert Counter(zip(source.domains.test.tolist(), source.test.labels.tolist(), strict=True)) == {
        (d, c): 1 for d in range(3) for c in range(2)
    }


def test_a_dataset_with_named_domains() -> None:
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=CLASSES),
            "domain": datasets.ClassLabel(names=["sea", "air"]),
        }
    )
    images = [Image.fromarray(np.full((2, 2), k, np.uint8)) for k in range(12)]
    data = datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 6, "domain": [1] * 6 + [0] * 6}, features)
    source = from_python(data)
    assert isinstance(source, Source)
    assert brightness(source) == {"air": [*range(6)], "sea": [*range(6, 12)]}
    # in a list a data set is one client's, whatever its samples say
    (alone,) = from_python([data])  # type: ignore[misc]
    assert alone.domains is None


def test_a_domain_without_test_samples_gives_a_fifth(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train.parquet", range(20), [0, 1] * 10, ["sea"] * 10 + ["air"] * 10)
    write(tmp_path / "d" / "test.parquet", [100], [0], ["sea"])
    source = load("d", tmp_path)
    assert source.domains is not None
    tested = dict(zip(source.test.inputs[:, 0, 0, 0].tolist(), source.domains.test.tolist(), strict=True))
    assert tested.pop(100) == 1
    assert len(tested) == 2
    assert all(10 <= value < 20 and home == 0 for value, home in tested.items())
    assert source.note == f"{OWN} Of air, which came without one, a fixed stratified fifth."


def test_image_folders_by_depth(tmp_path: Path) -> None:
    write_folder(tmp_path / "deep" / "sea", 0)
    write_folder(tmp_path / "deep" / "air", 100)
    write_folder(tmp_path / "flat", 0)
    source = load("deep", tmp_path)
    assert source.class_names == ("ant", "bee")
    assert brightness(source) == {
        "air": [*range(100, 105), *range(110, 115)],
        "sea": [*range(5), *range(10, 15)],
    }
    assert load("flat", tmp_path).domains is None
    # several data sets lie below a data folder: none of them is a domain of another name
    with pytest.raises(FedfillError, match="data: 'deap' is unknown; did you mean 'deep'"):
        load("deap", tmp_path)


def test_image_folders_with_splits_and_a_class_that_a_domain_lacks(tmp_path: Path) -> None:
    write_folder(tmp_path / "d" / "train" / "sea", 0, classes=["bee"])
    write_folder(tmp_path / "d" / "train" / "air", 100)
    write_folder(tmp_path / "d" / "test" / "sea", 200, each=1, classes=["bee"])
    source = load("d", tmp_path)
    assert source.class_names == ("ant", "bee")
    assert brightness(source)["sea"] == [*range(5), 200]
    assert source.domains is not None
    assert set(source.train.labels[torch.from_numpy(source.domains.train == 1)].tolist()) == {1}
    write_folder(tmp_path / "d" / "test" / "moon", 0)
    sources._load.cache_clear()
    with pytest.raises(FedfillError, match=r"data 'd': '.*test/moon' is a domain that the training images don't have"):
        load("d", tmp_path)


@pytest.mark.parametrize(
    "names", [("Training", "Testing"), ("TRAIN", "Test"), ("photo", "Val"), ("test", "validation")]
)
def test_parts_of_a_data_set_are_no_domains(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        write_folder(tmp_path / "d" / name, 0)
    found = sorted(name for name in names if name != "photo")[0]
    with pytest.raises(
        FedfillError, match=rf"^data: '.*d/{found}' would be a domain, .*; rename such folders to train"
    ):
        load("d", tmp_path)


def test_image_folders_of_numbers_in_their_order(tmp_path: Path) -> None:
    for k, name in enumerate(("10", "9", "b", "a")):
        write_folder(tmp_path / "d" / name, 50 * k)
    source = load("d", tmp_path)
    assert source.domains is not None
    assert source.domains.names == ("9", "10", "a", "b")
    assert brightness(source)["10"] == [*range(5), *range(10, 15)]


def test_images_of_many_sizes_need_one(tmp_path: Path) -> None:
    write_folder(tmp_path / "d" / "sea", 0, size=3)
    write_folder(tmp_path / "d" / "air", 100, size=5)
    with pytest.raises(
        FedfillError,
        match=r"domain 'sea': some samples have shape \[1, 5, 5\].* others \[1, 3, 3\].* image_size brings",
    ):
        load("d", tmp_path)
    source = load("d", tmp_path, 4)
    assert source.train.inputs.shape[1:] == (3, 4, 4)
    assert brightness(source)["air"] == [*range(100, 105), *range(110, 115)]
    (tmp_path / "d" / "sea" / "ant" / "0.png").write_bytes(png(0, 7, True))
    assert load("d", tmp_path, 4).train.inputs.shape[1:] == (3, 4, 4)
    with pytest.raises(FedfillError, match=r"all images must have one size .*; image_size brings them there"):
        load("d", tmp_path)
    assert load("digits", None, 4).train.inputs.shape == (1438, 3, 4, 4)


def test_a_size_shrinks_by_means_and_stretches_by_lines(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.array([[0, 0, 200, 200]] * 4, np.uint8)).save(buffer, "PNG")
    table = pa.table({"image": [{"bytes": buffer.getvalue(), "path": None}] * 6, "label": [0, 1] * 3})
    (tmp_path / "d").mkdir()
    pq.write_table(table, tmp_path / "d" / "train.parquet")
    one = load("d", tmp_path, 1).train.inputs[0]
    assert one.flatten().tolist() == [100] * 3
    eight = load("d", tmp_path, 8).train.inputs[0]
    assert torch.equal(eight[0], eight[1])
    assert torch.equal(eight[0], eight[2])
    assert eight[0, 0].tolist() == [0, 0, 0, 50, 150, 200, 200, 200]


def test_digits_domains(tmp_path: Path) -> None:
    kinds = {"mnist": (28, False), "mnist_m": (32, True), "svhn": (32, True), "usps": (16, False)}
    for k, (name, (size, colour)) in enumerate(kinds.items()):
        write(tmp_path / name / "train.parquet", range(50 * k, 50 * k + 20), [*range(10)] * 2, None, size, colour)
        write(tmp_path / name / "test.parquet", [50 * k + 20, 50 * k + 21], [3, 4], None, size, colour)
    source = load("digits-domains", tmp_path)
    assert (source.name, source.train.inputs.shape, source.test.inputs.shape) == (
        "digits-domains", (80, 3, 32, 32), (8, 3, 32, 32),
    )  # fmt: skip
    assert brightness(source) == {name: [*range(50 * k, 50 * k + 22)] for k, name in enumerate(kinds)}
    assert source.train.inputs.dtype == torch.uint8
    assert all(len(image.unique()) == 1 for image in source.train.inputs)
    assert load("digits-domains", tmp_path) is source
    assert load("digits-domains", tmp_path, 8).test.inputs.shape == (8, 3, 8, 8)
    # a folder of that name goes first
    write(tmp_path / "digits-domains" / "train.parquet", range(12), [0, 1] * 6)
    sources._load.cache_clear()
    assert len(load("digits-domains", tmp_path).train) == 10


def test_digits_domains_whose_part_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_unreachable", lambda repository: "no network")
    with pytest.raises(FedfillError, match=r"data: 'mnist' could not be fetched .* a folder 'mnist' below --data-dir"):
        load("digits-domains", tmp_path)


def test_a_dict_of_any_forms() -> None:
    whole = from_python({"a": (floats(0, 20), [0, 1] * 10), 7: Source("x", *_two(100), ("0", "1"), "")})
    assert isinstance(whole, Source)
    assert whole.domains is not None
    assert whole.domains.names == ("a", "7")
    assert (len(whole.train), len(whole.test), whole.class_names) == (16 + 10, 4 + 10, ("0", "1"))
    assert Counter(whole.domains.test.tolist()) == {0: 4, 1: 10}


def _two(start: int) -> tuple[Samples, Samples]:
    train, test = (Samples(torch.from_numpy(floats(k, 10)), torch.arange(10) % 2) for k in (start, start + 50))
    return train, test


def test_the_fifth_of_a_domain_is_its_own_affair() -> None:
    """What a domain holds out depends neither on the others nor on its place among them."""
    data = by_domain(test=False)
    whole, turned, alone = (from_python(part) for part in (data, dict(reversed(data.items())), {"sea": data["sea"]}))
    held = [{n for n in numbers(s.test) if n < 1000} for s in (whole, turned, alone)]  # type: ignore[union-attr]
    assert held[0] == held[1] == held[2]
    assert len(held[0]) == 8


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "^data: the dict of domains is empty"),
        ({1: (floats(0, 9), [0] * 9), "1": (floats(0, 9), [0] * 9)}, "^data: the domain '1' is there twice"),
        ({"a": 7}, "^data of domain 'a': found int, but a tuple"),
        ({1.5: (floats(0, 9), [0] * 9)}, "^data: the domain 1.5 is a float, but a name or number is needed"),
        ({"a": (floats(0, 9), [0] * 9), "b": (np.ones((9, 2)), [0] * 9)}, r"^data, domain 'b': some samples have shape"),
        ({"a": (floats(0, 1), [0]), "b": (floats(0, 1), [0])}, "^data: there is no test set and the samples of each of 2"),
        ({"a": (floats(0, 9), [99] * 9)}, "^data of domain 'a': the highest label is 99, which makes 100 classes"),
        ({"a": Source("x", *_two(0), ("x", "y"), ""), "b": (floats(0, 9), [2] * 9)}, "domain 'b': a label is 2, but there"),
        (
            {"a": Source("x", *_two(0), ("x", "y"), ""), "b": Source("x", *_two(0), ("y", "x"), "")},
            "^data: the classes of domain 'b' are y, x, but those of another are x, y",
        ),
        (
            {"a": Source("x", _two(0)[0][:0], _two(0)[1], ("x", "y"), "")},
            "^data: domain 'a' has no training samples, but at least one is needed",
        ),
        ([{"a": (floats(0, 9), [0] * 9)}], "^data of client 0: found dict, but"),
    ],
)  # fmt: skip
def test_bad_dicts(data: Any, sentence: str) -> None:
    with pytest.raises(FedfillError, match=sentence):
        from_python(data)


@pytest.mark.parametrize(
    ("train", "test", "sentence"),
    [
        (
            ["a", "b"] * 6,
            None,
            "the training samples have a column 'domain' and the test samples have none",
        ),
        (None, ["a"] * 12, "the test samples have a column 'domain' and the training samples have none"),
        (["a", "b"] * 6, ["a", "c"] * 6, "the test samples have a domain 'c' that the training samples don't have"),
        ([0.5] * 12, [0.5] * 12, "train.parquet' has domains of type double, but strings or integers are needed"),
        ([None, *["a"] * 11], ["a"] * 12, "train.parquet': column 'domain' has 1 empty cell"),
        (["", *["a"] * 11], ["a"] * 12, "train.parquet': column 'domain' has 1 empty cell"),
    ],
)
def test_bad_columns(tmp_path: Path, train: Any, test: Any, sentence: str) -> None:
    for split, domains in (("train", train), ("test", test)):
        write(tmp_path / "d" / f"{split}.parquet", range(12), [0, 1] * 6, domains)
    with pytest.raises(FedfillError, match=sentence):
        load("d", tmp_path)


def test_shards_with_and_without_domains(tmp_path: Path) -> None:
    for first, second in ((["a"] * 6, None), (None, ["a"] * 6)):
        write(tmp_path / "train-00000-of-00002.parquet", range(6), [0, 1] * 3, first)
        write(tmp_path / "train-00001-of-00002.parquet", range(6), [0, 1] * 3, second)
        with pytest.raises(
            FedfillError, match=r"00001-of-00002.parquet' and .* must both have a column 'domain', or neither"
        ):
            load("x", tmp_path)


# ---- the partition


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(1, 3), st.integers(0, 5))
def test_a_domain_is_dealt_among_its_clients(values: list[int], count: int, seed: int) -> None:
    domains = np.array(values)
    sizes = Counter(values)
    if min(sizes.values()) < count:
        with pytest.raises(
            FedfillError, match=rf"partition 'domain:{count}': a domain has only {min(sizes.values())} samples"
        ):
            domain(domains, seed, count)
        return
    parts = domain(domains, seed, count)
    assert sorted(i for part in parts for i in part) == list(range(len(values)))
    for place, home in enumerate(sorted(sizes)):
        own = parts[place * count : (place + 1) * count]
        assert all(values[i] == home for part in own for i in part)
        assert max(map(len, own)) - min(map(len, own)) <= 1
        assert all((np.diff(part) > 0).all() for part in own)


def test_a_domain_is_dealt_at_random_and_the_same_again() -> None:
    domains = np.repeat([0, 1], 50)
    first, again, other = (domain(domains, seed, 2) for seed in (0, 0, 1))
    assert [part.tolist() for part in first] == [part.tolist() for part in again]
    assert [part.tolist() for part in first] != [part.tolist() for part in other]
    assert first[0].tolist() != (first[2] - 50).tolist()


def test_one_client_per_domain() -> None:
    federation = make()
    assert federation.domains == ("sea", "air", "land")
    for number, (client, size) in enumerate(zip(federation.clients, SIZES.values(), strict=True)):
        assert numbers(client.train) == [*range(1000 * number, 1000 * number + size)]
        assert numbers(client.test) == [*range(1000 * number + 500, 1000 * number + 500 + size // 2)]
    assert numbers(federation.test) == [n for client in federation.clients for n in numbers(client.test)]
    assert federation.notes == (
        OWN,
        "Partition domain: 120 training samples divided among 3 clients.",
        "Each client is tested on the whole test set of its domain.",
    )
    assert federation.client_names == ["0 sea", "1 air", "2 land"]
    header, rows = class_table(federation)
    assert (header, rows[1]) == (["client", "samples", "0", "1", "own test"], ["1 air", 20, 10, 10, 10])


def test_several_clients_per_domain() -> None:
    federation = make(partition="domain:2", clients=6)
    assert federation.domains == ("sea", "sea", "air", "air", "land", "land")
    assert [len(client.train) for client in federation.clients] == [20, 20, 10, 10, 30, 30]
    assert [len(client.test) for client in federation.clients] == [20, 20, 10, 10, 30, 30]
    assert set(numbers(federation.clients[0].train + federation.clients[1].train)) == set(range(40))
    assert len(federation.test) == 60


def test_a_fraction_of_each_domain() -> None:
    parts = {f: [set(numbers(c.train)) for c in make(fraction=f).clients] for f in (0.1, 0.5)}
    assert [len(part) for part in parts[0.1]] == [4, 2, 6]
    assert all(small < large for small, large in zip(parts[0.1], parts[0.5], strict=True))
    assert all(Counter(n % 2 for n in part) == {0: len(part) / 2, 1: len(part) / 2} for part in parts[0.1])
    # the pool is drawn alike, and no domain is ever lost
    pooled = make(fraction=0.1, partition="iid", clients=2, client_test=0)
    assert set().union(*parts[0.1]) == {n for client in pooled.clients for n in numbers(client.train)}
    assert [len(client.train) for client in make(fraction=1e-6).clients] == [2, 2, 2]
    assert "Data fraction 0.1: 12 of 120 training samples, stratified by class and domain." in make(fraction=0.1).notes


def test_domains_with_fractions_of_their_own() -> None:
    whole = [set(numbers(c.train)) for c in make(fraction=0.1).clients]
    federation = make(fraction=0.1, domain_fractions="air=0.5, land=1")
    parts = [set(numbers(c.train)) for c in federation.clients]
    assert [len(part) for part in parts] == [4, 10, 60]
    assert parts[0] == whole[0]  # the others' shares don't change it
    assert all(Counter(n % 2 for n in part) == {0: len(part) / 2, 1: len(part) / 2} for part in parts)
    assert "Shares of their own: air 0.5, land 1." in federation.notes
    assert [len(c.train) for c in make(domain_fractions="sea=0.25").clients] == [10, 20, 60]


def test_other_partitions_take_all_domains_as_one_pool() -> None:
    federation = make(partition="iid", clients=3)
    assert federation.domains == ()
    assert "The domains of the data (sea, air, land) are one pool to this partition." in federation.notes
    assert all(len({n // 1000 for n in numbers(client.train)}) == 3 for client in federation.clients)
    assert sorted(n for c in federation.clients for n in numbers(c.train + c.test)) == sorted(
        n for c in make().clients for n in numbers(c.train)
    )


def test_clients_of_a_domain_without_test_samples_hold_out_their_own() -> None:
    data = {"few": (floats(0, 2), [0, 1]), "many": (floats(100, 40), [0, 1] * 20)}
    federation = make(data, client_test=0.5)
    assert [len(client.test) for client in federation.clients] == [0, 8]
    assert federation.notes[-1].endswith(
        "; where a domain has none, 50% of the client's samples: 1 of 2 clients; too few for one: 1."
    )
    # two of one class are too few for a fifth, and enough for a half
    data["few"] = (floats(0, 2), [0, 0])
    federation = make(data, client_test=0.5)
    assert [len(client.test) for client in federation.clients] == [1, 8]
    assert [len(client.train) for client in federation.clients] == [1, 32]
    assert len(federation.test) == 8


def test_fingerprint_sees_the_domains_names() -> None:
    renamed = {("ocean" if name == "sea" else name): data for name, data in by_domain().items()}
    assert make(renamed).fingerprint != make().fingerprint == make().fingerprint


def test_pooled_keeps_what_the_domains_are_tested_on() -> None:
    federation = make(client_validation=0.1)
    pooled = federation.pooled()
    assert [len(client.train) for client in pooled.clients] == [108, 0, 0]
    for part in ("test", "validation"):
        before, after = ([numbers(getattr(c, part)) for c in f.clients] for f in (federation, pooled))
        assert before == after
    assert pooled.domains == federation.domains


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"clients": 4}, "^clients: found 4, but partition 'domain' makes 3 of these domains; allowed: that many, and with"),
        ({"partition": "domain:2", "clients": 3}, "^clients: found 3, but partition 'domain:2' makes 6"),
        ({"partition": "domain:0"}, "^partition: 'domain' needs a whole number of clients for each domain, 1 or more, .* has 0$"),
        ({"partition": "domain:"}, "^partition: 'domain' needs a whole number of clients .* has none$"),
        ({"partition": "domain:x"}, "^partition: 'domain' needs .* has 'x'$"),
        ({"partition": "domain:21"}, "^partition 'domain:21': a domain has only 20 samples to share out among its 21 clients$"),
        ({"partition": "domian"}, "^partition: 'domian' is unknown; did you mean 'domain'"),
        ({"data": (floats(0, 20), [0, 1] * 10)}, "^partition: 'domain' needs data whose samples have domains, .* have none; tables and Parquet files name them in a column 'domain'"),
        ({"partition": "iid"}, "^clients: a number is needed to divide the data by 'iid'$"),
        ({"client_validation": 0.6}, "^client_validation: found 0.6, but a share from 0 to 0.5 is needed$"),
        ({"image_size": 32}, "^image_size: found 32, but data from Python keep their shape"),
        ({"domain_fractions": "see=0.5"}, "^domain_fractions: found 'see=0.5'; did you mean 'sea'"),
        ({"domain_fractions": "sea=2"}, "^domain_fractions: found 'sea=2'; allowed: NAME=SHARE"),
        ({"domain_fractions": "sea"}, "^domain_fractions: found 'sea'; allowed: NAME=SHARE"),
        ({"domain_fractions": "sea=0.5,sea=0.2"}, "^domain_fractions: found 'sea' twice; allowed: once$"),
        ({"domain_fractions": ","}, "^domain_fractions: found ''; allowed: "),
        ({"domain_fractions": "sea=nan"}, "^domain_fractions: found 'sea=nan'; allowed: NAME=SHARE"),
        (
            {"domain_fractions": "sea=0.5", "data": (floats(0, 20), [0, 1] * 10), "partition": "iid", "clients": 2},
            "^domain_fractions: found 'sea=0.5'; these data have no domains$",
        ),
        (
            {"domain_fractions": "sea=0.5", "data": [*by_domain().values()], "partition": None},
            "^domain_fractions: found 'sea=0.5' with a list of data sets, which have no domains$",
        ),
        ({"data": "digits", "image_size": 0}, "^image_size: found 0, but a whole number of at least 1 is needed$"),
    ],
)  # fmt: skip
def test_slips(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedfillError, match=sentence):
        make(**change)


def test_partition_by_spec() -> None:
    labels, domains = np.zeros(6, np.int64), np.array([1, 0, 1, 0, 1, 0])
    assert [part.tolist() for part in partition("domain", labels, None, 0, domains)] == [[1, 3, 5], [0, 2, 4]]
    assert parse("domain:3") == ("domain", [3.0])


# ---- validation


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.sampled_from([0.0, 0.1, 0.25, 0.5]), st.integers(0, 3))
def test_what_is_set_aside(values: list[int], share: float, seed: int) -> None:
    labels = np.array(values)
    stay, aside = set_aside(labels, share, numpy_stream(seed, "x"))
    assert sorted([*stay, *aside]) == list(range(len(values)))
    sizes, taken = Counter(values), Counter(labels[aside].tolist())
    wanted = int(share * len(values) + 0.5)
    assert len(aside) <= wanted
    for label, size in sizes.items():
        assert taken[label] <= size - 1
        assert taken[label] <= share * size + 1
    if min(sizes.values()) > 1:  # nobody's last sample is in the way
        assert len(aside) == wanted
        assert all(taken[label] > share * size - 1 for label, size in sizes.items())


def test_set_aside_by_hand() -> None:
    # shares of 2.4, 1.2 and 0.6: rounded down 2, 1, 0, and the fourth goes to the class that lost 0.6
    labels = np.repeat([0, 1, 2], [24, 12, 6])
    stay, aside = set_aside(labels, 0.1, numpy_stream(0, "x"))
    assert Counter(labels[aside].tolist()) == {0: 2, 1: 1, 2: 1}
    assert len(stay) == 38
    # forty samples of ten classes: none has a whole share, and four samples are set aside all the same
    assert len(set_aside(np.arange(40) % 10, 0.1, numpy_stream(0, "x"))[1]) == 4


def test_validation_is_apart_and_leaves_the_rest_in_its_place() -> None:
    for options in ({"partition": "domain"}, {"partition": "dirichlet:1", "clients": 3}):
        plain, with_validation = make(**options), make(**options, client_validation=0.2)
        assert with_validation.fingerprint != plain.fingerprint
        for before, after in zip(plain.clients, with_validation.clients, strict=True):
            assert numbers(after.test) == numbers(before.test)
            assert sorted(numbers(after.train + after.validation)) == sorted(numbers(before.train))
            assert len(after.validation) == int(0.2 * len(before.train) + 0.5)
            assert after.validation.labels.tolist() == [n % 2 for n in numbers(after.validation)]
            assert len(before.validation) == 0
            assert before.validation.inputs.shape == (0, 1)
    assert make(client_validation=0.0).fingerprint == make().fingerprint


def test_validation_is_held_out_before_labels_go() -> None:
    whole, part = make(client_validation=0.1), make(client_validation=0.1, labelled_per_client=4)
    for before, after in zip(whole.clients, part.clients, strict=True):
        assert numbers(after.validation) == numbers(before.validation)
        assert after.validation.labels.tolist() == before.validation.labels.tolist()
        assert sorted(numbers(after.train + after.unlabelled)) == numbers(before.train)
    header, rows = class_table(part)
    assert (header[4:], rows[0][4:]) == (["unlabelled", "validation", "own test"], [32, 4, 20])


def test_clients_of_a_list_have_validation_too() -> None:
    federation = federate([*by_domain().values()], seed=0, client_validation=0.1)
    assert [len(client.validation) for client in federation.clients] == [4, 2, 6]
    assert federation.notes[-1] == "Each client keeps 10% of what is left for validation, stratified by class."
    assert (
        federate([(floats(0, 3), [0, 1, 1], floats(9, 1), [0])], seed=0, client_validation=0.1)
        .notes[-1]
        .endswith("; too few for it: 1 of 1 clients.")
    )


@pytest.mark.parametrize("labelled", [None, 12])
def test_what_a_rehearsal_saves_is_what_its_hosts_read(tmp_path: Path, labelled: int | None) -> None:
    federation = make(client_validation=0.2, labelled_per_client=labelled)
    task = Task.of(federation)
    for i, client in enumerate(federation.clients):
        path = tmp_path / str(i)
        save_host(path, client)
        found = load_host(path, "safetensors", task, client=i, share=0.1, validation=0.2, labelled=labelled)
        for part in ("train", "test", "unlabelled", "validation"):
            one, other = getattr(found, part), getattr(client, part)
            assert torch.equal(one.inputs, other.inputs)
            assert torch.equal(one.labels, other.labels)
        # without the setting, what a host brings for validation is not used
        assert len(load_host(path, "safetensors", task, client=i, share=0.1).validation) == 0


def test_a_host_keeps_the_validation_that_a_simulation_keeps(tmp_path: Path) -> None:
    plain = make()
    for i, client in enumerate(plain.clients):
        save_host(tmp_path / str(i), ClientData(client.train, client.test))
        found = load_host(tmp_path / str(i), "safetensors", Task.of(plain), client=i, share=0.1, validation=0.2)
        assert numbers(found.validation) == numbers(make(client_validation=0.2).clients[i].validation)


# ---- a run


def images(start: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.random.default_rng(start).integers(0, 256, (20, 8, 8), np.uint8), np.arange(20) % 2


def test_a_run_by_domain(tmp_path: Path) -> None:
    data = {"sea": images(0), "air": images(1)}
    options: dict[str, Any] = {"partition": "domain", "rounds": 1, "local_epochs": 1, "client_validation": 0.25}
    result = fedfill.run("fedavg", data=data, out=tmp_path / "r", **options)
    division = json.loads((tmp_path / "r" / "partition.json").read_text())
    assert division == {"class_names": ["0", "1"], "clients": [[6, 6], [6, 6]], "domains": ["sea", "air"]}
    assert (result.summary["clients"], len(result.summary["accuracy_by_client"])) == (2, 2)
    assert result.summary["train_samples"] == 24
    assert fedfill.resume(tmp_path / "r", data=data).was_finished
    with pytest.raises(FedfillError, match=r"^clients: found 3, but partition 'domain' makes 2"):
        fedfill.run("fedavg", data=data, out=tmp_path / "s", clients=3, **options)
    assert not (tmp_path / "s").exists()
