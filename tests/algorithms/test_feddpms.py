"""FedDPMS: its exchange worked by hand, its sets, its mechanisms, and what the ledger says of them."""

import dataclasses
import itertools
import math
from collections import Counter

import pytest
import torch
from tests.helpers import CLASSES, bars, run_rounds, scripted

from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.feddpms import FedDPMS, PreliminaryReply, Scarce, Secondary, SecondaryReply, Shared, match
from fedfill.engines.runner import ClientRunner, make_resident
from fedfill.errors import FedfillError
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import part, rest, weights_of
from fedfill.privacy.accountant import epsilon
from fedfill.protocol.client import Client, State, client_handler

QUICK = {
    "local_epochs": 4,
    "batch_size": 8,
    "learning_rate": 0.01,
    "lr_decay": 1.0,
    "n_classes": 2,
    "alpha": 5,
    "sigma": 1.0,
}


# Matching


def test_match_takes_the_largest_overlap():
    assert match(9, [0, 1, 2], {3: [0, 5], 4: [1, 2], 5: [7]}) == [4]


def test_match_breaks_ties_by_the_lowest_number():
    assert match(9, [0, 1], {7: [1], 3: [0], 5: [0]}) == [3]


def test_match_never_chooses_the_recipient_itself():
    assert match(3, [0, 1], {3: [0, 1], 8: [1]}) == [8]


def test_match_finds_nobody_without_overlap():
    assert match(9, [0], {1: [5], 2: [6]}) == []
    assert match(9, [0], {}) == []


def test_several_assistants_cover_what_is_still_open():
    # 1 covers two classes; then 4 adds one more, while 2 would only repeat what is covered
    assert match(9, [0, 1, 2], {1: [0, 1], 2: [0, 1], 4: [1, 2]}, most=3) == [1, 4]


# The exchange, worked by hand on scripted clients


def world(**settings):
    weights = {"encoder.w": torch.tensor([0.0]), "classifier.w": torch.tensor([0.0]), "decoder.w": torch.tensor([0.0])}
    server, engine = scripted(clients=3, weights=weights)
    algorithm = FedDPMS(
        preliminary_rounds=2, alpha=2, n_classes=1, max_candidates=10, latent_bound="sigmoid", **settings
    )
    server.state = type(server.state)(algorithm.server_state(weights))

    def preliminary_client(i, message, t):
        trained = {name: torch.tensor([float(10 * t + i)]) for name in ("encoder.w", "classifier.w")}
        return PreliminaryReply(
            trained, [1, 1, 2][i], {"decoder.w": torch.tensor([float(i)])} if message.upload_decoder else None
        )

    def secondary_client(i, message, t):
        shared = message.share
        return SecondaryReply(
            {name: torch.tensor([float(i)]) for name in ("encoder.w", "classifier.w")},
            10 + 2 * bool(message.sources),
            bool(message.sources) or i in server.state.benefited,
            Shared([i], [2], torch.full((2, 3), float(i))) if shared else None,
            [[i, 2, 4]] if shared else [],
        )

    engine.script = {
        "preliminary_client": preliminary_client,
        "secondary_client": secondary_client,
        "scarce_classes": lambda i, message, t: Scarce([[1], [2], [1]][i]),
    }
    return algorithm, server, engine


def play(algorithm, server, rounds):
    for t in range(rounds):
        server.begin(t)
        algorithm.round(server, t)


def test_preliminary_rounds_average_two_parts_and_the_decoder_once_at_the_end():
    algorithm, server, engine = world()
    play(algorithm, server, 1)
    assert server.state.weights["encoder.w"].item() == pytest.approx((0 * 1 + 1 * 1 + 2 * 2) / 4)
    assert server.state.decoder is None
    server.begin(1)
    algorithm.round(server, 1)
    assert server.state.weights["classifier.w"].item() == pytest.approx((10 + 11 + 24) / 4)
    assert server.state.decoder["decoder.w"].item() == pytest.approx((0 + 1 + 4) / 4)
    assert all(set(message.weights) == {"encoder.w", "classifier.w"} for _, _, _, message in engine.sent)


