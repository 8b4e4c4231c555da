"""FedDPMS's variants: numbers that clients agree on, all missing classes, covers, means of all clients' records, controls."""

from collections import Counter

import pytest
import torch
from tests.algorithms.feddpms_world import QUICK, client_with, network, samples_of, share, without_decoder
from tests.helpers import CLASSES, bars, refused, run_rounds, scripted, small_federation

from fedfill.algorithms._layers import Ask
from fedfill.algorithms._matching import Scarce, Skew
from fedfill.algorithms.feddpms import FedDPMS, PreliminaryReply, SecondaryReply, Shared
from fedfill.data.samples import Batch, Samples, normalise
from fedfill.models.views import part, weights_of
from fedfill.privacy import accountant
from fedfill.privacy import sums as privacy
from fedfill.protocol.client import Client
from fedfill.statistics.sums import as_joined, class_moments
from fedfill.synthesis.vae import class_means, vae_loss

YOUNG = {**QUICK, "local_epochs": 1, "preliminary_rounds": 1}
GLOBAL = {**YOUNG, "means": "global", "max_candidates": 10}


def resolve(algorithm, rounds=5, **settings):
    return algorithm.resolved(rounds=rounds, model=network(0), inputs=samples_of([1]).inputs)


# What is not set is not recorded


def test_variants_that_are_not_set_leave_no_trace_in_the_record():
    variants = {
        "want",
        "centre",
        "keep",
        "means",
        "target_epsilon",
        "target_delta",
        "trust",
        "honest",
        "reconstruction_weight",
    }
    assert variants <= FedDPMS.model_fields.keys()
    assert not variants & resolve(FedDPMS()).model_dump().keys()
    told = resolve(FedDPMS(means="global", want="missing", target_epsilon=1.0)).model_dump()
    assert (told["means"], told["want"], told["target_epsilon"]) == ("global", "missing", 1.0)


def test_numbers_are_recorded_as_they_were_and_nobody_is_asked_for_them():
    resolved = resolve(FedDPMS(n_classes=2, alpha=5))
    assert (resolved.n_classes, resolved.alpha, resolved.max_candidates, resolved.n_assistants) == (2, 5, 1000, 1)
    server = run_rounds(FedDPMS(**YOUNG, mechanism="prior", max_candidates=10), 3)
    assert "skew" not in server.costs.legs
    assert server.state.agreed is None


# n and alpha that all clients share


def test_n_is_the_least_number_of_scarce_classes_and_alpha_a_tenth_by_hand():
    # 100, 200 and 300 records: a tenth of their mean is 20, of which each of 2 classes gets 10
    assert FedDPMS(n_classes="auto", alpha="auto").agreement([4, 2, 3], [100, 200, 300], classes=10) == [2, 10]
    assert FedDPMS(n_classes="auto", alpha=7).agreement([4, 2, 3], [100, 200, 300], classes=10) == [2, 7]
    assert FedDPMS(n_classes=4, alpha="auto").agreement([4, 2, 3], [100, 200, 300], classes=10) == [4, 5]
    # where a client lacks nothing one class is named all the same, and a small data set gives one code
    assert FedDPMS(n_classes="auto", alpha="auto").agreement([0, 2], [3, 3], classes=10) == [1, 1]


def test_clients_agree_once_and_everybody_works_with_the_same_numbers():
    asked = Counter()

    class Watched(FedDPMS):
        def dpms(self, client, received, local):
            asked[self.n_classes, self.alpha, self.candidates] += 1
            return super().dpms(client, received, local)

    settings = {**YOUNG, "n_classes": "auto", "alpha": "auto"}
    server = run_rounds(Watched(**settings, mechanism="prior"), 3)
    # two of four classes have less than 2 % of a client's 40 records; 4 of them are a tenth, 2 for each class
    assert server.state.agreed == [2, 2]
    assert server.history[1]["agreed"] == {"n_classes": 2, "alpha": 2}
    assert asked == {(2, 2, 400): 4}
    assert server.costs.legs["skew"] == [0, 4 * 16]
    assert server.costs.legs["scarce_classes"][0] == 4 * 16
    assert all(len(state["synthetic"] or ()) <= 2 * 2 for state in server.client_states.values())


