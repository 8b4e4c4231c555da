"""DP-FedAvg: clipping, noise and sampling by hand, and what may be looked into under it."""

import math

import pytest
import torch
from tests.helpers import refused, run_rounds, scripted, start_of

from fedfill.algorithms import Update
from fedfill.algorithms.dpfedavg import DPFedAvg
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.feddpgan import FedDPGAN
from fedfill.algorithms.feddpms import FedDPMS
from fedfill.algorithms.fedmix import FedMix
from fedfill.algorithms.fedzda import FedZDAC, FedZDAS
from fedfill.algorithms.naivemix import NaiveMix
from fedfill.algorithms.sdafl import SDAFL, SDAFLAC
from fedfill.errors import DivergedError
from fedfill.privacy.accountant import epsilon, sampled_epsilon

WIDE = {"width": "wide"}


def three(w: float, mean: float, count: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([w, w]), "mean": torch.tensor([mean]), "count": torch.tensor(count)}


def test_an_update_is_clipped_as_a_whole_buffers_included():
    start = start_of(three(1.0, 0.0, 5))
    packed, scale = DPFedAvg(clip=1.5).pack(start, three(3.0, 1.0, 9), steps=3)
    # the update (2, 2, 1) has norm 3
    assert packed["w"].tolist() == [2.0, 2.0]
    assert packed["mean"].tolist() == [0.5]
    assert packed["count"].item() == 5  # how many batches there were stays at home
    assert scale is None
    small, _ = DPFedAvg(clip=1.5).pack(start, three(1.1, 0.0, 9), steps=3)
    assert small["w"].tolist() == pytest.approx([1.1, 1.1])
    still, _ = DPFedAvg(clip=1.5).pack(start, three(1.0, 0.0, 9), steps=3)
    assert still["w"].tolist() == [1.0, 1.0]


def test_the_sum_is_divided_by_the_expected_cohort_and_not_by_the_one_at_hand():
    server, engine = scripted(clients=4, weights={"w": torch.tensor([0.0])}, participation=0.5)
    engine.script["train"] = lambda i, message, t: Update({"w": torch.tensor([1.0])}, 10)
    sizes = set()
    for t in range(12):
        server.begin(t)
        before = len(engine.sent)
        server.state.weights = {"w": torch.tensor([0.0])}
        DPFedAvg(noise_multiplier=1e-9).round(server, t)
        n = len(engine.sent) - before
        sizes.add(n)
        assert server.state.weights["w"].item() == pytest.approx(n / 2, abs=1e-6)
    assert len(sizes) > 2


def test_noise_by_hand():
    weights = {"w": torch.zeros(20_000), "count": torch.tensor(3)}
    server, engine = scripted(clients=4, weights=weights)
    engine.script["train"] = lambda i, message, t: Update(message.weights, 10)
    DPFedAvg(clip=2.0, noise_multiplier=3.0).round(server, 0)
    noise = server.state.weights["w"]
    assert noise.std().item() == pytest.approx(2 * 3 / 4, rel=0.02)
    assert abs(noise.mean().item()) < 0.05
    assert server.state.weights["count"].item() == 3
    first = noise.clone()
    server.begin(1)
    DPFedAvg(clip=2.0, noise_multiplier=3.0).round(server, 1)
    assert (server.state.weights["w"] - first).std().item() == pytest.approx(1.5, rel=0.02)


def test_a_round_without_clients_is_noise_alone_and_is_accounted():
    server, engine = scripted(clients=2, weights={"w": torch.zeros(100)}, participation=0.01)
    DPFedAvg().round(server, 0)
    assert engine.sent == []
    assert server.state.weights["w"].std() > 1
    assert server.notes["client_epsilon"] == sampled_epsilon(1.0, 0.01, 1, 1e-5)


def test_a_round_whose_replies_are_all_lost_is_one_without_clients():
    """A run that ended there, and said who was asked, would tell what the coins hide."""
    start = {"w": torch.zeros(100)}
    alone, _ = scripted(clients=2, weights=start, participation=0.01)
    DPFedAvg().round(alone, 0)
    lost, engine = scripted(clients=2, weights=start)
    engine.script["train"] = lambda i, message, t: Update({"w": torch.full((100,), math.nan)}, 10)
    DPFedAvg().round(lost, 0)
    assert len(engine.sent) == len(lost.lost) == 2
    noise = [server.state.weights["w"] * server.participation for server in (alone, lost)]  # over q K
    assert torch.allclose(*noise)
    plain, engine = scripted(clients=2, weights=start)
    engine.script["train"] = lambda i, message, t: Update({"w": torch.full((100,), math.nan)}, 10)
    with pytest.raises(DivergedError):
        FedAvg().round(plain, 0)


