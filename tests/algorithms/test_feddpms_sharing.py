"""FedDPMS's sharing: whose means, with which noise, and what the account says of it."""

import itertools
import math

import pytest
import torch
from tests.algorithms.feddpms_world import CPU, QUICK, client_with, network, samples_of, share, without_decoder
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


@pytest.mark.parametrize(("bound", "longest"), [("auto", 2.0), ("none", 1000.0)])
def test_codes_longer_than_the_bound_are_clipped(bound, longest, filtered, monkeypatch):
    """Half the root of l = 16 at the most, in a network that bounds nothing itself."""
    net = network(0)
    algorithm = FedDPMS(latent_bound=bound, n_classes=2).resolved(rounds=5, model=net, inputs=samples_of([1]).inputs)
    client = client_with([4, 4])
    own = without_decoder(1)
    monkeypatch.setattr(net.encoder, "forward", lambda x: torch.full((len(x), 16), 250.0))
    monkeypatch.setattr(client, "_resident", lambda weights: net)
    algorithm.dpms(client, own, own)
    assert [asked["centre"].norm().item() for asked in filtered] == pytest.approx([longest, longest])


def test_the_rarest_of_the_shared_classes_is_charged(filtered):
    _, client = share(FedDPMS(alpha=5, sigma=1.0, latent_bound="sigmoid", n_classes=2), [30, 10])
    # l = 16: one record moves the mean of 10 codes by 0.4, that of 30 by a third of it
    assert client.releases["shared.codes"].conditional_mu == pytest.approx(math.sqrt(5) * 0.4)


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


@pytest.mark.parametrize(("clip", "length"), [(None, 2.0), (3.0, 3.0)])
def test_codes_of_no_bounded_activation_are_clipped_and_accounted_for(clip, length):
    # l = 16: half the root of it, the farthest that a sigmoid's codes lie from their centre
    algorithm = FedDPMS(**QUICK, preliminary_rounds=2, mechanism="single_release", latent_clip=clip)
    stated = algorithm.resolved(rounds=3, model=network(0), inputs=samples_of([1]).inputs)
    assert (stated.latent_bound, stated.latent_clip) == ("clip", length)
    entry = ledger_entry(run_rounds(algorithm, 3), "codes")
    assert entry["epsilon"] == pytest.approx(epsilon(2 * length / 20, 1e-5))


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
