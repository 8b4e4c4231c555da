"""The Ray engine: the bits of the local one for any number of workers, and what holds when workers die."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ray
import torch
from tests import helpers
from tests.engines.pooled_ray import PooledEngine, connect
from tests.helpers import refused
from torch import Tensor, nn

from fedfill import tree
from fedfill.algorithms import Algorithm
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.feddpms import FedDPMS
from fedfill.algorithms.fedmix import FedMix
from fedfill.algorithms.scaffold import Scaffold
from fedfill.algorithms.sdafl import SDAFL
from fedfill.data.federation import ClientData, Federation
from fedfill.data.samples import Samples
from fedfill.engines import ray as module
from fedfill.engines.local import LocalEngine
from fedfill.engines.ray import RayEngine
from fedfill.engines.runner import make_resident
from fedfill.errors import ContractError
from fedfill.models.views import weights_of
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message, RemoteError
from fedfill.protocol.server import Server
from fedfill.tree import Tree, Weights

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ask(Message):
    """`deadly`: how often a client kills its worker; `folder`: where it is written down who was served."""

    folder: str = ""
    seconds: float = 0.0
    deadly: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer(Message):
    weights: dict[str, Tensor] | None
    samples: int
    pid: int


class Unsendable(Exception):
    def __init__(self, lock: Any) -> None:
        super().__init__("boom")
        self.lock = lock


class Program(Algorithm):
    def client_state(self) -> dict[str, Any]:
        return {"count": 0, "walk": torch.zeros(3)}

    @client_handler
    def work(self, client: Client, ask: Ask) -> Answer:
        client.state.count += 1
        client.state.walk = client.state.walk + torch.rand(3, generator=client.stream("step"))
        if ask.folder:
            log = Path(ask.folder) / f"{client.round}-{client.id}"
            before = len(log.read_text()) if log.exists() else 0
            log.write_text("x" * (before + 1))
            if before < ask.deadly.get(client.id, 0):
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(ask.seconds)
        return Answer({"walk": client.state.walk * client.id}, len(client.data), os.getpid())

    @client_handler
    def hang(self, client: Client, ask: Ask) -> Answer:
        if client.id in ask.deadly:
            ctypes.PyDLL(None).sleep(3600)  # with the interpreter's lock
        return Answer(None, 0, os.getpid())

    @client_handler
    def fail(self, client: Client, ask: Ask) -> Answer:
        raise Unsendable(threading.Lock())

    @client_handler
    def write_into_data(self, client: Client, ask: Ask) -> Answer:
        client.data.inputs.zero_()
        return Answer(None, 0, 0)

    @client_handler
    def remember_pairs(self, client: Client, ask: Ask) -> Answer:
        client.state.pairs = {(1, 2): 3}
        return Answer(None, 0, 0)


P = Program()


class Personal(Program):
    personal: ClassVar[bool] = True

    def personal_weights(self, state: Mapping[str, Tree], weights: Weights) -> Weights:
        return {**weights, "bias": state["walk"][:2] - 0.5} if state else weights


def federation(clients: int) -> Federation:
    """Client i has 1 to 5 training samples and every other client a test split."""
    members = []
    for i in range(clients):
        samples = Samples(torch.full((i % 5 + 1, 2), i - 3.0), torch.arange(i % 5 + 1) % 2)
        members.append(ClientData(samples, samples[: i % 2]))
    return Federation("points", tuple(members), members[-1].train, ("a", "b"), (), "")


class World:
    """An engine and its server."""

    def __init__(self, kind: type, clients: int, program: Algorithm = P, **options: Any) -> None:
        data = federation(clients)
        self.model = nn.Linear(2, 2)
        nn.init.eye_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        initial = weights_of(self.model)
        self.clients = clients
        self.engine: Any = kind(program, data, self.model, initial, seed=3, device=CPU, **options)
        self.server = Server(
            self.engine, clients=clients, classes=2, rounds=99, participation=0.5, seed=3, initial=initial,
            resident=make_resident(self.model, CPU), sample=data.sample,
        )  # fmt: skip

    def round(self, t: int, ask: Ask | None = None, cohort: list[int] | None = None) -> tuple[str, dict[int, Answer]]:
        """The digest of everything that came of a call to a cohort, and the replies."""
        self.server.begin(t)
        cohort = list(range(self.clients)) if cohort is None else cohort
        like = {"weights": {"walk": torch.zeros(3)}}
        replies, means = self.server.average(cohort, P.work, ask or Ask(), of=like, by="samples")
        states = torch.frombuffer(bytearray(tree.to_bytes(self.engine.states())), dtype=torch.uint8)
        return tree.sha256(means["weights"] | {"states": states}), replies


@pytest.fixture
def start() -> Iterator[Callable[..., World]]:
    """A function (kind, clients, ...) -> world."""
    worlds: list[World] = []

    def starter(kind: type, clients: int, **options: Any) -> World:
        worlds.append(World(kind, clients, **options))
        return worlds[-1]

    yield starter
    for world in worlds:
        world.engine.close()


def local_digests(clients: int, rounds: int) -> list[str]:
    world = World(LocalEngine, clients, workers=1)
    digests = [world.round(t)[0] for t in range(rounds)]
    world.engine.close()
    return digests


# The same bits


QUICK = {"local_epochs": 2, "batch_size": 8}


@pytest.mark.parametrize(
    ("algorithm", "rounds"),
    [
        (FedAvg(**QUICK), 2),
        (FedDPMS(**QUICK, lr_decay=1.0, n_classes=2, alpha=5, sigma=1.0, preliminary_rounds=2), 4),
        (Scaffold(**QUICK, optimizer="sgd"), 3),
        (FedMix(**QUICK, group_size=8, local="moon:contrast=latent", aggregation="qffl", optimizer="sgd"), 3),
        (SDAFL(**helpers.TINY_GAN, images_per_client=6, local_steps=4, batch_size=8, server_steps=2, tau=0.1), 3),
    ],
    ids=["fedavg", "feddpms", "scaffold", "fedmix with moon and qffl", "sdafl"],
)
def test_any_number_of_workers_gives_the_bits_of_the_local_engine(
    monkeypatch: pytest.MonkeyPatch, algorithm: Algorithm, rounds: int
) -> None:
    def outcome(workers: int) -> tuple[Any, ...]:
        server = helpers.run_rounds(algorithm, rounds, workers=workers, participation=0.5)
        return (
            tree.sha256(server.state.weights),
            server.evaluation,
            tree.to_bytes(server.client_states),
            server.costs.legs,
        )

    expected = outcome(2)
    monkeypatch.setattr(helpers, "LocalEngine", PooledEngine)
    for workers in (1, 2, 3):
        assert outcome(workers) == expected


@pytest.mark.parametrize("workers", [1, 3])
def test_more_clients_than_groups(start: Callable[..., World], workers: int) -> None:
    local, other = start(LocalEngine, 150, workers=2), start(PooledEngine, 150, workers=workers)
    for t in range(3):
        cohort = other.server.select(t)
        assert other.round(t, cohort=cohort)[0] == local.round(t, cohort=cohort)[0]
    weights = weights_of(local.model)
    assert other.engine.evaluate(weights, 0) == local.engine.evaluate(weights, 0)


def test_workers_share_the_clients_and_more_than_groups_are_not_started(start: Callable[..., World]) -> None:
    world = start(PooledEngine, 2, workers=3)
    assert world.engine.workers == 2
    replies = world.round(0, Ask(seconds=0.2))[1]
    assert len({reply.pid for reply in replies.values()}) == 2


def test_states_go_from_engine_to_engine(start: Callable[..., World]) -> None:
    expected = local_digests(5, 4)
    engines = [LocalEngine, PooledEngine, PooledEngine, LocalEngine]
    kept: bytes | None = None
    for t, kind in enumerate(engines):
        world = start(kind, 5, workers=2)
        world.round(7)  # what is there is replaced
        world.engine.restore({} if kept is None else tree.from_bytes(kept))
        assert world.round(t)[0] == expected[t]
        kept = tree.to_bytes(world.engine.states())


def test_a_message_to_all_is_encoded_once(start: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    world = start(PooledEngine, 100, workers=2)
    packed: list[Any] = []
    pack = module.pack
    monkeypatch.setattr(module, "pack", lambda thing: packed.append(thing) or pack(thing))
    ask = Ask()
    world.round(0, ask)
    assert packed == [ask]


# Errors


def test_an_error_comes_as_words_with_its_traceback(start: Callable[..., World]) -> None:
    world = start(PooledEngine, 2, workers=1)
    with pytest.raises(ContractError, match="'fail'") as caught:
        world.server.call([0, 1], P.fail, Ask())
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError)
    assert str(cause) == "Unsendable: boom"
    assert "in fail\n    raise Unsendable(threading.Lock())" in cause.__notes__[0]
    assert world.server.lost[0]["reason"] == "Unsendable: boom"
    assert len(world.round(0)[1]) == 2


@pytest.mark.parametrize(("handler", "fact"), [(P.write_into_data, "wrote into"), (P.remember_pairs, "tuple")])
def test_what_is_not_allowed_ends_the_run(start: Callable[..., World], handler: Any, fact: str) -> None:
    world = start(PooledEngine, 2, workers=1)
    with pytest.raises(ContractError, match=fact):
        world.server.call([0, 1], handler, Ask())


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "ray://127.0.0.1:1"])
def test_a_wrong_address(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with refused("ray_address", f"'{address}'", "allowed: auto"):
        World(RayEngine, 2, address=address)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"workers": 5}, (5, "4 CPUs")),
        ({"gpus_per_worker": 0.5}, (0.5, "4 workers", "0 GPUs")),
        ({"gpus_per_worker": 1.5}, (1.5, "up to 1", "a whole number")),
    ],
)
def test_more_than_there_is(options: dict[str, Any], facts: tuple[object, ...]) -> None:
    connect()
    with refused(*options, *facts):
        World(PooledEngine, 6, **{"workers": 4, **options})


def test_a_cuda_device_needs_a_share_of_a_gpu() -> None:
    with refused("gpus_per_worker", "0", "cuda"):
        RayEngine(P, federation(2), nn.Linear(2, 2), {}, seed=0, device=torch.device("cuda"))


def test_what_workers_cannot_import(tmp_path: Path) -> None:
    connect()
    (tmp_path / "hidden_module.py").write_text(
        "from fedfill.algorithms import Algorithm\nclass Hidden(Algorithm): pass\n"
    )
    spec = importlib.util.spec_from_file_location("hidden_module", tmp_path / "hidden_module.py")
    assert spec is not None
    assert spec.loader is not None
    hidden = sys.modules["hidden_module"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hidden)
    with refused("engine", "load", "'hidden_module'"):
        PooledEngine(hidden.Hidden(), federation(2), nn.Linear(2, 2), {}, seed=0, device=CPU, workers=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray looks at every attribute to say which it was
def test_what_cannot_be_sent_to_workers() -> None:
    lock = threading.Lock()

    class Locked(Algorithm):
        @client_handler
        def wait(self, client: Client, ask: Ask) -> Answer:
            with lock:
                return Answer(None, 0, 0)

    with refused("engine", "sent", "lock"):
        PooledEngine(Locked(), federation(2), nn.Linear(2, 2), {}, seed=0, device=CPU, workers=1)


# Deaths


def served(folder: Path, t: int) -> dict[int, int]:
    return {int(log.name.split("-")[1]): len(log.read_text()) for log in folder.glob(f"{t}-*")}


def pids(world: World) -> list[int]:
    """The processes that are ready to work."""
    ready = [worker.actor for worker in world.engine._workers if worker.ready]
    return ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in ready])


def test_a_worker_that_is_killed_at_any_moment(start: Callable[..., World]) -> None:
    clients, moments = 8, 10
    expected = local_digests(clients, moments)
    world = start(PooledEngine, clients, workers=2)
    for t in range(moments):
        killer = threading.Timer(0.4 * t / moments, os.kill, (pids(world)[t % -2], signal.SIGKILL))
        killer.start()
        digest, replies = world.round(t, Ask(seconds=0.1))  # eight clients on two workers take 0.4 seconds
        killer.join()
        assert digest == expected[t]
        assert len(replies) == clients
        assert world.server.lost == []
    assert world.engine.workers == 2


def test_a_worker_that_is_killed_between_rounds(start: Callable[..., World]) -> None:
    expected = local_digests(4, 2)
    world = start(PooledEngine, 4, workers=2)
    assert world.round(0)[0] == expected[0]
    before = world.engine.evaluate(weights_of(world.model), 0)
    os.kill(pids(world)[0], signal.SIGKILL)
    assert world.engine.evaluate(weights_of(world.model), 0) == before
    assert world.round(1)[0] == expected[1]


@pytest.mark.parametrize("clients", [4, 200])
def test_personal_models_are_judged_where_their_states_are(
    start: Callable[..., World], monkeypatch: pytest.MonkeyPatch, clients: int
) -> None:
    """Half of the clients have a state; then a worker dies, and the time for a call says nothing about an evaluation."""
    local = start(LocalEngine, clients, program=Personal())
    world = start(PooledEngine, clients, program=Personal(), workers=2, timeout=60)
    weights = weights_of(world.model)
    for t, cohort in enumerate((range(0, clients, 2), range(0, clients, 3))):
        local.round(t, cohort=list(cohort))
        world.round(t, cohort=list(cohort))
        assert repr(world.engine.evaluate(weights, t)) == repr(local.engine.evaluate(weights, t))
    found = local.engine.evaluate(weights, 1)
    assert len(set(found.accuracy_by_client)) > 2
    os.kill(pids(world)[0], signal.SIGKILL)
    assert repr(world.engine.evaluate(weights, 1)) == repr(found)
    monkeypatch.setattr("fedfill.engines.ray_pool.GRACE", -1e6)
    assert repr(world.engine.evaluate(weights, 1)) == repr(found)


@pytest.mark.parametrize("clients", [4, 200])
def test_a_death_costs_only_the_group_that_was_being_served(
    start: Callable[..., World], tmp_path: Path, clients: int
) -> None:
    """Of 200 clients 4, 5 and 6 are a group; 6 is served only when each of them is alone."""
    (expected,) = local_digests(clients, 1)
    world = start(PooledEngine, clients, workers=2)
    digest, _ = world.round(0, Ask(str(tmp_path), deadly={3 if clients == 4 else 5: 1}))
    assert digest == expected
    assert world.server.lost == []
    again = {i: times for i, times in served(tmp_path, 0).items() if times > 1}
    assert again == ({3: 2} if clients == 4 else {4: 2, 5: 2})


def test_clients_of_one_group_on_several_workers_at_once(start: Callable[..., World], tmp_path: Path) -> None:
    """Alone after a death, each runs where there is room; in the next round nobody goes on from an old state."""
    local, world = start(LocalEngine, 200, workers=1), start(PooledEngine, 200, workers=3)
    cohort = [4, 5, 6]
    for t in range(3):
        ask = Ask(str(tmp_path), seconds=0.2, deadly={4: 1} if t == 0 else {})
        assert world.round(t, ask, cohort)[0] == local.round(t, cohort=cohort)[0]


def test_a_client_over_which_workers_always_die_is_left_out(start: Callable[..., World], tmp_path: Path) -> None:
    """The others' mean is what the local engine makes of the others, and a later round is as if nothing had been."""
    local, world = start(LocalEngine, 200, workers=2), start(PooledEngine, 200, workers=2)
    others = [i for i in range(200) if i != 5]
    digest, replies = world.round(0, Ask(str(tmp_path), deadly={5: 99}))
    assert digest == local.round(0, cohort=others)[0]
    assert sorted(replies) == others
    assert world.server.lost == [{"client": 5, "handler": "work", "reason": "its worker died twice"}]
    assert Counter(served(tmp_path, 0).values()) == {1: 198, 2: 2}
    assert world.round(1)[0] == local.round(1)[0]