def test_cohorts_are_independent_coins():
    server, _ = scripted(clients=50, weights={"w": torch.zeros(1)}, participation=0.3)
    cohorts = [server.select_independently(t) for t in range(400)]
    assert cohorts[7] == server.select_independently(7)
    assert len({len(cohort) for cohort in cohorts}) > 8
    share = [sum(i in cohort for cohort in cohorts) / 400 for i in range(50)]
    assert all(0.2 < value < 0.4 for value in share)
    every, _ = scripted(clients=5, weights={"w": torch.zeros(1)}, participation=1.0)
    assert every.select_independently(0) == list(range(5))


@pytest.mark.parametrize("host", [FedAvg, FedZDAC, FedZDAS])
def test_others_that_take_it_draw_cohorts_by_coins_too(host: type):
    """The epsilon of their records is that of independent coins."""
    server, _ = scripted(clients=50, weights={"w": torch.zeros(1)}, participation=0.3)
    algorithm = host(aggregation="dpfedavg")
    cohorts = [algorithm.cohort(server, t) for t in range(20)]
    assert cohorts == [server.select_independently(t) for t in range(20)]
    assert len({len(cohort) for cohort in cohorts}) > 4


def test_with_a_key_of_the_servers_own_neither_noise_nor_coins_follow_from_the_seed():
    def noise(key: bytes | None, sent: float = 1.0, t: int = 0) -> torch.Tensor:
        server, engine = scripted(clients=4, weights={"w": torch.zeros(50)}, secret=(lambda: key) if key else None)
        server.begin(t)
        engine.script["train"] = lambda i, message, t: Update({"w": torch.full((50,), sent)}, 10)
        DPFedAvg(clip=100.0, noise_multiplier=0.01).round(server, t)
        return server.state.weights["w"] - sent

    a, b = b"a" * 32, b"b" * 32
    assert torch.equal(noise(a), noise(a)), "a round that is done again with the same replies tells nothing more"
    # equal noise on two sums would show their difference
    others = [noise(None), noise(a), noise(b), noise(a, sent=1.5), noise(a, t=1)]
    for i, one in enumerate(others):
        assert all((one - two).abs().max() > 0.1 for two in others[i + 1 :])

    def cohorts(key: bytes | None) -> list[list[int]]:
        server, _ = scripted(
            clients=50, weights={"w": torch.zeros(1)}, participation=0.3, secret=(lambda: key) if key else None
        )
        return [server.select_independently(t) for t in range(200)]

    assert cohorts(a) == cohorts(a)
    assert cohorts(a) != cohorts(b) != cohorts(None) != cohorts(a)
    share = [sum(i in cohort for cohort in cohorts(a)) / 200 for i in range(50)]
    assert all(0.15 < value < 0.45 for value in share)
    every, _ = scripted(clients=5, weights={"w": torch.zeros(1)}, secret=lambda: a)
    assert every.select_independently(0) == list(range(5))


def test_epsilon_grows_with_rounds_and_is_the_exact_one_without_sampling():
    values = [sampled_epsilon(1.0, 0.1, rounds, 1e-5) for rounds in (1, 10, 100)]
    assert values == sorted(values)
    assert values[2] == pytest.approx(7.0, abs=0.2)  # dp-accounting's own RDP accountant gives 7.9, an upper bound
    assert sampled_epsilon(1.0, 1.0, 4, 1e-5) == pytest.approx(epsilon(2.0, 1e-5), abs=2e-3)
    assert sampled_epsilon(2.0, 0.1, 100, 1e-5) < values[2] < sampled_epsilon(1.0, 0.2, 100, 1e-5)
    server = run_rounds(DPFedAvg(local_epochs=1), rounds=3, participation=0.5)
    told = [record["client_epsilon"] for record in server.history]
    assert told == [sampled_epsilon(1.0, 0.5, rounds, 1e-5) for rounds in (1, 2, 3)]


