"""Who and what a federation of real processes refuses: strangers, wrong certificates, replies whose time is over.

Each refusal stands beside its opposite, the same act by somebody who may: so it is this that is refused, and no mishap.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import tomli_w
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from tests.deployment.nodes import PlayedNode, activation, comes_online, played_node
from tests.deployment.test_processes import running
from tests.deployment.test_rehearsal import TINY, bars
from tests.engines import in_process  # lets this process make Flower's messages
from tests.helpers import refused

from fedfill.algorithms import Update
from fedfill.deployment import commands, processes
from fedfill.deployment.app import PACKAGE, write_app
from fedfill.deployment.host_data import Task, save_host
from fedfill.deployment.keys import make_certificate, make_node_key
from fedfill.deployment.processes import LocalFederation, local_federation
from fedfill.deployment.programs import client_app
from fedfill.engines import flower
from fedfill.engines.flower_messages import Answer, encode, pack, unpack
from fedfill.experiment.prepare import arrange
from fedfill.runs.directory import RunDirectory

assert in_process

pytestmark = pytest.mark.deploy
PATIENCE = 90.0


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """A SuperLink over TLS that knows no node yet."""
    folder = tmp_path_factory.mktemp("federation") / "flower"
    with local_federation(folder, []) as federation:
        yield federation
    assert not running(folder)


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificate of an authority that has nothing to do with the federation, but for its name."""
    folder = tmp_path_factory.mktemp("another")
    make_certificate(folder)
    return folder / "ca.crt"


def wait_for(what: Callable[[], object], why: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.1)


# Strangers


def test_a_node_that_nobody_registered_is_refused_until_somebody_does(federation: LocalFederation) -> None:
    folder = federation.folder
    make_node_key(folder / "node0")
    for name, key in {"stranger": folder / "node0.key", "nameless": None}.items():
        there, log = comes_online(federation, name, key, folder / "ca.crt")
        assert not there, name
        assert "Exit Code: 305" in log
    assert federation._flwr("supernode", "list", federation.connection)["nodes"] == []
    federation._register(0)
    there, log = comes_online(federation, "registered", folder / "node0.key", folder / "ca.crt")
    assert there, log


def test_a_node_is_not_taken_for_one_whose_secret_key_it_lacks(federation: LocalFederation) -> None:
    registered, another = federation.folder / "node5", federation.folder / "another"
    for path in (registered, another):
        make_node_key(path)
    federation._register(5)
    assert activation(federation, claimed=registered, held=another) == httpx.codes.UNAUTHORIZED
    assert activation(federation, claimed=registered, held=registered) == httpx.codes.OK


def test_a_node_does_not_speak_with_a_superlink_whose_certificate_is_another_authority_s(
    federation: LocalFederation, another: Path
) -> None:
    folder = federation.folder
    make_node_key(folder / "node1")
    federation._register(1)
    there, log = comes_online(federation, "deceived", folder / "node1.key", another)
    assert not there
    assert "CERTIFICATE_VERIFY_FAILED" in log
    there, log = comes_online(federation, "careful", folder / "node1.key", folder / "ca.crt")
    assert there, log


def test_a_command_does_not_speak_with_a_superlink_whose_certificate_is_another_authority_s(
    federation: LocalFederation, another: Path, tmp_path: Path
) -> None:
    def ask(authority: Path) -> None:
        connection = {"address": federation._address, "root-certificates": str(authority)}
        (tmp_path / "config.toml").write_bytes(tomli_w.dumps({"superlink": {"local": connection}}).encode())
        commands.flwr("supernode", "list", "local", environment=commands.environment_of(tmp_path))

    with refused("engine", "flwr supernode", "unavailable"):
        ask(another)
    ask(federation.folder / "ca.crt")
    port = int(federation._address.rpartition(":")[2])
    assert not processes._answers(port, another), "a port that somebody else took is no SuperLink of ours"
    assert processes._answers(port, federation.folder / "ca.crt")


# Replies whose time is over

ASKING = {
    "pyproject.toml": """
[project]
name = "asking"
version = "1.0.0"
dependencies = ["flwr>=1.41"]
[tool.flwr.app]
publisher = "fedfill"
components = { serverapp = "asking:server", clientapp = "asking:client" }
config = { out = "", node = "" }
""",
    "asking.py": """
import json
import time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()

@server.main()
def main(grid, context):
    out, node = Path(context.run_config["out"]), int(context.run_config["node"])

    def ask(what, ttl):
        return list(grid.push_messages([Message(RecordDict(), node, "query." + what, ttl=ttl)]))

    def heard(names):
        return [m.content["said"]["word"] if m.has_content() else m.error.code for m in grid.pull_messages(names)]

    def until(file):
        while not (out / file).exists():
            time.sleep(0.1)

    told = {}
    for what, ttl in (("twice", 60.0), ("again", 60.0), ("late", 3.0)):
        names = ask(what, ttl)
        if what == "again":
            told["first"] = []
            while not told["first"]:
                told["first"] = heard(names)
            (out / "heard").touch()
        until(what)
        told[what] = [word for _ in range(3) for word in heard(names)]
    (out / "told.part").write_text(json.dumps(told))
    (out / "told.part").rename(out / "told")
""",
}