def test_a_client_that_hangs_for_good_is_late(start: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfill.engines.ray_pool.GRACE", 1.0)
    world = start(PooledEngine, 8, workers=2, timeout=0.5)
    replies = world.server.call([2, 3, 4, 7], P.hang, Ask(deadly={3: 1}))
    assert list(replies) == [2, 4, 7]
    assert world.server.lost == [{"client": 3, "handler": "hang", "reason": "took longer than reply_timeout=0.5 s"}]


def test_survivors_take_over_from_what_cannot_be_started_again(
    start: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = local_digests(4, 2)
    world = start(PooledEngine, 4, workers=2)
    monkeypatch.setattr("fedfill.engines.ray_pool.START", 0.01)
    monkeypatch.setattr(world.engine, "_process", lambda: RayEngine._process(world.engine))
    os.kill(pids(world)[0], signal.SIGKILL)
    assert world.round(0, Ask(seconds=0.1))[0] == expected[0]
    assert world.engine.workers == 1
    os.kill(pids(world)[0], signal.SIGKILL)
    with refused("engine", "workers died", "'fedfill resume'"):
        world.round(1)


# A process of its own


SCRIPT = Path(__file__).with_name("ray_script.py")


def run_and_stop(how: signal.Signals, folder: Path, *arguments: str) -> tuple[str, str]:
    """What a script prints that is stopped in the middle of a call; the worker that served it must be gone then."""
    ready = folder / "ready"
    with subprocess.Popen(
        [sys.executable, SCRIPT, folder, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as script:  # fmt: skip
        try:
            while not ready.exists() and script.poll() is None:
                time.sleep(0.05)
            os.killpg(script.pid, how)  # all of its group, as a terminal does
            printed = script.communicate(timeout=60)
        finally:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while lives(ready.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not lives(ready.read_text())
    return printed


def lives(pid: str) -> bool:
    """Whether there is such a process, and it's not a dead one whose parent hasn't noticed."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_script_with_a_ray_of_its_own_and_an_interrupt(tmp_path: Path) -> None:
    """Classes of the script itself, a dead worker and Ctrl-C, without a word of Ray's."""
    printed = run_and_stop(signal.SIGINT, tmp_path)
    assert printed == ("same bits True, lost []\ninterrupted\nconnected False\n", "")


def test_a_cluster_is_joined_and_left_running(start: Callable[..., World], tmp_path: Path) -> None:
    connect()
    printed = run_and_stop(signal.SIGTERM, tmp_path, ray.get_runtime_context().gcs_address)
    assert printed == ("same bits True, lost []\nterminated\nconnected False\n", "")
    assert start(PooledEngine, 2, workers=1).round(0)[0] == local_digests(2, 1)[0]