def test_first_secondary_round_shares_and_matches_nobody():
    algorithm, server, engine = world()
    play(algorithm, server, 3)
    assert [handler for t, handler, _, _ in engine.sent if t == 2] == ["secondary_client"] * 3  # no scarce_classes yet
    messages = [message for t, _, _, message in engine.sent if t == 2]
    assert all(m.share and not m.sources and m.decoder is not None for m in messages)
    assert sorted(server.state.shared) == [0, 1, 2]
    assert server.state.shared[1].codes.tolist() == [[1.0] * 3] * 2
    assert server.state.benefited == []


def test_second_secondary_round_sends_the_matched_codes_without_the_decoder_again():
    algorithm, server, engine = world()
    play(algorithm, server, 4)
    messages = {i: m for t, handler, i, m in engine.sent if t == 3 and handler == "secondary_client"}
    assert [messages[i].sources[0].classes for i in range(3)] == [[1], [2], [1]]  # H_0 = {1}, H_1 = {2}, H_2 = {1}
    assert all(not m.share and m.decoder is None for m in messages.values())
    assert server.state.benefited == [0, 1, 2]
    # weights 12, 12, 12 over the values 0, 1, 2
    assert server.state.weights["encoder.w"].item() == pytest.approx(1.0)


def test_third_secondary_round_only_trains():
    algorithm, server, engine = world()
    play(algorithm, server, 5)
    last = [(handler, m) for t, handler, _, m in engine.sent if t == 4]
    assert {handler for handler, _ in last} == {"secondary_client"}
    assert all(not m.share and not m.sources and m.decoder is None for _, m in last)


def test_average_is_weighted_by_the_augmented_size():
    algorithm, server, engine = world()
    play(algorithm, server, 3)
    plain = engine.script["secondary_client"]
    engine.script["secondary_client"] = lambda i, m, t: SecondaryReply(
        {name: torch.tensor([float(i)]) for name in m.weights}, [10, 20, 70][i], False, None, []
    )
    server.begin(3)
    algorithm.round(server, 3)
    assert plain is not None
    assert server.state.weights["encoder.w"].item() == pytest.approx((0 * 10 + 1 * 20 + 2 * 70) / 100)


def test_a_lost_client_is_asked_again_for_everything_later():
    algorithm, server, engine = world()
    answer = engine.script["secondary_client"]

    def unreliable(i, message, t):
        if i == 1 and t == 2:
            raise RuntimeError("gone")
        return answer(i, message, t)

    engine.script["secondary_client"] = unreliable
    play(algorithm, server, 3)
    assert sorted(server.state.shared) == [0, 2]
    server.begin(3)
    algorithm.round(server, 3)
    message = next(m for t, handler, i, m in engine.sent if t == 3 and handler == "secondary_client" and i == 1)
    assert message.share
    assert message.decoder is not None
    assert sorted(server.state.shared) == [0, 1, 2]


@pytest.mark.parametrize("lost_round", [2, 3])
def test_a_reply_lost_on_the_way_parts_nobody(lost_round):
    """The client did its work and keeps its state, but the server never hears of it: a NaN spoils the reply."""
    algorithm = FedDPMS(**QUICK, preliminary_rounds=2, kl="mean", vae_weight=1.0)

    class Spoiled(FedDPMS):
        @client_handler
        def secondary_client(self, client, message):
            reply = super().secondary_client(client, message)
            if client.round == lost_round and client.id == 1:
                reply = dataclasses.replace(reply, weights={name: w * math.nan for name, w in reply.weights.items()})
            return reply

    lost = []
    server = run_rounds(
        Spoiled(**algorithm.model_dump()),
        7,
        model={"latent_activation": "none"},
        after=lambda s, t: lost.extend(s.lost),
    )
    assert [(entry["client"], entry["reason"]) for entry in lost] == [(1, "the reply holds a NaN or an infinity")]
    assert set(server.state.shared) == {0, 1, 2, 3}
    assert set(server.state.benefited) == {0, 1, 2, 3}
    assert all(state["decoder"] is None for state in server.client_states.values())


def test_a_class_without_codes_helps_nobody():
    algorithm, server, _ = world()
    server.state.shared = {0: Shared([1, 2], [0, 2], torch.zeros(2, 3)), 2: Shared([1], [2], torch.zeros(2, 3))}
    assert algorithm.matching(server, [1]) == {1: [0]}  # H_1 = {2}
    server.state.shared = {2: Shared([2, 1], [0, 2], torch.zeros(2, 3))}
    assert algorithm.matching(server, [1]) == {}


