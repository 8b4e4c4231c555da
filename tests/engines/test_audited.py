"""An engine that is looked through: the same bits without canaries, and whole replies in client order with a watch."""

import pytest
import torch
from tests.helpers import CLASSES, small_federation

from fedfill import tree
from fedfill.algorithms import find
from fedfill.engines.audited import AuditedEngine
from fedfill.engines.local import LocalEngine
from fedfill.engines.runner import make_resident
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.protocol.client import State
from fedfill.protocol.server import Server


class Seen:
    def __init__(self):
        self.asked, self.fields = [], []

    def before(self, client, handler, message, t, state):
        self.asked.append((t, client, handler, state is not None))

    def after(self, client, outcome):
        self.fields.append(outcome.reply.weights is not None)


def ran(name, watch=None, audited=True, **settings):
    federation = small_federation()
    kind = find(name)
    net = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), needs=(), seed=0)
    algorithm = kind(batch_size=8, local_epochs=1, **settings).resolved(
        rounds=2, model=net, inputs=federation.test.inputs[:1]
    )
    initial = weights_of(net)
    inner = LocalEngine(algorithm, federation, net, initial, seed=0, device=torch.device("cpu"), workers=2)
    engine = AuditedEngine(inner, 4, watch=watch) if audited else inner
    server = Server(
        engine, clients=4, classes=CLASSES, rounds=2, participation=1.0, seed=0, initial=initial,
        resident=make_resident(net, torch.device("cpu")), sample=federation.sample,
    )  # fmt: skip
    server.state = State(algorithm.server_state(initial))
    for t in range(2):
        server.begin(t)
        algorithm.round(server, t)
    found = tree.sha256(algorithm.result_weights(server)), server.costs.bytes_up, server.ledger.account()
    engine.close()
    return found


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "dpfedavg"])
def test_without_canaries_no_bit_of_a_run_changes(name):
    plain = ran(name, audited=False)
    assert ran(name) == plain
    assert ran(name, Seen()) == plain


def test_a_watch_sees_every_call_whole_and_in_order():
    seen = Seen()
    ran("fedavg", seen)
    assert [(t, client) for t, client, _, _ in seen.asked] == [(t, i) for t in range(2) for i in range(4)]
    assert all(seen.fields)  # though the server asked for their mean alone


def test_what_is_set_on_it_is_set_on_the_engine():
    class Inner:
        workers, evaluation, evaluated, origin = 1, None, (), ""

    inner = Inner()
    engine = AuditedEngine(inner, 1)
    engine.origin, engine.workers = "run", 3
    assert (inner.origin, inner.workers, engine.evaluated) == ("run", 3, ())