def test_without_clipping_and_noise_it_is_the_plain_mean():
    # Adam would make whole steps of a gradient's last bits, which depend on the processor
    settings = {"local_epochs": 1, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.05}
    plain = run_rounds(FedAvg(**settings, weighting="uniform"), rounds=2).state.weights
    private = run_rounds(DPFedAvg(**settings, clip=1e6, noise_multiplier=1e-15), rounds=2).state.weights
    assert all(torch.allclose(private[n], plain[n], atol=1e-5) for n in plain)


@pytest.mark.parametrize("host", [NaiveMix, FedMix, FedDPMS, FedDPGAN, SDAFL, SDAFLAC])
def test_where_clients_share_more_than_their_updates_it_is_refused(host: type):
    """A client's means would change the updates of the others, and the sum by more than one clipped update."""
    with refused("aggregation", f"dpfedavg with {host.name},"):
        run_rounds(host(aggregation="dpfedavg", local="fedprox"), rounds=1, model=WIDE)


def test_no_figure_of_the_record_names_the_cohort():
    settings = {"local_epochs": 1, "batch_size": 8, "start_round": 0, "images_per_class": 2, "inversion_steps": 3}
    plain = run_rounds(FedZDAC(**settings), rounds=1, model=WIDE)
    assert list(plain.history[0]["losses"]) == ["0", "1", "2", "3"]
    private = run_rounds(FedZDAC(**settings, aggregation="dpfedavg"), rounds=1, model=WIDE)
    assert "losses" not in private.history[0]


@pytest.mark.parametrize("host", [FedAvg, FedZDAC, FedZDAS])
def test_others_take_it(host: type):
    extra = {"start_round": 0, "images_per_class": 2, "inversion_steps": 3} if host is not FedAvg else {}
    server = run_rounds(
        host(local_epochs=1, batch_size=8, aggregation="dpfedavg:clip=0.5;noise_multiplier=0.01", **extra), rounds=2, model=WIDE
    )  # fmt: skip
    assert server.lost == []
    assert all("client_epsilon" in record for record in server.history)
    counters = [n for n in server.state.weights if n.endswith("num_batches_tracked")]
    assert counters
    if host is not FedZDAS:  # whose server goes on training, on synthetic images
        assert all(server.state.weights[n].item() == 0 for n in counters)


def test_the_server_inverts_no_clients_model_under_it(monkeypatch: pytest.MonkeyPatch):
    """Everything after the noise may be made public, and nothing before it."""
    from fedfill.algorithms import fedzda

    seen = []
    plain = fedzda.invert
    monkeypatch.setattr(fedzda, "invert", lambda *args: seen.append(1) or plain(*args))
    settings = {"local_epochs": 1, "start_round": 0, "images_per_class": 2, "inversion_steps": 2}
    server = run_rounds(FedZDAS(**settings, aggregation="dpfedavg"), rounds=1, model=WIDE)
    assert len(seen) == 1
    model = sum(t.numel() * t.element_size() for t in server.state.weights.values())
    assert server.costs.legs["train_real"][1] == 4 * (model + 8)
    assert len(server.state.synthetic) == 2 * 4


@pytest.mark.parametrize("host", [DPFedAvg, FedAvg])
def test_frozen_buffers_get_no_noise(host: type):
    value = {} if host is DPFedAvg else {"aggregation": "dpfedavg"}
    server = run_rounds(host(local_epochs=1, buffers="frozen", **value), rounds=1, model=WIDE)
    same = {name: torch.equal(server.state.weights[name], tensor) for name, tensor in server.initial.items()}
    assert all(same[name] for name in same if "running" in name)
    assert not any(same[name] for name in same if name.endswith("weight"))


def test_frozen_parameters_get_no_noise():
    """A pretrained encoder that nobody trains would walk away, a step in every round."""
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Linear(8, 4))
    for parameter in net[1].parameters():
        parameter.requires_grad_(False)
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    server, engine = scripted(clients=4, weights=weights)
    server.model = lambda given: net
    engine.script["train"] = lambda i, message, t: Update(message.weights, 10)
    DPFedAvg(noise_multiplier=5.0).round(server, 0)
    assert [n for n, w in weights.items() if torch.equal(server.state.weights[n], w)] == ["1.weight", "1.bias"]