def test_young_decoder_is_told_in_one_sentence():
    algorithm, server, engine = world()
    answer = engine.script["secondary_client"]

    def collapsed(i, message, t):
        reply = answer(i, message, t)
        return (
            reply
            if i
            else SecondaryReply(reply.weights, reply.samples, False, Shared([0], [1], torch.zeros(1, 3)), [[0, 1, 10]])
        )

    engine.script["secondary_client"] = collapsed
    play(algorithm, server, 3)
    assert len(server.warnings) == 1
    assert "1 of 3 shared classes (client 0, class 0 among them)" in server.warnings[0]
    assert server.notes["acceptance"]["0"] == {"0": {"accepted": 1, "drawn": 10}}
    assert server.notes["acceptance"]["2"] == {"2": {"accepted": 2, "drawn": 4}}


def test_preliminary_end_shares_before_the_first_secondary_round():
    algorithm, server, engine = world(share_at="preliminary_end")
    engine.script["share_client"] = engine.script["secondary_client"]
    play(algorithm, server, 2)
    assert sorted(server.state.shared) == [0, 1, 2]
    assert Counter(handler for t, handler, _, _ in engine.sent if t == 1) == {
        "preliminary_client": 3,
        "share_client": 3,
    }
    server.begin(2)
    algorithm.round(server, 2)
    messages = [m for t, handler, _, m in engine.sent if t == 2 and handler == "secondary_client"]
    assert all(m.sources and not m.share and m.decoder is None for m in messages)


def test_decoder_sync_every_sends_and_averages_it_in_each_preliminary_round():
    algorithm, server, engine = world(decoder_sync="every")
    play(algorithm, server, 1)
    assert all("decoder.w" in m.decoder and m.upload_decoder for _, _, _, m in engine.sent)
    assert server.state.decoder["decoder.w"].item() == pytest.approx(1.25)


# On real clients


def test_each_client_shares_once_and_benefits_once_under_partial_participation():
    seen = Counter()

    def after(server, t):
        for i, row in server.notes.get("acceptance", {}).items():
            seen[f"shared {i}"] += bool(row)
        for i in server.notes.get("assistants", {}):
            seen[f"benefited {i}"] += 1

    algorithm = FedDPMS(**QUICK, preliminary_rounds=6, kl="mean", vae_weight=1.0)
    server = run_rounds(algorithm, 14, participation=0.5, after=after, model={"latent_activation": "none"})
    assert set(server.state.shared) == {0, 1, 2, 3}
    assert set(server.state.benefited) == {0, 1, 2, 3}
    assert set(seen.values()) == {1}
    assert len(seen) == 8
    for i in range(4):
        state = server.client_states[i]
        synthetic = state["synthetic"]
        assert synthetic.inputs.dtype == torch.uint8
        assert len(synthetic) <= 2 * 5
        assert state["local_decoder"] is None


def test_epochs_cost_as_much_as_fedavg_whatever_was_synthesised():
    server = run_rounds(FedDPMS(**QUICK, preliminary_rounds=2), 5)
    assert server.costs.train_samples == 5 * 4 * 40 * 4  # rounds, clients, samples, epochs


def test_first_secondary_round_without_draws_is_fedavg_bit_for_bit():
    settings = {"local_epochs": 2, "batch_size": 8, "learning_rate": 0.01}
    start = {}

    def remember(server, t):
        if t == 0:
            start.update(server.state.weights)

    dpms = run_rounds(
        FedDPMS(**settings, preliminary_rounds=1, secondary_latent="mean", n_classes=2), 2, after=remember
    )

    class Late(FedAvg):
        """FedAvg that starts in round 1 from given weights."""

        def round(self, server, t):
            if t == 1:
                server.state.weights = {name: start[name] for name in server.initial}
                super().round(server, t)

    plain = run_rounds(Late(**settings), 2)
    assert all(torch.equal(plain.state.weights[name], dpms.state.weights[name]) for name in plain.state.weights)


