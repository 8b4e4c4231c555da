"""FedDPMS: rounds, messages and settings, by hand and by identities."""

import dataclasses
import math
from collections import Counter

import pytest
import torch
from tests.algorithms.feddpms_world import QUICK
from tests.helpers import CLASSES, refused, run_rounds, scripted

from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.feddpms import FedDPMS, PreliminaryReply, Scarce, Secondary, SecondaryReply, Shared
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import part
from fedfill.protocol.client import client_handler


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


def test_clients_are_helped_by_those_who_hold_what_they_lack():
    quick = {**QUICK, "local_epochs": 1, "preliminary_rounds": 1}
    server = run_rounds(FedDPMS(**quick, mechanism="prior", max_candidates=10), 3)
    assert server.history[2]["assistants"] == {"0": [2], "1": [3], "2": [0], "3": [1]}


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


def resolve(algorithm, rounds=5, inputs=None, **settings):
    model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(**settings), needs=("decoder",), seed=0)
    return algorithm.resolved(
        rounds=rounds, model=model, inputs=torch.zeros(1, 1, 8, 8, dtype=torch.uint8) if inputs is None else inputs
    )


def test_preliminary_rounds_are_two_fifths_unless_given():
    assert resolve(FedDPMS(), 50).preliminary_rounds == 20
    assert resolve(FedDPMS(preliminary_rounds=7), 50).preliminary_rounds == 7
    assert resolve(FedDPMS(), 1).preliminary_rounds == 1


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"preliminary_rounds": 6}, "preliminary_rounds"),
        ({"noise": "sensitivity", "latent_bound": "none"}, "noise"),
        ({"mechanism": "single_release", "release_sigma": 5.0}, "release_sigma"),
        ({"mechanism": "single_release", "noise": "sensitivity"}, "noise"),
        ({"mechanism": "prior", "noise": "sensitivity"}, "noise"),
        ({"momentum": 0.9}, "momentum"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, setting):
    with refused(setting):
        resolve(FedDPMS(**settings))


def test_inputs_that_are_no_eight_bit_images_are_refused():
    with refused("data", "uint8"):
        resolve(FedDPMS(), inputs=torch.zeros(1, 1, 8, 8))


def test_a_decoder_of_the_wrong_shape_is_refused():
    model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), needs=("decoder",), seed=0)
    model.decoder.append(torch.nn.Upsample(scale_factor=2))
    with refused("model", "[1, 1, 16, 16]", "[1, 1, 8, 8]"):
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
    assert set(Secondary.__dataclass_fields__) == {
        "weights",
        "decoder",
        "sources",
        "share",
        "settled",
        "agreed",
        "control",
    }


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
