"""Attacks on releases without a guarantee: hand-made ones of which the truth is known, and algorithms end to end."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import fedfill
from fedfill.cli.audits import without_guarantee
from fedfill.data.samples import Samples
from fedfill.privacy.risk import wilson
from fedfill.privacy.scores import advantage, told_apart
from fedfill.protocol.messages import Message
from fedfill.studies.auditing import exchanged
from fedfill.studies.auditing.bare import alike, nearest_told, samples_in
from fedfill.studies.auditing.exchanged import exchange
from fedfill.studies.auditing.replays import Call, Replayer
from fedfill.training.fit import LocalTraining

D = 5


@dataclass(frozen=True)
class Said(Message):
    """A reply with anything in its field."""

    x: object
    n: object = None


class Program:
    """An algorithm of one handler."""

    def __init__(self, handler):
        self.handler = handler

    def client_state(self):
        return {}

    def ask(self, client, message):
        return self.handler(client)


def rows(n, seed, classes=2):
    stream = torch.Generator().manual_seed(seed)
    return Samples(torch.randn(n, D, generator=stream), torch.arange(n) % classes)


def attacked(handler, names=("Said.x",), state=None, others=None):
    call = Call(0, "ask", Said(0), 0, state)
    replayer = Replayer(Program(handler), torch.nn.Linear(D, 2), {}, 2)
    return exchange(replayer, [(call, names)], rows(30, 0), rows(60, 1) if others is None else others, 0).document()


def field_of(found, name="Said.x"):
    (one,) = [one for one in found["fields"] if one["field"] == name]
    return one


def test_a_mean_without_noise_tells_with_certainty():
    one = field_of(attacked(lambda client: Said(client.data.inputs.mean(0))))
    assert not one["random"]
    assert one["advantage"] == one["picked"] == 1
    assert one["moving"] == one["exchanged"] == exchanged.TRIED


@pytest.mark.parametrize("std", [1e-4, 1e3])
def test_noise_hides_a_record_or_it_does_not(std):
    def handler(client):
        noise = torch.randn(D, generator=client.stream("noise"))
        return Said(client.data.inputs.double().mean(0) + std * noise.double())

    one = field_of(attacked(handler))
    low, high = one["interval"]
    assert one["random"]
    if std < 1:
        assert one["advantage"] == one["picked"] == 1
        assert low > 0.8
    else:
        assert low <= 0 <= high
        assert abs(one["advantage"]) < 0.35


def test_the_advantage_is_that_of_the_noise():
    """Of two means that lie mu deviations apart, the best attacker has 2 Phi(mu / 2) - 1 (0.38 at mu 1)."""
    step = torch.zeros(D)
    step[0] = 30.0
    others = rows(60, 1)
    others = Samples(torch.zeros_like(others.inputs) + step, others.labels)

    def handler(client):
        jumps = (client.data.inputs[:, 0] == 30).sum()
        return Said(jumps + torch.randn(1, generator=client.stream("noise")))

    one = field_of(attacked(handler, others=others))
    assert one["advantage"] == pytest.approx(0.38, abs=0.25)
    assert one["interval"][0] < 0.38 < one["interval"][1]


def test_what_does_not_depend_on_a_record_is_told_to_be_the_same():
    found = attacked(lambda client: Said(torch.randn(3, generator=client.stream("noise")), len(client.data)), ("Said.x", "Said.n"))  # fmt: skip
    assert found["fields"] == []
    assert found["unmoved"] == ["Said.n", "Said.x"]
    assert found["kept"] == []


def test_records_that_a_field_does_not_depend_on_are_left_out():
    one = field_of(attacked(lambda client: Said(client.data.inputs[client.data.labels == 0].sum(0))))
    assert 0 < one["moving"] < one["exchanged"]
    assert one["advantage"] == 1


def test_rows_in_any_order_are_told_by_their_sums():
    """Rows of half of the records each, drawn anew each time: their weighted sum is that of all."""

    def handler(client):
        x = client.data.inputs.double()
        order = torch.randperm(len(x), generator=client.stream("order"))
        parts = [x[order[:10]], x[order[10:]]]
        return Said(torch.stack([part.mean(0) for part in parts]), torch.tensor([10 + 0.0 * x[0, 0], len(x) - 10]))

    found = attacked(handler, ("Said.x", "Said.n"))
    assert found["unmoved"] == ["Said.n"]  # so it is no part of the sums

    def with_sizes(client):
        x = client.data.inputs.double()
        order = torch.randperm(len(x), generator=client.stream("order"))
        at = 5 + int(torch.randint(20, (), generator=client.stream("cut"))) + int(x.sum() > 0)
        parts = [x[order[:at]], x[order[at:]]]
        sizes = torch.tensor([float(at), len(x) - float(at)]).double() + 1e-9 * x.sum()
        return Said(torch.stack([part.mean(0) for part in parts]), sizes)

    found = attacked(with_sizes, ("Said.x", "Said.n"))
    assert field_of(found, "Said.n, Said.x weighted by one another")["advantage"] > 0.9
    assert field_of(found)["advantage"] < 0.6


def test_a_release_whose_length_noise_decides_is_scored():
    def handler(client):
        n = 1 + int(torch.randint(3, (), generator=client.stream("length")))
        return Said(client.data.inputs.mean(0).expand(n, -1).clone())

    assert field_of(attacked(handler))["advantage"] > 0.9


def test_what_training_makes_is_not_called_harmless():
    def fitted(client):
        return Said(client.fit({"weight": torch.zeros(2, D)}, None, LocalTraining()).weights)

    def batches(client):
        list(client.batches(LocalTraining()))
        return Said(torch.ones(2))

    def steps(client):
        x = torch.nn.Parameter(torch.zeros(2))
        x.grad = torch.ones(2)
        torch.optim.SGD([x], 0.1).step()
        return Said(torch.ones(2))

    assert attacked(fitted)["trained"] == ["Said.x"]
    for handler in (batches, steps):
        found = attacked(handler)
        assert "training of its own" in found["untried"]["Said.x"]
        assert found["unmoved"] == []


def test_what_a_client_kept_may_hold_the_record():
    found = attacked(lambda client: Said(client.state.images), state={"images": torch.ones(2, D)})
    assert found["unmoved"] == found["kept"] == ["Said.x"]
    said = " ".join(words(found))
    assert "may hold the record" in said
    assert "The same whichever record" not in said


def words(found):
    bare = {"released": ["Said.x"], "membership": None, "of": "the final model", "classes_told": None, "samples": None}
    return list(without_guarantee({**bare, "exchanged": found}))


def test_why_nothing_was_scored_is_told(monkeypatch):
    def broken(client):
        raise KeyError("a field")

    assert "KeyError" in attacked(broken)["untried"]["Said.x"]
    elsewhere = Samples(torch.zeros(3, D), torch.full((3,), 7))
    found = attacked(lambda client: Said(client.data.inputs), others=elsewhere)
    assert "no new record of a class" in " ".join(words(found))
    monkeypatch.setattr(exchanged, "LONGEST", -1.0)
    said = " ".join(words(attacked(lambda client: Said(client.data.inputs.mean(0)))))
    assert "no field could be scored" in said
    assert "long in the making" in said


def test_an_advantage_is_worded_by_its_sign():
    found = attacked(lambda client: Said(client.data.inputs.mean(0)))
    found["fields"][0] |= {"random": True, "advantage": -0.1, "interval": [-0.2, 0.004]}
    assert "hits 10 points below false alarms (95 %: -20 to 0)" in " ".join(words(found))


def test_certainty_is_said_in_words():
    said = " ".join(words(attacked(lambda client: Said(client.data.inputs.mean(0)))))
    assert "Said.x: tells it with certainty" in said
    assert "Said.x 100 %" in said
    assert "by chance 10 %" in said


def test_advantage_is_hits_less_false_alarms():
    found, (low, high) = advantage(60, 100, 40, 100)
    assert found == pytest.approx(0.2)
    assert (low, high) == pytest.approx((0.0614, 0.3292), abs=2e-3)  # Newcombe's method 10
    assert advantage(10, 10, 0, 10)[1][0] < 1
    assert wilson(0.0, 20) == pytest.approx((0, 0.1611), abs=1e-4)
    assert told_apart(np.ones(20), np.zeros(20))[0] == 1


def test_members_and_others_are_of_the_same_classes():
    data = Samples(torch.zeros(9, 1), torch.tensor([0] * 6 + [1] * 3))
    others = Samples(torch.ones(7, 1), torch.tensor([1] * 2 + [2] * 2 + [0] * 3))
    members, new = alike(data, others)
    assert sorted(members.labels.tolist()) == sorted(new.labels.tolist()) == [0, 0, 0, 1, 1]
    assert members.labels[:4].tolist() == [0, 1, 0, 1]
    assert members.inputs.sum() == 0
    assert new.inputs.sum() == 5


def images(n, seed):
    stream = torch.Generator().manual_seed(seed)
    return Samples(torch.randint(0, 256, (n, 1, 4, 4), generator=stream).to(torch.uint8), torch.arange(n) % 2)


def test_copies_among_released_images_are_found_and_new_images_are_not():
    data, test = images(60, 0), images(60, 1)
    copies = nearest_told(data.inputs, data, test)
    assert copies["membership"]["advantage"] == 1
    assert copies["nearness"] == {"times": 0, "share_below": 1}
    new = nearest_told(images(60, 2).inputs, data, test)
    low, high = new["membership"]["interval"]
    assert low <= 0 <= high
    assert new["nearness"]["times"] == pytest.approx(1, abs=0.1)
    assert nearest_told(data.inputs, data, test[:3])["membership"] is None


def test_samples_of_the_task_are_known_by_type_and_shape():
    like = images(1, 0).inputs
    some = images(3, 0)
    for value in (some, some.inputs, [some.inputs], Said(some)):
        (found,) = samples_in(value, like)
        assert torch.equal(found, some.inputs)
    for value in (some.inputs.float(), {"w": some.inputs}, some.inputs[:0], None, torch.zeros(3, 4, dtype=torch.uint8)):
        assert list(samples_in(value, like)) == []
    assert list(samples_in(torch.zeros(3, 1), torch.zeros(3, 1))) == []  # a row of numbers may be anything


SMALL = {"clients": 4, "data_fraction": 0.2, "partition": "classes:3"}


def bare_of(name, **words):
    found = fedfill.audit(name, **SMALL, **words)
    document = found.document["without_guarantee"]
    said = " ".join(without_guarantee(document))
    return document, said


def test_shared_codes_of_feddpms_as_in_the_paper():
    document, said = bare_of(
        "feddpms", mechanism="paper", rounds=3, alpha=3, max_candidates=30, preliminary_rounds=2, local_epochs=3
    )
    exchanged = document["exchanged"]
    known = {one["field"] for one in exchanged["fields"]} | set(exchanged["untried"])
    assert "SecondaryReply.shared.codes" in known | set(exchanged["trained"])
    assert "SecondaryReply.weights" in exchanged["trained"]
    assert document["samples"] is None or document["samples"]["of"] == "all clients"
    assert "better than by a coin" not in said


def test_mixtures_of_features_tell_by_their_sums(monkeypatch):
    monkeypatch.setattr(exchanged, "LONGEST", 60.0)
    document, said = bare_of("fedpft", components=2, head_steps=20, features="project(6) > unit")
    together = [one for one in document["exchanged"]["fields"] if one["field"].endswith("weighted by one another")]
    assert together[0]["advantage"] > 0.9
    assert "One record exchanged" in said


def test_sums_without_noise():
    document, said = bare_of("fed3r", features="project(6) > unit")
    assert field_of(document["exchanged"], "Sums.sums")["advantage"] == 1
    assert "Sums.sums: tells it with certainty" in said


def test_images_of_a_gan():
    document, said = bare_of("sdafl", images_per_client=12, gan_iterations=2)
    assert document["samples"]["of"] == "the client"
    assert document["samples"]["released"] == 12
    assert document["samples"]["nearness"]["times"] > 1
    assert "Images.inputs" in document["exchanged"]["kept"]
    assert "Membership by released samples" in said


def test_a_reply_of_another_length_than_those_before_has_their_figures():
    """Noise may decide how many rows there are, and seldom: the first repeats don't show it."""

    def reply(count):
        return Said(torch.arange(2.0 * count).reshape(count, 2))

    view = exchanged._Release(None, None, ["Said.x"])
    view.steady([reply(3), reply(3)])
    assert [len(view.figures(reply(count))["Said.x"]) for count in (0, 2, 3, 5)] == [6, 6, 6, 6]
    view.steady([reply(3), reply(2)])  # from here on the mean row
    assert view.figures(reply(2))["Said.x"].tolist() == [1.0, 2.0]
    assert view.figures(reply(0))["Said.x"].tolist() == [0.0, 0.0]