def test_bytes_of_every_leg_by_hand():
    server = run_rounds(
        FedDPMS(**QUICK, preliminary_rounds=6, vae_weight=1.0, kl="mean"), 8, model={"latent_activation": "none"}
    )
    count = {
        name: sum(t.numel() for t in part(server.initial, name).values())
        for name in ("encoder", "classifier", "decoder")
    }
    model, decoder = 4 * (count["encoder"] + count["classifier"]), 4 * count["decoder"]
    shared = server.state.shared
    assert all(s.counts == [5, 5] for s in shared.values())
    legs = server.costs.legs
    assert legs["preliminary_client"] == [6 * 4 * (model + 1), 6 * 4 * (model + 8) + 4 * decoder]
    codes = 2 * 5 * 16 * 4  # n * alpha * l floats
    acceptance = 2 * 3 * 8
    assert legs["secondary_client"][1] == 2 * 4 * (model + 8 + 1) + 4 * (codes + 2 * 8 + 2 * 8 + acceptance)
    # two rounds: the decoder to share in the first, the codes with their classes in the second
    assert legs["secondary_client"][0] == 2 * 4 * (model + 2) + 4 * decoder + 4 * (codes + 2 * 8 + 2 * 8)
    assert legs["scarce_classes"] == [0, 4 * 2 * 8]


@pytest.mark.parametrize("workers", [1, 3])
def test_same_bits_for_any_number_of_workers(workers):
    algorithm = FedDPMS(**{**QUICK, "local_epochs": 1}, preliminary_rounds=2)
    one, other = (run_rounds(algorithm, 4, workers=w, participation=0.75) for w in (2, workers))
    assert all(torch.equal(one.state.weights[name], other.state.weights[name]) for name in one.state.weights)


# One client, seen from the inside


CPU = torch.device("cpu")


def network(seed):
    return build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), needs=("decoder",), seed=seed)


def without_decoder(seed):
    return rest(weights_of(network(seed)), "decoder")


def samples_of(counts):
    """So many samples of each class."""
    return bars(sum(counts), [c for c, count in enumerate(counts) for _ in range(count)], seed=0)


def client_with(counts):
    """A client that holds w_d, with so many samples of each class."""
    initial = weights_of(network(0))
    return Client(
        id=0, round=0, data=samples_of(counts), classes=CLASSES, state=State({"decoder": part(initial, "decoder")}),
        initial=initial, seed=0, resident=make_resident(network(0), CPU).load,
    )  # fmt: skip


def share(algorithm, counts, received=1, local=2):
    """What such a client shares, given the seeds of the received and of its own network; and the client."""
    client = client_with(counts)
    shared, _ = algorithm.dpms(client, without_decoder(received), without_decoder(local))
    return shared, client


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


def test_clients_are_helped_by_those_who_hold_what_they_lack():
    quick = {**QUICK, "local_epochs": 1, "preliminary_rounds": 1}
    server = run_rounds(FedDPMS(**quick, mechanism="prior", max_candidates=10), 3)
    assert server.history[2]["assistants"] == {"0": [2], "1": [3], "2": [0], "3": [1]}


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


def test_sharing_at_the_end_of_preliminary_training_is_by_each_clients_own_model():
    own, received = {}, {}

    class Watched(FedDPMS):
        def dpms(self, client, message, local):
            own[client.id], received[client.id] = local["classifier.weight"], message["classifier.weight"]
            return super().dpms(client, message, local)

    quick = {**QUICK, "local_epochs": 1, "preliminary_rounds": 1}
    server = run_rounds(Watched(**quick, mechanism="single_release", share_at="preliminary_end"), 1)
    assert sorted(server.state.shared) == sorted(own) == [0, 1, 2, 3]
    mean = server.state.weights["classifier.weight"]
    assert torch.allclose(sum(own.values()) / 4, mean, atol=1e-6)  # clients of one size
    assert all(torch.equal(weight, mean) for weight in received.values())
    assert all((own[i] - mean).abs().max() > 1e-4 for i in own)


def test_a_client_goes_on_with_its_own_decoder_in_preliminary_training():
    began, ended = {}, {}

    class Watched(FedDPMS):
        def contribute(self, client, *arguments, beside=None, **options):
            began[client.round, client.id] = beside
            done = super().contribute(client, *arguments, beside=beside, **options)
            ended[client.round, client.id] = done.beside
            return done

    run_rounds(Watched(**{**QUICK, "local_epochs": 1}, preliminary_rounds=3), 3)
    for i in range(4):
        assert all(torch.equal(began[1, i][name], tensor) for name, tensor in ended[0, i].items())
        assert not all(torch.equal(began[0, i][name], tensor) for name, tensor in ended[0, i].items())


