"""Audits end to end: releases at their boundary, canary gradients and clients, words, files, and what is refused."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from bench.same_bits import GIVEN, table
from tests.helpers import refused
from tests.studies.audits import audited, audited_sums, client
from torch import nn

import fedfill
from fedfill.algorithms import Algorithm, Broadcast
from fedfill.algorithms.feddpms import FedDPMS
from fedfill.data.samples import Samples
from fedfill.privacy import sums as privacy
from fedfill.privacy.audit import Claim, judged, of_guesses
from fedfill.privacy.keyed import seeded
from fedfill.privacy.one_run import Guesses
from fedfill.privacy.scores import joint_scores, lattice_scores, roc
from fedfill.protocol import sums
from fedfill.protocol.sums import Collected, contribute
from fedfill.statistics.noise import Noise
from fedfill.statistics.sums import class_moments
from fedfill.studies.auditing.client_canaries import Directions
from fedfill.studies.auditing.gradient_canaries import GradientCanaries
from fedfill.studies.auditing.replays import Unsteady, numbers_of, padded, sized
from fedfill.synthesis import gan
from fedfill.synthesis.gan_networks import GANSettings
from fedfill.synthesis.vae import class_means


@pytest.mark.parametrize("replaced", [True, False])
def test_the_ledgers_figure_of_sums_is_reached(replaced):
    found = audited_sums(3.0, replaced, repeats=2500)
    assert found.verdict == "PASS (tight)"
    assert found.ratio > 0.85
    assert found.found_epsilon <= found.ledger_epsilon * 1.05


def test_a_share_of_the_noise_has_the_claim_of_the_whole_once_the_honest_shares_are_together():
    statistic = class_moments(4, 2, gram=False, counts=False)
    noise = Noise("secure", {"moments": 1.0}, 2)

    def view(data, seed):
        total = 0.0
        for i, own in enumerate((data, data[:1])):
            reply = contribute(client(own, seed, id=i), statistic, [(own.inputs, own.labels)], noise, 3)
            total = total + numbers_of(reply, ["Sums.sums"])
        return total

    base = Samples(torch.eye(4)[:2], torch.tensor([0, 1]))
    more = base + Samples(torch.eye(4)[2:3], torch.tensor([0]))
    assert audited(view, base, more, Claim(1.0, (), False), 1500).ratio > 0.8
    # one share alone has half of the variance, and nobody claims that it protects
    alone = audited(lambda data, seed: numbers_of(contribute(client(data, seed), statistic, [(data.inputs, data.labels)], noise, 3), ["Sums.sums"]), base, more, Claim(1.0, (), False), 1500)  # fmt: skip
    assert alone.verdict == "FAIL"


class Stub(nn.Module):
    """Codes are the images themselves."""

    def encoder(self, images):
        return images.flatten(1)


def test_class_means_of_feddpms_reach_the_ledgers_figure():
    algorithm = FedDPMS(mechanism="single_release", latent_bound="sigmoid", sigma=3.0, release_sigma=1.0)
    dark, bright = torch.full((1, 3, 3), 127), torch.full((1, 3, 3), 255)  # codes about 0 and 1

    def view(images, seed):
        data = Samples(images.to(torch.uint8), torch.zeros(len(images), dtype=torch.int64))
        means = class_means(Stub(), data, [0], "sigmoid", 1.0)
        shared, _, _ = algorithm.share(means, [0], [len(data)], None, torch.Generator().manual_seed(seed), lambda: None)
        return shared.codes.double().numpy().flatten()

    others = torch.stack([dark])
    release = algorithm.released(algorithm.sensitivity(9, 2), 1.0)["shared.codes"]
    assert release.mu == pytest.approx(1.5)
    found = audited(view, torch.cat([others, dark[None]]), torch.cat([others, bright[None]]), Claim(release.mu), 1500)
    assert found.verdict == "PASS (tight)"
    assert found.ratio > 0.85


def test_what_is_released_in_numbers_that_noise_decides_is_seen_by_its_mean_rows():
    def reply(data, seed):
        stream = torch.Generator().manual_seed(seed)
        rows = int(torch.randint(0, 4, (), generator=stream))
        mean = data.inputs.float().mean() if len(data) else torch.zeros(())
        return Broadcast(weights={"codes": mean + torch.randn(rows, 2, generator=stream), "n": torch.tensor([rows])})

    def view(data, seed, whole=True):
        return numbers_of(reply(data, seed), ["Broadcast.weights"], whole)

    data = Samples(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64))
    checked = sized(view)
    with pytest.raises(Unsteady, match="how many numbers are released"):
        [checked(data, k) for k in range(20)]
    seen = padded(partial(view, whole=False), data, 0)
    assert {len(seen(data, k)) for k in range(50)} == {3}
    for k in range(10):
        whole = view(data, k)
        codes = whole[:-1].reshape(-1, 2)
        assert seen(data, k).tolist() == pytest.approx([*(codes.mean(0) if len(codes) else (0.0, 0.0)), whole[-1]])


def test_the_filter_with_a_public_judge_is_audited():
    found = fedfill.audit(
        "feddpms", mechanism="public_filter", max_candidates=4, alpha=2, clients=3, partition="iid", repeats=200, data_fraction=0.2
    )  # fmt: skip
    (line,) = [one for one in found.findings if one.ledger_epsilon is not None]
    assert line.verdict.startswith("PASS")
    assert "shared.codes" in line.released


def test_canary_gradients_in_one_run_of_a_gan():
    like = Samples(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    canaries = GradientCanaries(400, 0)
    data = canaries.records(like, torch.zeros(400, dtype=torch.int64))
    settings = GANSettings(latent=4, width=2, batch_size=100, critic_steps=10, noise="dpsgd")
    start = gan.start((1, 8, 8), settings, torch.Generator().manual_seed(0))
    with canaries.inserted():
        gan.train(start, data, 1, settings, torch.Generator().manual_seed(1), seeded(2, "noise"), 1.0)
    sampled = gan.released("images", settings, 400, 1, 1.0).sampled
    assert (canaries.steps, sampled) == (10, (1.0, 0.25, 10))
    found = of_guesses("images", "", Claim(0.0, (sampled,)), Guesses.of(canaries.scores, canaries.coins))
    assert found.verdict.startswith("PASS")
    assert found.found_epsilon > 0.3
    # the same scores under a booking of one step
    wrong = of_guesses("images", "", Claim(0.0, ((8.0, 0.25, 1),)), Guesses.of(canaries.scores, canaries.coins))
    assert wrong.verdict == "FAIL"


def test_a_canary_is_known_by_its_number_in_any_range():
    canaries = GradientCanaries(300, 0)
    like = Samples(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    images = canaries.records(like, torch.zeros(300, dtype=torch.int64)).inputs.float()
    for scaled in (images / 255, images / 127.5 - 1):
        assert canaries.numbers(scaled).tolist() == list(range(300))
    assert set(canaries.numbers(torch.rand(50, 1, 8, 8)).tolist()) == {-1}
    assert canaries.numbers(images[:0]).tolist() == []


def test_directions_are_orthonormal_and_scored_all_at_once():
    directions = Directions(30, 101, 0)
    rows = np.stack([directions[j] for j in range(30)])
    np.testing.assert_allclose(rows @ rows.T, np.eye(30), atol=1e-12)
    x = np.random.default_rng(0).normal(size=101)
    np.testing.assert_allclose(directions.scores(x), rows @ x, atol=1e-12)
    with refused("canaries", 101):
        Directions(101, 101, 0)


def test_clients_in_one_run(tmp_path):
    found = fedfill.audit(
        "dpfedavg", rounds=1, clients=3, canaries=400, noise_multiplier=1.0, out=tmp_path, data_fraction=0.2
    )
    (one,) = found.findings
    assert one.ledger_epsilon == pytest.approx(4.3772, rel=0.01)
    assert one.verdict.startswith("PASS")
    assert one.found_epsilon > 0.3 * one.ledger_epsilon
    written = json.loads((tmp_path / "audit.json").read_text())
    assert written["findings"][0]["right"] == one.right
    assert not found.failed


def test_a_missing_clip_of_clients_is_found(monkeypatch):
    from fedfill.algorithms.dpfedavg import DPFedAvg

    monkeypatch.setattr(DPFedAvg, "pack", lambda self, start, trained, steps: (trained, None))
    found = fedfill.audit("dpfedavg", rounds=1, clients=3, canaries=400, noise_multiplier=2.0, data_fraction=0.2)
    assert found.failed


def test_sums_of_an_algorithm_by_its_own_handler():
    found = fedfill.audit(
        "fed3r", target_epsilon=8.0, features="project(6) > unit", repeats=300, clients=3, data_fraction=0.2
    )
    by = {one.neighbours.split()[-1]: one for one in found.findings}
    assert by["removed"].ledger_epsilon == pytest.approx(8.0, rel=0.01)
    assert all(one.verdict.startswith("PASS") for one in found.findings)
    assert by["removed"].found_epsilon > 0.5 * 8


def on_a_table(**more):
    return fedfill.audit(
        "mst", data=table(), schema_file=GIVEN["its schema"](), clients=3, partition="iid", client_test=0.0,
        target_epsilon=8.0, repeats=300, **more,
    )  # fmt: skip


def test_counts_of_a_table():
    found = on_a_table(structure="augmented")
    by = {one.neighbours.split()[-1]: one for one in found.findings}
    assert by["removed"].ledger_epsilon == pytest.approx(8.0, rel=1e-6)
    assert all(one.verdict.startswith("PASS") for one in found.findings)
    assert by["removed"].found_epsilon > 0.7 * 8


def test_what_a_server_asks_for_by_its_noise_is_refused():
    with refused("audit", "mst", "trust=site"):
        on_a_table(structure="tree", trust="server")


@pytest.mark.parametrize("planted", [False, True])
def test_what_the_server_publishes(monkeypatch, planted):
    """The server's own noise; planted: it adds a third of what it declares."""
    real = privacy.add_noise
    if planted:
        monkeypatch.setattr(privacy, "add_noise", lambda x, std, *rest: real(x, std / 3, *rest))
    found = fedfill.audit(
        "fed3r",
        target_epsilon=3.0,
        trust="server",
        features="project(6) > unit",
        repeats=250,
        clients=3,
        data_fraction=0.2,
    )
    assert sums.Collected is Collected
    by = {one.neighbours.split()[-1]: one for one in found.findings}
    assert by["removed"].ledger_epsilon == pytest.approx(3.0, rel=0.01)
    assert found.failed == planted
    assert by["removed"].found_epsilon > 0.5 * 3


