"""FedDPMS's sharing: whose means, with which noise, and what the account says of it."""

import itertools
import math

import pytest
import torch
from tests.algorithms.feddpms_world import CPU, QUICK, network, samples_of, share, without_decoder
from tests.helpers import CLASSES, run_rounds

from fedfill.algorithms.feddpms import FedDPMS, Secondary, Shared
from fedfill.engines.runner import ClientRunner, make_resident
from fedfill.models.views import part, weights_of
from fedfill.privacy.accountant import epsilon


def serve(algorithm, handler, message, counts, secret=None, **state):
    """A handler's reply and the state that it leaves, on a host with this key or with none."""
    initial = weights_of(network(0))
    host = ClientRunner(algorithm, classes=CLASSES, initial=initial, seed=0, device=CPU, secret=secret)
    data = samples_of(counts)
    outcome, left = host.serve(
        make_resident(network(0), CPU), handler, 0, data, data[:0], {**algorithm.client_state(), **state}, message, 0
    )
    assert outcome.error is None
    return outcome.reply, left


@pytest.fixture
def filtered(monkeypatch):
    """What the filter was asked for, as dictionaries; it accepts the mean itself."""
    asked = []

    def accept(judge, centre, std, label, **_):
        weights = {name: tensor.clone() for name, tensor in judge.state_dict().items()}
        asked.append({"judge": weights, "centre": centre, "std": std, "label": label})
        return centre[None], 1

    monkeypatch.setattr("fedfill.synthesis.noisy_means.accepted_codes", accept)
    return asked


def test_single_release_adds_the_noise_that_it_is_charged_for(monkeypatch):
    means = torch.tensor([[0.0], [3.0]]).expand(2, 4000)
    monkeypatch.setattr("fedfill.algorithms.feddpms.class_means", lambda *_: means)
    algorithm = FedDPMS(mechanism="single_release", release_sigma=0.5, latent_bound="sigmoid", n_classes=2)
    shared, client = share(algorithm, [20, 20])
    assert shared.codes.std(1).tolist() == pytest.approx([0.5, 0.5], abs=0.03)
    assert shared.codes.mean(1).tolist() == pytest.approx([0, 3], abs=0.04)
    assert client.releases["shared.codes"].mu == pytest.approx(math.sqrt(4000) / 20 / 0.5)


@pytest.mark.parametrize(("mechanism", "seed"), [("public_filter", 1), ("paper", 2)])
def test_the_public_filter_judges_by_the_received_model_and_the_papers_by_the_clients_own(mechanism, seed, filtered):
    """A filter that knew the client's own model would tell of its data what no noise hides."""
    algorithm = FedDPMS(mechanism=mechanism, latent_bound="sigmoid", n_classes=2, max_candidates=10)
    share(algorithm, [20, 20], received=1, local=2)
    assert [asked["label"] for asked in filtered] == [0, 1]
    for asked in filtered:
        assert all(torch.equal(asked["judge"][name], tensor) for name, tensor in without_decoder(seed).items())
        assert torch.equal(asked["judge"]["decoder.0.weight"], network(0).decoder[0].weight)


@pytest.mark.parametrize(("encoder", "seed"), [("global", 1), ("local", 2)])
def test_means_come_from_the_encoder_that_was_asked_for(encoder, seed, monkeypatch):
    seen = []

    def means(model, data, classes, *_):
        seen.append({name: tensor.clone() for name, tensor in part(model.state_dict(), "encoder").items()})
        return torch.zeros(len(classes), 16)

    monkeypatch.setattr("fedfill.algorithms.feddpms.class_means", means)
    algorithm = FedDPMS(mechanism="single_release", encoder=encoder, latent_bound="sigmoid")
    share(algorithm, [20, 20], received=1, local=2)
    (used,) = seen
    assert all(torch.equal(used[name], tensor) for name, tensor in part(without_decoder(seed), "encoder").items())


def test_the_rarest_of_the_shared_classes_is_charged(filtered):
    _, client = share(FedDPMS(alpha=5, sigma=1.0, latent_bound="sigmoid", n_classes=2), [30, 10])
    # l = 16: one record moves the mean of 10 codes by 0.4, that of 30 by a third of it
    assert client.releases["shared.codes"].conditional_mu == pytest.approx(math.sqrt(5) * 0.4)