# Mechanisms and what they cost


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


# Settings


def resolve(algorithm, rounds=5, inputs=None, **settings):
    model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(**settings), needs=("decoder",), seed=0)
    return algorithm.resolved(
        rounds=rounds, model=model, inputs=torch.zeros(1, 1, 8, 8, dtype=torch.uint8) if inputs is None else inputs
    )


def test_preliminary_rounds_are_two_fifths_unless_given():
    assert resolve(FedDPMS(), 50).preliminary_rounds == 20
    assert resolve(FedDPMS(preliminary_rounds=7), 50).preliminary_rounds == 7
    assert resolve(FedDPMS(), 1).preliminary_rounds == 1


def test_latent_bound_follows_the_network():
    bounded = resolve(FedDPMS(), latent_activation="sigmoid")
    assert (bounded.latent_bound, bounded.latent_clip) == ("sigmoid", None)
    # l = 16: no code lies farther from the centre than a sigmoid's, so that no guarantee is lost without one
    free = resolve(FedDPMS(), latent_activation="none")
    assert (free.latent_bound, free.latent_clip) == ("clip", 2.0)
    assert free.sensitivity(16, 20) == bounded.sensitivity(16, 20) == 4 / 20
    assert resolve(FedDPMS(latent_clip=3.0)).latent_clip == 3.0
    assert resolve(FedDPMS(latent_bound="none")).latent_bound == "none"


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"preliminary_rounds": 6}, "preliminary_rounds"),
        ({"noise": "sensitivity", "latent_bound": "none"}, "noise"),
        ({"mechanism": "single_release", "release_sigma": 5.0}, "release_sigma"),
        ({"mechanism": "single_release", "noise": "sensitivity"}, "noise"),
        ({"mechanism": "prior", "noise": "sensitivity"}, "noise"),
        ({"momentum": 0.9}, "momentum"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, word):
    with pytest.raises(FedfillError, match=word):
        resolve(FedDPMS(**settings))


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_sigmoid_bound_is_refused_for_a_network_without_one(activation):
    with pytest.raises(FedfillError, match="latent_bound"):
        resolve(FedDPMS(latent_bound="sigmoid"), latent_activation=activation)


def test_inputs_that_are_no_eight_bit_images_are_refused():
    with pytest.raises(FedfillError, match="uint8"):
        resolve(FedDPMS(), inputs=torch.zeros(1, 1, 8, 8))


def test_a_decoder_of_the_wrong_shape_is_refused():
    model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), needs=("decoder",), seed=0)
    model.decoder.append(torch.nn.Upsample(scale_factor=2))
    with pytest.raises(FedfillError, match="reconstruct gives images of shape"):
        FedDPMS().resolved(rounds=5, model=model, inputs=torch.zeros(1, 1, 8, 8, dtype=torch.uint8))


def test_defaults_are_the_papers_for_its_data_sets():
    presets = FedDPMS.presets
    assert [(presets[d]["alpha"], presets[d]["sigma"], presets[d]["n_classes"]) for d in ("fashion_mnist", "cifar10", "cifar100")] == [
        (50, 3.0, 3), (200, 4.0, 3), (50, 4.0, 10),
    ]  # fmt: skip
    assert (FedDPMS().vae_weight, FedDPMS().local_epochs, FedDPMS().batch_size, FedDPMS().learning_rate) == (
        0.05,
        5,
        64,
        1e-3,
    )


def test_secondary_message_names_everything_that_crosses():
    assert set(Secondary.__dataclass_fields__) == {"weights", "decoder", "sources", "share", "settled", "control"}


def test_mechanism_none_shares_nothing_and_trains_both_phases():
    server = run_rounds(FedDPMS(mechanism="none", preliminary_rounds=2, local_epochs=1, batch_size=8), rounds=4)
    assert server.state.shared == {}
    assert server.state.benefited == []
    assert server.state.decoder is not None
    assert "scarce_classes" not in server.costs.legs
    down, up = server.costs.legs["secondary_client"]
    model = sum(t.numel() * t.element_size() for t in server.state.weights.values())
    assert down == 2 * 4 * (model + 2)  # no decoder, no codes
    assert up == 2 * 4 * (model + 8 + 1)
    assert all(state["synthetic"] is None for state in server.client_states.values())
