"""What was agreed on about a table reaches an algorithm: its server, and its clients on every engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.data.test_schema import TOML, agreed, people

import fedfill
from fedfill.algorithms import Algorithm
from fedfill.deployment import programs
from fedfill.protocol.client import client_handler
from fedfill.protocol.messages import Message


@dataclass(frozen=True)
class Cells(Message):
    """Counts of cells, one column after the other; empty in the question."""

    counts: torch.Tensor


class CountsCells(Algorithm):
    """Sums over all clients how many of their rows fall into each cell."""

    name = "counts-cells"
    single_round = True

    @client_handler
    def count(self, client: Any, message: Cells) -> Cells:
        codes = client.schema.codes_of(client.data.inputs, client.data.labels)
        counts = [np.bincount(codes[:, k], minlength=size) for k, size in enumerate(client.schema.sizes)]
        return Cells(torch.from_numpy(np.concatenate(counts)))

    def round(self, server: Any, t: int) -> None:
        replies = server.call(range(server.clients), self.count, Cells(torch.zeros(0, dtype=torch.int64)))
        total = sum(reply.counts for reply in replies.values())
        server.note(counts=total.tolist(), sizes=list(server.schema.sizes))


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_clients_of_an_algorithm_count_the_cells_of_the_table(engine: str, tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(TOML)
    frame = people()
    result = fedfill.run(
        CountsCells, data=(frame, frame), schema_file=str(tmp_path / "schema.toml"), partition="domain", client_test=0,
        engine=engine, workers=1, out=tmp_path / "run",
    )  # fmt: skip
    codes = agreed().codes(pa.Table.from_pandas(frame, preserve_index=False), "data")
    expected = [np.bincount(codes[:, k], minlength=size) for k, size in enumerate(agreed().sizes)]
    assert result.rounds[0]["counts"] == np.concatenate(expected).tolist()
    assert result.rounds[0]["sizes"] == list(agreed().sizes)


def test_without_a_schema_there_is_none(tmp_path: Path) -> None:
    class Looks(Algorithm):
        name = "looks-for-a-schema"

        def round(self, server: Any, t: int) -> None:
            server.note(none=server.schema is None)

    assert fedfill.run(Looks, clients=2, rounds=1, out=tmp_path / "run").rounds[0]["none"]


def test_a_host_of_a_deployment_has_the_one_of_its_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedfill.deployment.app import PACKAGE, init_app

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "schema.toml").write_text(TOML)
    people().to_csv(tmp_path / "north.csv", index=False)
    app = init_app(tmp_path / "app", "fedavg", schema_file=str(tmp_path / "schema.toml"), data="people", clients=3)
    prepared, task = programs.read_app(app / PACKAGE), programs.read_task(app / PACKAGE)

    class Context:
        node_id = 1
        node_config = {"client": 0, "data": str(tmp_path / "north.csv"), "format": "table"}  # noqa: RUF012

    site = programs._site(prepared, task, Context())  # type: ignore[arg-type]
    assert site.schema == prepared.federation.schema == agreed()