def test_noise_in_multiples_of_the_sensitivity_is_that_of_each_class(filtered):
    algorithm = FedDPMS(alpha=5, sigma=2.0, noise="sensitivity", latent_bound="sigmoid", n_classes=2)
    _, client = share(algorithm, [40, 20])
    assert [asked["std"] for asked in filtered] == pytest.approx([2 * 4 / 40, 2 * 4 / 20])  # l = 16
    assert client.releases["shared.codes"].conditional_mu == pytest.approx(math.sqrt(5) / 2)


def test_noise_on_the_means_comes_from_the_hosts_own_key():
    algorithm = FedDPMS(mechanism="single_release", latent_bound="sigmoid", n_classes=2)
    message = Secondary(without_decoder(1), None, [], share=True, settled=False)

    def codes(secret):
        reply, _ = serve(algorithm, "share_client", message, [20, 20], secret, local_weights=without_decoder(2))
        return reply.shared.codes

    drawn = [codes(secret) for secret in (None, b"a" * 32, b"b" * 32)]
    assert torch.equal(drawn[1], codes(b"a" * 32))
    # whoever knows the experiment's seed could subtract noise that came from it
    assert all((one - other).abs().min() > 0 for one, other in itertools.combinations(drawn, 2))


def test_a_client_offers_what_it_has_most_of_and_asks_for_what_it_has_least_of():
    algorithm = FedDPMS(mechanism="prior", n_classes=2)
    shared, client = share(algorithm, [5, 1, 9, 3])
    assert shared.classes == [2, 0]
    assert algorithm.scarce(client) == [1, 3]
    shared, client = share(algorithm, [20, 20, 0, 0])
    assert shared.classes == [0, 1]
    assert algorithm.scarce(client) == [2, 3]


def test_a_recipient_makes_only_the_classes_that_it_asked_for():
    source = Shared([1, 2], [3, 2], torch.rand(5, 16, generator=torch.Generator().manual_seed(0)))
    decoder = part(weights_of(network(0)), "decoder")
    message = Secondary(without_decoder(1), decoder, [source], share=False, settled=False)
    for only_scarce, labels in ((True, [2, 2]), (False, [1, 1, 1, 2, 2])):
        algorithm = FedDPMS(only_scarce=only_scarce, n_classes=2, local_epochs=1, batch_size=8)
        _, left = serve(algorithm, "secondary_client", message, [4, 4])
        assert left["synthetic"].labels.tolist() == labels


@pytest.mark.parametrize(
    ("mechanism", "bound", "centre", "std"),
    [
        ("single_release", "sigmoid", [0.25, 3.0], 1.6),
        ("prior", "sigmoid", [0.5, 0.5], 2.0),
        ("prior", "none", [0.0, 0.0], 2.0),
    ],
)
def test_a_recipient_draws_around_the_one_mean_or_the_prior_with_the_noise_that_is_left(
    mechanism, bound, centre, std, filtered
):
    algorithm = FedDPMS(mechanism=mechanism, sigma=2.0, release_sigma=1.2, latent_bound=bound)
    codes = torch.tensor([[0.25, 3.0]])[: mechanism == "single_release"]
    model = torch.nn.Module()
    model.decoder = torch.nn.Unflatten(1, (1, 1, 2))
    images, _ = algorithm.synthesise(model, [Shared([3], [len(codes)], codes)], torch.Generator())
    (asked,) = filtered
    assert asked["centre"].tolist() == centre
    assert asked["std"] == pytest.approx(std)
    assert images.labels.tolist() == [3]


def ledger_entry(server, name):
    return next(e for e in server.ledger.account(1e-5)["entries"] if e["released"] == f"SecondaryReply.shared.{name}")


def test_paper_mechanism_has_no_guarantee_and_tells_what_the_noise_alone_would_cost():
    server = run_rounds(FedDPMS(**QUICK, preliminary_rounds=2), 3)
    entry = ledger_entry(server, "codes")
    assert entry["epsilon"] is None
    # 20 samples in each of a client's two classes, l = 16, alpha = 5 copies, standard deviation 1
    assert entry["conditional_epsilon"] == pytest.approx(epsilon(math.sqrt(5) * math.sqrt(16) / 20, 1e-5))
    assert len(entry["conditions"]) == 2


def test_public_filter_draws_exactly_its_candidates_and_is_charged_for_all():
    server = run_rounds(FedDPMS(**QUICK, preliminary_rounds=2, mechanism="public_filter", max_candidates=70), 3)
    rows = [row for note in server.history for client in note.get("acceptance", {}).values() for row in client.values()]
    assert {row["drawn"] for row in rows} == {70}
    assert ledger_entry(server, "codes")["epsilon"] == pytest.approx(epsilon(math.sqrt(70) * 4 / 20, 1e-5))


