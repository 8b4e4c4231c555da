"""FedGauss: a classifier that saw synthetic images alone, the same whatever the split, with one exact guarantee."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.experiment.world import digits
from tests.helpers import refused

import fedfill
from fedfill.algorithms.fedgauss import FedGauss
from fedfill.experiment.loop import synthetic_images
from fedfill.experiment.prepare import arrange
from fedfill.privacy import sums as privacy
from fedfill.runs.directory import RunDirectory

QUICK: dict[str, Any] = {"images_per_class": 60, "classifier_epochs": 2, "client_test": 0.0}


def images(n: int = 600) -> tuple[Any, ...]:
    x, y = digits()
    return x[:n], y[:n], x[1000:1300], y[1000:1300]


def run(folder: Path, **more: Any) -> fedfill.Result:
    return fedfill.run("fedgauss", **{"data": images(), "clients": 4, **QUICK, **more}, out=folder)


def test_one_class_per_client_is_enough_for_good_images(tmp_path: Path) -> None:
    """All ten classes are recognised by a network that never saw a real image."""
    result = run(tmp_path, partition="classes:1", clients=10, images_per_class=300, classifier_epochs=6)
    assert result.summary["accuracy"] > 0.85
    assert result.summary["rounds"] == 1
    assert result.rounds[0]["covariance"] == "class"
    assert result.summary["train_samples"] == 0


@pytest.mark.parametrize("more", [{}, {"covariance": "shared", "frequencies": 0.5}])
def test_every_split_gives_the_same_bits(more: dict[str, Any], tmp_path: Path) -> None:
    found = {
        run(tmp_path / f"{k}", partition=partition, clients=clients, workers=workers, **more).summary["weights_sha256"]
        for k, (partition, clients, workers) in enumerate(
            [("iid", 3, 1), ("dirichlet:0.1", 4, 3), ("classes:1", 10, 2)]
        )
    }
    assert len(found) == 1


def test_a_class_that_nobody_holds_has_no_images(tmp_path: Path) -> None:
    x, y, test, truth = images()
    held = y != 3
    result = run(tmp_path, data=(x[held], y[held], test, truth))
    assert any("class 3" in text for text in result.rounds[0]["warnings"])
    made = synthetic_images(
        arrange("fedgauss", model="auto", partition="dirichlet:0.5", data=(x[held], y[held], test, truth), clients=4, **QUICK),
        RunDirectory(tmp_path), torch.device("cpu"),
    )  # fmt: skip
    assert made is not None
    assert sorted(made.labels.unique().tolist()) == [c for c in range(10) if c != 3]


def test_a_lost_client_leaves_the_means_of_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Counts and moments are of the same clients, so that no class becomes darker."""
    whole = run(tmp_path / "whole", partition="iid")
    original = FedGauss.records

    def broken(self: FedGauss, client: Any, frequencies: Any) -> Any:
        if client.id == 0:
            raise ValueError("no disk")
        return original(self, client, frequencies)

    monkeypatch.setattr(FedGauss, "records", broken)
    lost = run(tmp_path / "lost", partition="iid")
    kept = [RunDirectory(result.directory).read_checkpoint()["server"]["gaussians"] for result in (whole, lost)]
    held = json.loads((tmp_path / "whole" / "partition.json").read_text())["clients"]
    assert kept[0]["counts"].tolist() == [sum(row[c] for row in held) for c in range(10)]
    assert kept[1]["counts"].tolist() == [sum(row[c] for row in held[1:]) for c in range(10)]
    assert torch.allclose(kept[0]["means"][:, 0], kept[1]["means"][:, 0], rtol=0.1)  # how light a class is


# Noise


def test_the_account_is_of_both_exchanges(tmp_path: Path) -> None:
    result = run(tmp_path, target_epsilon=10.0)
    kept = result.summary["privacy"]
    assert kept["total_epsilon_added"] == pytest.approx(10, rel=1e-6)
    assert kept["total_epsilon"] > 10
    entries = [e for e in kept["entries"] if e["released"] == "Sums.sums"]
    assert len(entries) == 2
    counts = next(e for e in entries if "moments" not in e["mechanism"])
    mu = privacy.mu_for(10.0, 1e-5)
    assert counts["epsilon_added"] < 1.5
    others = next(e for e in entries if e is not counts)
    assert privacy.mu_for(counts["epsilon_added"], 1e-5) ** 2 + privacy.mu_for(
        others["epsilon_added"], 1e-5
    ) ** 2 == pytest.approx(mu**2, rel=1e-3)


@pytest.mark.parametrize(("epsilon", "covariance"), [(2000.0, "class"), (3.0, "shared")])
def test_noise_decides_whether_classes_share_a_covariance(epsilon: float, covariance: str, tmp_path: Path) -> None:
    result = run(tmp_path, target_epsilon=epsilon, trust="server")
    assert result.rounds[0]["covariance"] == covariance
    forced = run(tmp_path / "forced", target_epsilon=epsilon, trust="server", covariance="class")
    assert forced.rounds[0]["covariance"] == "class"


def test_less_noise_is_better_and_another_run_has_the_same(tmp_path: Path) -> None:
    accuracies = [
        run(tmp_path / f"{e:g}", target_epsilon=e, trust="server", classifier_epochs=4).summary["accuracy"]
        for e in (0.05, 50.0)
    ]
    assert accuracies[1] > accuracies[0] + 0.2
    again = run(tmp_path / "again", target_epsilon=50.0, trust="server", classifier_epochs=4)
    assert again.summary["accuracy"] == accuracies[1]


# Words


def test_slips() -> None:
    x, y, test, truth = images()
    with refused("data", "fedgauss", "float32"):
        arrange("fedgauss", model="auto", partition="iid", data=(x / 255.0, y, test / 255.0, truth), clients=2)
    for words, facts in (
        ({"trust": "secure"}, ("trust", "secure", "target_epsilon")),
        ({"honest": 2, "target_epsilon": 1.0}, ("honest", "2", "trust=secure")),
        ({"frequencies": 0.0}, ("frequencies",)),
        ({"radius": 1.5}, ("radius",)),
        ({"covariance": "diagonal"}, ("covariance", "diagonal", "shared")),
        ({"images_per_class": 0}, ("images_per_class",)),
    ):
        with refused(*facts):
            arrange("fedgauss", model="auto", partition="iid", data=images(), clients=2, **words)
