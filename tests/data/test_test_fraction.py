"""`test_fraction`: how much is held out as everyone's test set where the data bring none, in every form of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from bench.same_bits import GIVEN, times
from tests.data.made import (
    DATA,
    GREY,
    INPUTS,
    KINDS,
    LABELS,
    NAMES,
    as_dataset,
    by_domain,
    divided,
    numbers,
    write,
    write_folder,
)
from tests.helpers import refused

import fedfill
from fedfill.data.dataset import FITTED, OWN, SPLIT
from fedfill.data.federation import Federation
from fedfill.data.schema import read_schema

PAIR = (INPUTS, LABELS)  # 400 samples, 100 of each of four classes
FRAME = pd.DataFrame({"a": np.arange(60.0), "b": ["x", "y", "z"] * 20, "label": [0, 1] * 30})


def placed(form: str, folder: Path) -> Any:
    """Data without a test set: 60 rows, 12 images or 400 samples."""
    if form == "images":
        write_folder(folder / "insects")
        return str(folder / "insects")
    if form == "domains of images":
        for domain in ("sea", "land"):
            write_folder(folder / "places" / domain)
        return str(folder / "places")
    if form == "table":
        FRAME.to_csv(folder / "rows.csv", index=False)
        return str(folder / "rows.csv")
    if form == "folder of a table":
        (folder / "rows").mkdir()
        FRAME.to_parquet(folder / "rows" / "train.parquet")
        return str(folder / "rows")
    if form == "parquet":
        write(folder / "insects" / "train.parquet", GREY, KINDS, NAMES)
        return str(folder / "insects")
    return {
        "digits": "digits", "arrays": PAIR, "frame": FRAME, "dataset": as_dataset(), "domains": by_domain(test=False),
        "clients": [PAIR, PAIR], "frames of clients": [FRAME, FRAME], "frames of domains": {"a": FRAME, "b": FRAME},
    }[form]  # fmt: skip


FORMS = {
    "digits": 1797, "arrays": 400, "frame": 60, "dataset": 12, "domains": 120, "clients": 800, "frames of clients": 120,
    "frames of domains": 120, "images": 12, "domains of images": 24, "table": 60, "folder of a table": 60, "parquet": 12,
}  # fmt: skip


def rows(federation: Federation) -> tuple[int, int]:
    """Samples that are trained on, and samples of the test set."""
    return sum(len(client.train) for client in federation.clients), len(federation.test)


@pytest.mark.parametrize("form", FORMS)
def test_with_0_every_sample_is_trained_on_and_is_the_test_set_too(form: str, tmp_path: Path) -> None:
    data, every = placed(form, tmp_path), FORMS[form]
    options: dict[str, Any] = {"clients": 2, "client_test": 0, "partition": "iid"}
    before = divided(data, **options)
    assert before.notes == divided(data, **options, test_fraction=None).notes
    trained, tested = rows(before)
    assert trained + tested == every
    assert 0.1 < tested / every < 0.3
    assert "fifth" in before.notes[0]
    found = divided(data, **options, test_fraction=0)
    assert rows(found) == (every, every)
    assert FITTED in found.notes[0]
    assert "fifth" not in found.notes[0]
    train = torch.cat([client.train.inputs for client in found.clients]).flatten(1).double()
    assert sorted(train.tolist()) == sorted(found.test.inputs.flatten(1).double().tolist())


def test_a_fifth_is_what_is_held_out_where_nothing_is_said() -> None:
    before, said = divided(PAIR), divided(PAIR, test_fraction=0.2)
    assert before.fingerprint == said.fingerprint
    assert before.notes[0] == SPLIT
    assert said.notes[0] == SPLIT.replace("fifth", "share of 0.2")


def test_a_share_is_of_each_class_and_part_of_a_larger_one() -> None:
    held = {share: divided(PAIR, test_fraction=share).test for share in (0.05, 0.2, 0.5)}
    assert [samples.counts(4) for samples in held.values()] == [[5] * 4, [20] * 4, [50] * 4]
    assert set(numbers(held[0.05])) < set(numbers(held[0.2])) < set(numbers(held[0.5]))
    assert numbers(divided(PAIR, test_fraction=0.05, seed=9).test) == numbers(held[0.05])


def test_the_rows_of_a_table_are_scaled_by_those_that_are_trained_on() -> None:
    every = divided(FRAME, test_fraction=0, client_test=0)
    assert every.columns is not None
    assert every.columns.mean == pytest.approx([29.5])
    assert every.test.inputs.mean(0)[0].item() == pytest.approx(0, abs=1e-6)


def test_each_domain_is_tested_on_its_own_rows() -> None:
    schema = read_schema(GIVEN["their schema"]())
    found = divided(times(), partition="domain", clients=None, schema=schema, test_fraction=0)
    assert [len(client.train) for client in found.clients] == [100] * 4
    for client in found.clients:
        assert torch.equal(client.train.inputs, client.test.inputs)
    assert "Each client is tested on the whole test set of its domain." in found.notes


def test_only_what_brings_no_test_set_is_held_out() -> None:
    data = {**by_domain(), "air": by_domain(test=False)["air"]}
    before, found = (divided(data, partition="domain", clients=None, test_fraction=share) for share in (None, 0))
    assert [len(client.test) for client in before.clients] == [20, 4, 30]
    assert [len(client.test) for client in found.clients] == [20, 20, 30]
    assert [len(client.train) for client in found.clients] == [40, 20, 60]
    assert found.notes[0].startswith(OWN)
    assert "air" in found.notes[0]
    assert "the training samples themselves" in found.notes[0]
    given = [DATA, PAIR]
    assert rows(divided(given, clients=None, test_fraction=0)) == (800, 440)


@pytest.mark.parametrize(
    "data",
    [
        DATA, by_domain(), [DATA, DATA], (FRAME, FRAME), [(FRAME, FRAME)] * 2, {"a": (FRAME, FRAME)},
        datasets.DatasetDict({"train": as_dataset(), "test": as_dataset()}), fedfill.dataset(PAIR), [fedfill.dataset(PAIR)],
        "mnist", "digits-domains", "made.safetensors",
    ],
)  # fmt: skip
@pytest.mark.parametrize("share", [0, 0.2])
def test_it_is_refused_where_there_is_a_test_set(data: Any, share: float) -> None:
    with refused("test_fraction", f"found {share:g}", "allowed: none"):
        divided(data, clients=None if isinstance(data, list) else 2, test_fraction=share)


@pytest.mark.parametrize("form", ["images", "csv"])
def test_it_is_refused_with_a_folder_that_has_a_test_set(form: str, tmp_path: Path) -> None:
    for part in ("train", "test"):
        if form == "csv":
            FRAME.to_csv(tmp_path / f"{part}.csv", index=False)
        else:
            write_folder(tmp_path / part)
    with refused("test_fraction", "found 0", tmp_path.name, "allowed: none"):
        divided(str(tmp_path), test_fraction=0)


@pytest.mark.parametrize("share", [-0.1, 0.6, float("nan")])
def test_only_shares_up_to_a_half_are_allowed(share: float) -> None:
    with refused("test_fraction", f"found {share}", "0.5"):
        divided(PAIR, test_fraction=share)


@pytest.mark.parametrize("data", [PAIR, by_domain(test=False), [PAIR, PAIR], FRAME])
def test_a_share_that_holds_out_nothing_is_refused(data: Any) -> None:
    with refused("test_fraction", "found 0.001", "or 0"):
        divided(data, clients=2, test_fraction=0.001)