def test_candidates_are_charged_in_each_round_even_if_none_is_accepted(monkeypatch):
    nothing = lambda model, centre, std, label, *, candidates, **_: (centre.new_empty(0, len(centre)), candidates)  # noqa: E731
    monkeypatch.setattr("fedfill.synthesis.noisy_means.accepted_codes", nothing)
    server = run_rounds(FedDPMS(**QUICK, preliminary_rounds=1, mechanism="public_filter", max_candidates=70), 3)
    assert server.state.shared == {}
    assert ledger_entry(server, "codes")["epsilon"] == pytest.approx(epsilon(math.sqrt(2 * 70) * 4 / 20, 1e-5))
    assert ledger_entry(server, "classes")["epsilon"] is None  # the rows of what was tried tell which they are


def test_single_release_sends_one_mean_for_each_class_and_costs_one_release():
    algorithm = FedDPMS(
        **QUICK, preliminary_rounds=4, mechanism="single_release", release_sigma=0.5, vae_weight=1.0, kl="mean"
    )
    server = run_rounds(algorithm, 6, model={"latent_activation": "sigmoid"})
    assert all(shared.counts == [1, 1] for shared in server.state.shared.values())
    assert ledger_entry(server, "codes")["epsilon"] == pytest.approx(epsilon(4 / 20 / 0.5, 1e-5))
    assert algorithm.public_std == pytest.approx(math.sqrt(1 - 0.25))


def test_prior_sends_no_means():
    server = run_rounds(FedDPMS(**QUICK, preliminary_rounds=4, mechanism="prior", latent_bound="none"), 6)
    assert all(shared.codes.numel() == 0 for shared in server.state.shared.values())
    assert ledger_entry(server, "codes")["epsilon"] == 0


def test_sensitivity_noise_scales_with_the_class_size():
    algorithm = FedDPMS(latent_bound="sigmoid", noise="sensitivity")
    assert algorithm.sensitivity(latent=16, count=20) == pytest.approx(4 / 20)
    assert FedDPMS(latent_bound="clip", latent_clip=3.0).sensitivity(16, 20) == pytest.approx(2 * 3 / 20)
    assert FedDPMS(latent_bound="none").sensitivity(16, 20) == math.inf


def test_without_a_bound_nothing_is_guaranteed_even_conditionally():
    server = run_rounds(FedDPMS(**QUICK, preliminary_rounds=2, latent_bound="none"), 3)
    entry = ledger_entry(server, "codes")
    assert entry["epsilon"] is None
    assert entry["conditional_epsilon"] is None


def test_model_updates_and_class_lists_have_no_guarantee():
    server = run_rounds(FedDPMS(**QUICK, preliminary_rounds=2, mechanism="single_release"), 4)
    account = server.ledger.account(1e-5)
    open_fields = {e["released"] for e in account["entries"] if e["epsilon"] is None}
    assert {
        "SecondaryReply.weights",
        "SecondaryReply.shared.classes",
        "Scarce.classes",
        "PreliminaryReply.decoder",
    } <= open_fields
    assert account["total_epsilon"] is None


def test_only_scarce_keeps_the_classes_that_were_asked_for():
    shared = Shared([3, 5, 7], [2, 1, 2], torch.arange(10.0).reshape(5, 2))
    kept = shared.only([7, 3, 1])
    assert kept.classes == [3, 7]
    assert kept.counts == [2, 2]
    assert kept.codes.tolist() == [[0, 1], [2, 3], [6, 7], [8, 9]]
    assert shared.only(range(8)).codes.tolist() == shared.codes.tolist()


def test_codes_around_a_mean_have_the_noise_that_was_asked_for():
    algorithm = FedDPMS(alpha=4000, sigma=2.0, mechanism="prior", latent_bound="none", max_candidates=4000)

    class Yes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = torch.nn.Unflatten(1, (1, 1, 2))

        def forward(self, x):
            return torch.tensor([[1.0, 0.0]]).expand(len(x), 2)

    images, rows = algorithm.synthesise(Yes(), [Shared([0], [0], torch.empty(0, 2))], torch.Generator().manual_seed(0))
    assert rows == [[0, 4000, 4000]]
    assert len(images) == 4000
    # codes are N(0, 4); the share of pixels that the decoder's clamp to [0, 1] leaves at 1 is P(N > 1/2)
    share = (images.inputs == 255).double().mean().item()
    assert share == pytest.approx(0.5 * math.erfc((1 - 0.5 / 255) / 2 / math.sqrt(2)), abs=0.02)