def test_what_declares_nothing_has_no_claim_to_test():
    found = fedfill.audit("fedavg", rounds=1, clients=3, data_fraction=0.2)
    assert found.findings == ()
    bare = found.document["without_guarantee"]
    assert "Update.weights" in bare["released"]
    low, high = bare["membership"]["interval"]
    assert low <= bare["membership"]["advantage"] <= high
    assert bare["classes_told"] is None or 0 <= bare["classes_told"] <= 1


def test_verdicts():
    assert judged(None, 3.0, 1e-9) == "no claim to test"
    assert judged(1.0, 3.0, 1e-5) == "FAIL"
    assert judged(1.0, 1.1, 1e-3).startswith("suspicious")
    assert judged(1.0, 0.5, 1.0) == "PASS (tight)"
    assert judged(1.0, 0.49, 1.0) == "PASS (loose attack)"


def test_the_joint_score_sees_a_direction_without_noise():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2, 400, 1))
    a, b = np.concatenate([noise[0], noise[0] + 0.1], 1), np.concatenate([noise[1], noise[1]], 1)
    ins, outs, threshold = joint_scores(a, b)
    assert ins.min() > threshold > outs.max()
    assert roc(ins, outs) == (1.0, 1.0)


def test_the_lattice_sees_coarse_noise_and_nothing_else():
    rng = np.random.default_rng(0)
    fine = rng.normal(size=(2, 300, 4))
    coarse = np.round(fine * 2**10) / 2**10
    shift = np.array([0.3, 0.0, 0.1, 0.7])
    ins, outs = lattice_scores(coarse[0] + shift, coarse[1])
    assert ins.min() > outs.max()
    ins, outs = lattice_scores(fine[0] + shift, fine[1])
    assert not ins.any()
    assert not outs.any()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("canaries", {"canaries": 3}),
        ("repeats", {"repeats": 10}),
        ("level", {"level": "site"}),
        ("level", {"level": "client"}),
        ("confidence", {"confidence": 1.0}),
        ("engine", {"engine": "ray"}),
        ("test_fraction", {"test_fraction": 0}),
    ],
)
def test_what_is_refused(setting, words):
    with refused(setting):
        fedfill.audit("fedavg", clients=3, data_fraction=0.2, **words)


def test_an_infinite_figure_is_written_as_none():
    found = audited_sums(3.0, repeats=200)
    assert math.isinf(found.ceiling)
    assert found.document()["ceiling"] is None
    assert issubclass(FedDPMS, Algorithm)
