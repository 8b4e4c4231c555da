"""The script of FRAug's motivation study: what it trains, and what it prints."""

import importlib.util
import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import nn

from fedfill.data import sources

SCRIPT = Path(__file__).parents[1] / "experiments" / "fraug-motivation" / "run.py"
spec = importlib.util.spec_from_file_location("fraug_motivation", SCRIPT)
assert spec is not None
assert spec.loader is not None
motivation = importlib.util.module_from_spec(spec)
spec.loader.exec_module(motivation)

TABLE = """
[options]
data = "digits-domains"
partition = "domain"
data_fraction = 0.5
model = "cnn2fc-small"
rounds = 1
local_steps = 1
batch_size = 4
"""


def write(path: Path, per_class: int) -> None:
    """Images of 16×16, black but for the column that tells the class."""
    rows = []
    for k in range(10 * per_class):
        pixels = np.zeros((16, 16), np.uint8)
        pixels[:, k % 10] = 255
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        rows.append({"bytes": buffer.getvalue(), "path": None})
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"image": rows, "label": [k % 10 for k in range(10 * per_class)]}), path)


def test_a_head_learns_from_embeddings_and_the_given_one_stays() -> None:
    torch.manual_seed(0)
    head, embeddings, labels = nn.Linear(5, 5), torch.eye(5), torch.arange(5)
    before = head.weight.clone()
    tuned = motivation.fine_tuned(head, embeddings, labels, 500, torch.Generator().manual_seed(0))
    assert motivation.accuracy(tuned, embeddings, labels) == 1.0
    assert torch.equal(head.weight, before)
    assert torch.equal(motivation.fine_tuned(head, embeddings, labels, 0, torch.Generator()).weight, before)
    head.weight.data, head.bias.data = torch.eye(5), torch.zeros(5)
    assert motivation.accuracy(head, embeddings, torch.tensor([0, 1, 2, 0, 0])) == pytest.approx(0.6)


def test_a_row_for_each_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources._load.cache_clear()
    for name in ("mnist", "mnist_m", "svhn", "usps"):
        write(tmp_path / name / "train.parquet", 2)
        write(tmp_path / name / "test.parquet", 1)
    (tmp_path / "table.toml").write_text(TABLE)
    monkeypatch.setattr(motivation, "TABLE", tmp_path / "table.toml")
    words = ["run.py", "--data-dir", str(tmp_path), "--steps", "3", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", words)
    motivation.main()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    rows = [row for row in table if len(row) == 6][2:]  # below the heading
    assert [row[0] for row in rows] == ["mnist", "mnist_m", "svhn", "usps", "average"]
    assert [(row[1], row[5]) for row in rows] == [("10", "20")] * 4 + [("", "")]
    shares = [[float(cell) for cell in row[2:5]] for row in rows]
    assert all(0 <= share <= 1 for row in shares for share in row)
    assert shares[-1] == pytest.approx([sum(column) / 4 for column in zip(*shares[:-1], strict=True)], abs=1e-4)