def test_what_is_shared_early_has_the_agreed_numbers_too():
    settings = {**YOUNG, "n_classes": "auto", "alpha": "auto"}
    server = run_rounds(FedDPMS(**settings, mechanism="prior", share_at="preliminary_end"), 1)
    assert server.state.agreed == [2, 2]
    assert all(len(shared.classes) == 2 for shared in server.state.shared.values())


# All that is missing, from as many as it takes


def test_missing_classes_are_all_with_fewer_than_alpha_records():
    client = client_with([5, 0, 9, 4])
    assert FedDPMS(n_classes=2).scarce(client) == [1, 3]
    assert FedDPMS(n_classes=2, alpha=5, want="missing").scarce(client) == [1, 3]
    assert FedDPMS(n_classes=2, alpha=6, want="missing").scarce(client) == [1, 3, 0]
    assert FedDPMS(n_classes=2, alpha=1, want="missing").scarce(client_with([1, 1, 1, 1])) == []


def offering(**settings):
    """Client 0 seeks; what others gave is in the state of a server whose clients are scripted."""
    weights = {"encoder.w": torch.tensor([0.0]), "classifier.w": torch.tensor([0.0]), "decoder.w": torch.tensor([0.0])}
    server, engine = scripted(clients=6, weights=weights)
    algorithm = FedDPMS(preliminary_rounds=1, n_classes=3, **settings)
    server.state = type(server.state)(algorithm.server_state(weights))
    given = {1: [0, 1], 2: [2, 3], 3: [3, 4], 4: [2, 3], 5: [0, 5]}
    server.state.shared = {j: Shared(c, [1] * len(c), torch.zeros(len(c), 3)) for j, c in given.items()}
    engine.script["scarce_classes"] = lambda i, message, t: Scarce([0, 2, 3, 4, 9])
    server.begin(1)
    return algorithm, server


@pytest.mark.parametrize(
    ("most", "chosen"),
    [
        (1, [2]),  # 2 and 4 cover {2, 3}, 3 covers {3, 4}: the lowest number of the three
        (2, [2, 1]),  # 1 and 5 cover {0}, 3 covers {4}
        ("cover", [2, 1, 3]),  # nobody has 9
    ],
)
def test_greedy_cover_by_hand(most, chosen):
    algorithm, server = offering(n_assistants=most)
    assert algorithm.matching(server, [0]) == {0: chosen}
    assert server.notes["assistants"] == {"0": chosen}


