"""DP-MERF: mean embeddings from sums, a generator at the server, a classifier that saw its images alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.experiment.world import digits
from tests.helpers import refused
from torch import Tensor

import fedfill
from fedfill.algorithms import dpmerf
from fedfill.data.samples import normalise
from fedfill.experiment.prepare import arrange
from fedfill.statistics.sums import GRID

QUICK: dict[str, Any] = {
    "embedding": "fourier(200, width=0.5)", "generator_steps": 300, "generator_width": 8, "images_per_class": 50, "client_test": 0.0,
}  # fmt: skip


def images(n: int = 500) -> tuple[Any, ...]:
    x, y = digits()
    return x[:n], y[:n], x[1000:1300], y[1000:1300]


def run(folder: Path, **more: Any) -> fedfill.Result:
    return fedfill.run("dpmerf", **{"data": images(), "clients": 4, **QUICK, **more}, out=folder)


def test_one_class_per_client_is_enough(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        partition="classes:1",
        clients=10,
        classifier_epochs=8,
        images_per_class=150,
        generator_width=16,
        embedding="fourier(1000, width=0.5)",
    )
    assert result.summary["accuracy"] > 0.7
    assert result.summary["train_samples"] == 0
    distances = [record["distance"] for record in result.summary["preparation"] if "distance" in record]
    assert len(distances) == 2  # 300 steps in stages of 250
    assert distances[1] < distances[0]


def test_a_generator_that_diverges_is_told(tmp_path: Path) -> None:
    result = run(tmp_path, generator_learning_rate=1e30, generator_steps=12, images_per_class=5)
    assert [record["distance"] for record in result.summary["preparation"] if "distance" in record] == [None]
    assert ["diverged" in text for text in result.summary["warnings"]] == [True]


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
def test_every_split_gives_the_same_bits(estimator: str, tmp_path: Path) -> None:
    found = {
        run(
            tmp_path / f"{k}", partition=partition, clients=clients, workers=workers, generator_steps=20, estimator=estimator
        ).summary["weights_sha256"]
        for k, (partition, clients, workers) in enumerate([("iid", 3, 1), ("dirichlet:0.1", 4, 3), ("classes:1", 10, 2)])
    }  # fmt: skip
    assert len(found) == 1


SECOND: dict[str, Any] = {"moments": "second", "embedding": "conv(20) > project(16) > unit"}


def test_second_moments_are_the_means_of_z_z_over_all_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}

    def keep(generator: Any, encoder: Any, targets: Tensor, classes: Tensor, **more: Any) -> float:
        found.update(encoder=encoder, targets=targets, classes=classes, seconds=more["seconds"])
        return 0.0

    monkeypatch.setattr(dpmerf, "match_means", keep)
    run(tmp_path / "second", **SECOND)
    records = (
        arrange("dpmerf", data=images(), model="auto", partition="iid", clients=4, **QUICK)
        .federation.pooled()
        .clients[0]
        .train
    )
    z = found["encoder"](normalise(records.inputs)).double()
    assert found["classes"].tolist() == list(range(10))
    step = 2.0**-GRID  # to which features are rounded before they are summed
    for c in range(10):
        own = z[records.labels == c]
        torch.testing.assert_close(found["targets"][c].double(), own.mean(0), atol=step, rtol=0)
        torch.testing.assert_close(found["seconds"][c].double(), own.T @ own / len(own), atol=2 * step, rtol=0)
    run(tmp_path / "first", embedding=SECOND["embedding"])
    assert found["seconds"] is None


def test_second_moments_have_one_release_as_well(tmp_path: Path) -> None:
    kept = run(tmp_path, target_epsilon=5.0, generator_steps=2, **SECOND)
    assert kept.summary["privacy"]["total_epsilon_added"] == pytest.approx(5, rel=1e-6)
    assert len([e for e in kept.summary["privacy"]["entries"] if e["released"] == "Sums.sums"]) == 1
    d, classes = 16, 10
    numbers = classes * (d + 1 + d * (d + 1) // 2)
    assert 4 * 4 * numbers <= kept.summary["bytes_up"] <= 4 * 8 * numbers + 4000  # four clients, 4 or 8 bytes a number


def test_a_set_with_second_moments_teaches(tmp_path: Path) -> None:
    options = {
        "partition": "classes:1",
        "clients": 10,
        "classifier_epochs": 8,
        "images_per_class": 150,
        "generator_width": 16,
    }
    result = run(tmp_path, **options, **SECOND | {"embedding": "project(64) > unit"})
    assert result.summary["accuracy"] > 0.5


def test_a_run_that_is_stopped_between_stages_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dpmerf, "STAGE", 20)
    whole = run(tmp_path / "whole", generator_steps=30)

    def stop(record: dict[str, Any], rounds: int) -> None:
        if "distance" in record:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", generator_steps=30, on_round=stop)
    again = fedfill.resume(tmp_path / "stopped", data=images())
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_epsilon_does_not_grow_with_the_generators_steps(tmp_path: Path) -> None:
    for steps in (1, 30):
        kept = run(tmp_path / f"{steps}", target_epsilon=5.0, generator_steps=steps).summary["privacy"]
        assert kept["total_epsilon_added"] == pytest.approx(5, rel=1e-6)
        assert len([e for e in kept["entries"] if e["released"] == "Sums.sums"]) == 1


def test_slips() -> None:
    for words, facts in (
        ({"embedding": "patches(9, size=4, cells=2)"}, ("embedding", "patches")),
        ({"embedding": "wavelets(3)"}, ("embedding", "wavelets")),
        ({"generator_batch": 1}, ("generator_batch",)),
        ({"generator_steps": 0}, ("generator_steps",)),
        ({"estimator": "none"}, ("estimator", "unbiased")),
        ({"trust": "secure"}, ("trust", "target_epsilon")),
        ({"honest": 2}, ("honest", "trust=secure")),
    ):
        with refused(*facts):
            arrange("dpmerf", data=images(), model="auto", partition="iid", clients=3, **words)