def say(node: PlayedNode, message: Message, word: str) -> bool:
    return node.send(Message(RecordDict({"said": ConfigRecord({"word": word})}), reply_to=message))


def test_a_second_reply_and_a_late_one_are_not_taken_by_the_superlink(
    federation: LocalFederation, tmp_path: Path
) -> None:
    app, out = tmp_path / "app", tmp_path / "out"
    for folder in (app, out):
        folder.mkdir()
    for name, text in ASKING.items():
        (app / name).write_text(text)
    with played_node(federation, 2) as node:
        federation.submit(app, {"out": str(out), "node": str(node.id)})

        def next_message() -> Message:
            found: list[Message] = []

            def look() -> bool:
                found.extend(message for message in [node.receive()] if message is not None)
                return bool(found)

            wait_for(look, "the server asked nothing")
            return found[0]

        message = next_message()  # two replies before the server looks
        assert say(node, message, "good")
        assert not say(node, message, "bad"), "a message has one reply"
        (out / "twice").touch()
        message = next_message()  # another one after it looked
        assert say(node, message, "good")
        wait_for((out / "heard").exists, "the server heard nothing")
        assert not say(node, message, "bad"), "and not another one later"
        (out / "again").touch()
        message = next_message()  # one after the message's time
        time.sleep(4)
        assert not say(node, message, "bad"), "nobody waits for it any more"
        (out / "late").touch()
        wait_for((out / "told").exists, "the server did not come to its end")
    told = json.loads((out / "told").read_text())
    assert told["first"] == ["good"]
    assert told["twice"].count("good") == 1
    words = [word for heard in told.values() for word in heard]
    assert "bad" not in words, told


def test_a_reply_for_a_round_that_is_over_does_not_count_in_the_next(
    federation: LocalFederation, tmp_path: Path
) -> None:
    """Two hosts, the second of which answers the first round in the second one, with weights that would be seen."""
    data, path, app = bars()[:2], tmp_path / "run", tmp_path / "app"
    options = {**TINY, "rounds": 2, "reply_timeout": 5}
    prepared = arrange("fedavg", data=data, partition="iid", model="auto", engine="flower", **options)
    test = tmp_path / "test.safetensors"
    save_host(test, prepared.federation.clients[0])
    server = {"out": str(path), "test-data": str(test), "test-format": "safetensors"}
    write_app(app, prepared.experiment, Task.of(prepared.federation), name="stale", server=server)
    program = app / PACKAGE / "server_app.py"
    impatient = "from fedfill.engines import flower\nflower.GRACE = 5.0\n"
    program.write_text(program.read_text().replace("app = server_app", f"{impatient}app = server_app"))
    host = client_app(app / PACKAGE)

    with ExitStack() as stack:
        nodes = [stack.enter_context(played_node(federation, 3 + i)) for i in range(2)]
        contexts = []
        for i, (node, own) in enumerate(zip(nodes, prepared.federation.clients, strict=True)):
            save_host(tmp_path / f"host{i}.safetensors", own)
            config = {
                "client": i, "data": str(tmp_path / f"host{i}.safetensors"), "format": "safetensors",
                "state-dir": str(tmp_path / f"state{i}"), "noise": "seed",
            }  # fmt: skip
            contexts.append(Context(0, node.id, config, RecordDict(), {}))
        run = federation.submit(app)
        stale: list[Message] = []
        trainings = [0, 0]

        def serve() -> bool:
            for i, node in enumerate(nodes):
                message = node.receive()
                if message is None:
                    continue
                contexts[i].run_id = run
                reply = host(message, contexts[i])
                if message.metadata.message_type == "train.train":
                    trainings[i] += 1
                    if (i, trainings[i]) == (1, 1):
                        answer, _ = unpack(reply.content, 2**30)
                        weights = {name: torch.full_like(w, 1000) for name, w in answer.reply.weights.items()}
                        poisoned = Answer(Update(weights, answer.reply.samples))
                        stale.append(Message(pack(encode(poisoned)), reply_to=message))
                        continue
                    if (i, trainings[i]) == (1, 2):
                        assert len(RunDirectory(path).rounds()) == 1, "the first round is over"
                        assert node.send(stale[0]), "the SuperLink still takes it; the server's program does not"
                        time.sleep(5 * flower.POLL)  # it has looked by now
                assert node.send(reply)
            return RunDirectory(path).summary() is not None

        wait_for(serve, "the run did not come to its end")
    assert trainings == [2, 2]
    first, second = RunDirectory(path).rounds()
    assert first["lost"] == [{"client": 1, "handler": "train", "reason": "no answer within 10 s"}]
    assert second["lost"] == []
    assert first["train_samples"] == len(data[0][0])
    assert second["train_samples"] == len(data[0][0]) + len(data[1][0])
    checkpoint = RunDirectory(path).read_checkpoint()
    assert checkpoint is not None
    assert all(float(w.abs().max()) < 100 for w in checkpoint["weights"].values() if w.is_floating_point())