# The centre, and nothing else


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn, as (label, centre, judge's first weight); the filter accepts the centre itself."""
    asked = []

    def accept(judge, centre, std, label, **_):
        asked.append((label, centre, judge.state_dict()["encoder.mu.weight"].clone()))
        return centre[None], 1

    monkeypatch.setattr("fedfill.synthesis.noisy_means.accepted_codes", accept)
    return asked


def test_the_control_has_another_classs_mean_under_the_right_label(drawn):
    share(FedDPMS(n_classes=3, latent_bound="sigmoid"), [9, 8, 7])
    right = {label: centre for label, centre, _ in drawn}
    drawn.clear()
    shared, _ = share(FedDPMS(n_classes=3, latent_bound="sigmoid", centre="wrong"), [9, 8, 7])
    assert shared.classes == [0, 1, 2]
    for label, centre, _ in drawn:
        assert torch.equal(centre, right[{0: 2, 1: 0, 2: 1}[label]])
        assert not torch.equal(centre, right[label])


def test_the_wrong_mean_of_one_release_is_another_classs_too(monkeypatch):
    means = torch.arange(3.0)[:, None].expand(3, 16)
    monkeypatch.setattr("fedfill.algorithms.feddpms.class_means", lambda *_: means)
    settings = {"mechanism": "single_release", "release_sigma": 1e-6, "latent_bound": "sigmoid", "centre": "wrong"}
    shared, _ = share(FedDPMS(**settings), [9, 8, 7])
    assert shared.codes.mean(1).tolist() == pytest.approx([2, 0, 1], abs=1e-4)


def test_a_client_with_one_class_has_no_wrong_mean_to_share():
    shared, client = share(FedDPMS(n_classes=3, latent_bound="sigmoid", centre="wrong"), [9, 0, 0, 0])
    assert shared is None
    assert client.releases["shared.classes"].mu is None


@pytest.mark.parametrize("mechanism", ["paper", "public_filter"])
@pytest.mark.parametrize(("bound", "centre"), [("sigmoid", 0.5), ("clip", 0.0)])
def test_a_prior_changes_the_centre_and_leaves_the_judge(mechanism, bound, centre, drawn):
    settings = {"mechanism": mechanism, "latent_bound": bound, "n_classes": 2, "max_candidates": 10}
    share(FedDPMS(**settings), [9, 8])
    before = {label: judge for label, _, judge in drawn}
    drawn.clear()
    _, client = share(FedDPMS(**settings, centre="prior"), [9, 8])
    assert [label for label, _, _ in drawn] == [0, 1]
    for label, used, judge in drawn:
        assert used.tolist() == [centre] * 16
        assert torch.equal(judge, before[label])
    # draws around what everybody knows say nothing; that a client's own classifier chose among them does
    assert client.releases["shared.codes"].mu == (0 if mechanism == "public_filter" else None)


def test_without_a_filter_the_first_codes_are_kept_and_the_papers_copies_have_an_account():
    settings = {"n_classes": 2, "alpha": 5, "sigma": 2.0, "latent_bound": "sigmoid"}
    shared, client = share(FedDPMS(**settings, keep="all"), [9, 8])
    assert shared.counts == [5, 5]
    # l = 16: one record moves the mean of 8 codes by half; five copies with noise of 2
    release = client.releases["shared.codes"]
    assert release.mu == pytest.approx(5**0.5 * 0.5 / 2)
    assert len(release.conditions) == 1  # the encoder's
    assert client.releases["shared.counts"].mu == 0


@pytest.mark.parametrize(("keep", "keyed"), [("all", True), ("recognised", False)])
def test_what_has_a_guarantee_draws_from_the_keyed_stream_alone(keep, keyed, monkeypatch):
    """The paper's mechanism with its filter has none, and keeps its draws; without the filter it has one."""
    used = []
    for name in ("noise", "unguaranteed"):
        stream = getattr(Client, name)
        monkeypatch.setattr(
            Client, name, lambda *given, name=name, stream=stream: (used.append(name), stream(*given))[1]
        )
    share(FedDPMS(n_classes=2, alpha=5, sigma=2.0, latent_bound="sigmoid", keep=keep), [9, 8])
    assert set(used) == {"noise" if keyed else "unguaranteed"}


# Means of all clients' records


def client_of(data):
    client = client_with([1])
    client.data = data
    return client


def pooled(algorithm, parts, weights):
    """What the server makes of the sums of some clients."""
    statistic = algorithm.code_moments(16, CLASSES)
    replies = [algorithm.code_sums(client_of(data), Ask(weights, len(parts))).sums for data in parts]
    sums = {name: sum(reply[name].to(torch.int64) for reply in replies) for name in replies[0]}
    joined = as_joined(statistic, sums)
    return algorithm.share_all(joined["moments"], joined["counts"])


@pytest.mark.parametrize("bound", ["sigmoid", "clip"])
def test_global_means_are_those_of_the_pooled_codes_however_records_lie(bound):
    data, weights = samples_of([9, 5, 0, 7]), part(without_decoder(3), "encoder")
    algorithm = FedDPMS(means="global", mechanism="single_release", latent_bound=bound)
    model = network(0).eval()
    model.load_state_dict({**weights_of(model), **weights})
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    splits = [
        [data],
        [data[data.labels == c] for c in (3, 0, 1)],
        [data[order[:2]], data[order[2:2]], data[order[2:]]],  # one client has no record at all
    ]
    found = [pooled(algorithm, parts, weights) for parts in splits]
    assert all(torch.equal(found[0].codes, other.codes) for other in found[1:])
    assert found[0].classes == [0, 1, 3]
    assert found[0].counts == [1, 1, 1]
    expected = class_means(model, data, [0, 1, 3], bound, algorithm.clip(16))
    assert torch.allclose(found[0].codes, expected, atol=2.0**-12)


def test_the_control_of_global_means_has_another_classs_mean():
    data, weights = samples_of([9, 5, 0, 7]), part(without_decoder(3), "encoder")
    right, wrong = (pooled(resolve(FedDPMS(means="global", centre=c)), [data], weights) for c in ("mean", "wrong"))
    assert right.classes == wrong.classes
    assert torch.equal(wrong.codes, right.codes[[2, 0, 1]])


def test_every_recipient_decodes_what_it_lacks_from_one_sum_and_nobody_is_asked_for_class_lists():
    server = run_rounds(FedDPMS(**{**GLOBAL, "vae_weight": 1.0, "kl": "mean", "preliminary_rounds": 6}), 8)
    assert server.state.means.classes == [0, 1, 2, 3]
    assert server.state.shared == {}
    assert server.costs.legs.keys() == {"preliminary_client", "code_sums", "secondary_client"}
    encoder = sum(x.numel() for x in part(server.initial, "encoder").values())
    assert server.costs.legs["code_sums"] == [4 * (4 * encoder + 8), 4 * (4 * 16 * 4 + 4 * 4)]
    held = {i: {i, (i + 1) % 4} for i in range(4)}
    for i, state in server.client_states.items():
        made = set(state["synthetic"].labels.tolist())
        assert made
        assert not made & held[i]
    assert {int(i) for i in server.history[6]["acceptance"]} == {0, 1, 2, 3}  # in the first secondary round


def test_who_lacks_nothing_is_not_sent_the_decoder_again():
    server = run_rounds(
        FedDPMS(**{**GLOBAL, "want": "missing", "alpha": 1}), 4, federation=small_federation(per_client=4)
    )
    assert server.state.benefited == [0, 1, 2, 3]
    assert all(state["synthetic"] is None for state in server.client_states.values())
    model, decoder = (
        4 * sum(x.numel() for name in names for x in part(server.initial, name).values())
        for names in (("encoder", "classifier"), ("decoder",))
    )
    means = 4 * (4 * 8 + 4 * 8 + 4 * 16 * 4)
    assert server.costs.legs["secondary_client"][0] == 3 * 4 * (model + 2) + 4 * decoder + means


@pytest.mark.parametrize("trust", ["site", "secure", "server"])
def test_the_account_is_that_of_the_sums(trust):
    settings = {**GLOBAL, "target_epsilon": 2.0, "trust": trust}
    server = run_rounds(FedDPMS(**settings), 2)
    entry = next(e for e in server.ledger.account(1e-5)["entries"] if e["released"] == "Sums.sums")
    # l = 16: codes are clipped to a length of 2; both figures follow from the noise and from nothing else
    bounds = class_moments(16, CLASSES, radius=2.0, gram=False).bounds()
    stds = privacy.stds(bounds, privacy.shares(bounds), privacy.mu_for(2.0, 1e-5))
    replaced = accountant.epsilon(privacy.mu_replaced(bounds, stds), 1e-5)
    kind = "conditional_" if trust == "server" else ""
    assert entry[f"{kind}epsilon_added"] == pytest.approx(2.0, abs=1e-6)
    assert entry[f"{kind}epsilon"] == pytest.approx(replaced)
    assert entry["times"] == 1


@pytest.mark.parametrize(("bound", "middle"), [("sigmoid", 0.5), ("clip", 0.0)])
def test_noise_makes_no_mean_longer_than_a_mean_of_bounded_codes_can_be(bound, middle):
    algorithm = FedDPMS(means="global", mechanism="single_release", latent_bound=bound)
    moments, counts = torch.full((16, 2), 100.0, dtype=torch.float64), torch.tensor([10.0, 0.0])
    shared = algorithm.share_all(moments, counts)
    assert shared.classes == [0]
    assert shared.codes[0].tolist() == pytest.approx([middle + 0.5] * 16)  # a corner: 2 from the middle


def test_a_class_that_does_not_stand_out_of_the_noise_has_no_mean():
    server = run_rounds(FedDPMS(**{**GLOBAL, "target_epsilon": 0.01}), 3)
    assert server.state.means.classes == []
    assert any("class 0, 1, 2, 3" in sentence for sentence in server.history[1]["warnings"])
    assert all(state["synthetic"] is None for state in server.client_states.values())


def test_without_matching_the_rows_of_the_filter_tell_what_a_client_lacks():
    server = run_rounds(FedDPMS(**GLOBAL), 2)
    entry = next(e for e in server.ledger.account(1e-5)["entries"] if e["released"] == "SecondaryReply.acceptance")
    assert entry["epsilon"] is None


@pytest.mark.parametrize(
    "settings",
    [
        {"means": "global", "target_epsilon": 3.0, "want": "missing", "alpha": "auto"},
        {"n_classes": "auto", "alpha": "auto", "want": "missing", "n_assistants": "cover", "centre": "wrong"},
    ],
)
def test_same_bits_for_any_number_of_workers(settings):
    algorithm = FedDPMS(**{**YOUNG, "max_candidates": 20, **settings})
    one, other = (run_rounds(algorithm, 3, workers=workers, participation=0.75) for workers in (1, 3))
    assert all(torch.equal(one.state.weights[name], other.state.weights[name]) for name in one.state.weights)
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(synthetic(one), synthetic(other), strict=True))


def synthetic(server) -> list[Samples]:
    return [state["synthetic"] for state in server.client_states.values() if state["synthetic"] is not None]


# The loss


def test_a_weight_of_so_many_pixels_sums_the_error_over_them():
    data, model = bars(6, [0, 1, 2], seed=0), network(0).eval()
    batch = Batch(normalise(data.inputs), data.labels, torch.arange(6))
    torch.manual_seed(0)
    summed = vae_loss(model, batch, weight=0.3, reconstruction="mse_sum", kl="sum")
    torch.manual_seed(0)
    weighted = vae_loss(model, batch, weight=0.3, reconstruction="mse", kl="sum", reconstruction_weight=64.0)
    assert weighted.item() == pytest.approx(summed.item(), rel=1e-5)
    assert FedDPMS(reconstruction_weight=2.0).model_dump()["reconstruction_weight"] == 2.0


# What makes no sense


@pytest.mark.parametrize(
    ("settings", "setting", "facts"),
    [
        ({"means": "global", "mechanism": "paper"}, "means", ["paper", "single_release"]),
        ({"means": "global", "mechanism": "none"}, "means", ["none"]),
        ({"means": "global", "share_at": "preliminary_end"}, "share_at", ["preliminary_end"]),
        ({"means": "global", "n_assistants": "cover"}, "n_assistants", ["cover"]),
        ({"means": "global", "latent_bound": "none", "target_epsilon": 1.0}, "target_epsilon", ["latent_bound"]),
        ({"means": "global", "trust": "secure"}, "trust", ["target_epsilon"]),
        ({"means": "global", "target_epsilon": 1.0, "honest": 2}, "honest", ["site"]),
        ({"target_epsilon": 1.0}, "target_epsilon", ["means"]),
        ({"trust": "server"}, "trust", ["means"]),
        ({"centre": "prior", "mechanism": "single_release"}, "centre", ["single_release"]),
        ({"centre": "prior", "means": "global"}, "centre", ["prior"]),
        ({"centre": "wrong", "mechanism": "prior"}, "centre", ["prior"]),
        ({"centre": "wrong", "mechanism": "none"}, "centre", ["none"]),
        ({"centre": "wrong", "n_classes": 1}, "centre", ["n_classes"]),
        ({"centre": "prior", "noise": "sensitivity"}, "centre", ["sensitivity"]),
        ({"keep": "all", "mechanism": "public_filter"}, "keep", ["public_filter"]),
    ],
)
def test_combinations_that_make_no_sense_are_refused_in_one_sentence(settings, setting, facts):
    with refused(setting, *facts):
        resolve(FedDPMS(**settings))


def test_global_means_are_released_once_a_class_and_recipients_draw_with_sigma_itself():
    resolved = resolve(FedDPMS(means="global", sigma=0.3))
    assert resolved.mechanism == "single_release"
    assert resolved.public_std == 0.3
    assert resolve(resolved).mechanism == "single_release"  # as a run that is resumed reads it
    with refused("release_sigma"):
        resolve(FedDPMS(mechanism="single_release", sigma=0.3))


@pytest.mark.parametrize("wrong", [0, -1, "all"])
@pytest.mark.parametrize("setting", ["n_classes", "alpha", "n_assistants"])
def test_numbers_below_one_and_unknown_words_are_refused(setting, wrong):
    with pytest.raises(ValueError, match=setting):
        FedDPMS(**{setting: wrong})


def test_a_scripted_federation_agrees_before_it_shares():
    weights = {"encoder.w": torch.tensor([0.0]), "classifier.w": torch.tensor([0.0]), "decoder.w": torch.tensor([0.0])}
    server, engine = scripted(clients=3, weights=weights)
    algorithm = FedDPMS(preliminary_rounds=1, n_classes="auto", alpha="auto", latent_bound="sigmoid")
    server.state = type(server.state)(algorithm.server_state(weights))
    like = {name: weights[name] for name in ("encoder.w", "classifier.w")}
    engine.script = {
        "preliminary_client": lambda i, m, t: PreliminaryReply(like, 1, {"decoder.w": weights["decoder.w"]}),
        "skew": lambda i, m, t: Skew([3, 2, 5][i], [40, 20, 60][i]),
        "secondary_client": lambda i, m, t: SecondaryReply(like, 1, False, None, []),
    }
    for t in range(3):
        server.begin(t)
        algorithm.round(server, t)
    assert [(handler, t) for t, handler, _, _ in engine.sent if handler == "skew"] == [("skew", 1)] * 3
    agreed = [m.agreed for _, handler, _, m in engine.sent if handler == "secondary_client"]
    assert agreed == [[2, 2]] * 6  # the least of 3, 2 and 5 classes, and a tenth of 40 records on each of them


def test_a_recipient_decodes_again_until_nothing_is_missing_and_gets_the_decoder_once(monkeypatch):
    """Decoding is free: the sum was released once."""
    rounds = []

    def grudging(model, centre, std, label, *, quota, **_):
        rounds.append(label)
        return (centre.expand(quota if len(rounds) > 8 else 1, -1), quota)  # 4 clients lack 2 classes each

    monkeypatch.setattr("fedfill.synthesis.noisy_means.accepted_codes", grudging)
    server = run_rounds(FedDPMS(**GLOBAL), 4)
    assert len(rounds) == 16
    assert [sorted(note.get("acceptance", {})) for note in server.history] == [[], list("0123"), list("0123"), []]
    assert all(len(state["synthetic"]) == 2 * 5 for state in server.client_states.values())
    assert all(state["decoder"] is None for state in server.client_states.values())
    assert server.costs.legs["code_sums"][1] == 4 * (4 * 16 * 4 + 4 * 4)
    model, decoder = (
        4 * sum(x.numel() for name in names for x in part(server.initial, name).values())
        for names in (("encoder", "classifier"), ("decoder",))
    )
    means = 4 * 8 + 4 * 8 + 4 * 16 * 4
    assert server.costs.legs["secondary_client"][0] == 3 * 4 * (model + 2) + 4 * decoder + 2 * 4 * means
