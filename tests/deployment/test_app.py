"""The app of a deployment: what is written, what its two programs make of it, and its README, word for word."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import tomli_w
import torch
from flwr.app import Context, RecordDict
from PIL import Image
from tests.helpers import refused
from typer.testing import CliRunner

from fedfill import __version__
from fedfill.algorithms.fedavg import FedAvg
from fedfill.cli import app as cli
from fedfill.data.federation import ClientData
from fedfill.data.samples import Samples
from fedfill.data.sources import load
from fedfill.deployment import programs
from fedfill.deployment.app import PACKAGE, _sent, init_app, write_app
from fedfill.deployment.host_data import FORMATS, Task, save_host
from fedfill.deployment.programs import HOST, SERVER, read_app, read_task
from fedfill.errors import FedfillError
from fedfill.experiment.prepare import arrange
from fedfill.protocol.client import client_handler
from fedfill.runs.directory import RunDirectory, write_atomically

FILES = {
    "README.md",
    "pyproject.toml",
    f"{PACKAGE}/__init__.py",
    f"{PACKAGE}/client_app.py",
    f"{PACKAGE}/server_app.py",
    f"{PACKAGE}/experiment.toml",
    f"{PACKAGE}/task.toml",
}


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return init_app(tmp_path / "app", "fedavg", clients=2, rounds=3, local_epochs=1)


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1, text
    path.write_text(text.replace(before, after))


# ---- what is written


def test_an_app_says_all_that_its_parties_need(app: Path) -> None:
    assert written(app) == FILES
    assert read_task(app / PACKAGE) == Task("digits", 2, tuple("0123456789"), (1, 8, 8))
    prepared = read_app(app / PACKAGE)
    assert prepared.algorithm == FedAvg(local_epochs=1)
    assert prepared.experiment.clients == 2
    assert prepared.experiment.rounds == 3
    assert prepared.experiment.engine == "flower"
    assert [len(client.train) for client in prepared.federation.clients] == [0, 0], "nobody's data"
    project = tomllib.loads((app / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == ["flwr>=1.41,<1.42"]
    settings = project["tool"]["flwr"]["app"]
    assert settings["components"] == {
        "serverapp": f"{PACKAGE}.server_app:app",
        "clientapp": f"{PACKAGE}.client_app:app",
    }
    assert programs._given(settings["config"], SERVER, "run-config")["app"] == str(app)


def test_all_parties_come_to_the_same_digest_and_a_change_to_another(app: Path) -> None:
    digest = read_app(app / PACKAGE).digest
    assert read_app(app / PACKAGE).digest == digest
    edit(app / PACKAGE / "experiment.toml", "min_replies = 1", "min_replies = 2")
    assert read_app(app / PACKAGE).digest == digest, "this changes no result"
    edit(app / PACKAGE / "experiment.toml", "learning_rate = 0.001", "learning_rate = 0.002")
    assert read_app(app / PACKAGE).digest != digest
    edit(app / PACKAGE / "experiment.toml", "learning_rate = 0.002", "learning_rate = 0.001")
    edit(app / PACKAGE / "task.toml", '"9"', '"nine"')
    assert read_app(app / PACKAGE).digest != digest


def test_classes_and_shape_of_ones_own(tmp_path: Path) -> None:
    place = init_app(
        tmp_path / "app",
        "feddpms",
        class_names=["healthy", "ill"],
        shape=(1, 28, 28),
        data="x-rays",
        name="clinics-1st",
    )
    assert read_task(place / PACKAGE) == Task("x-rays", 3, ("healthy", "ill"), (1, 28, 28))
    prepared = read_app(place / PACKAGE)
    assert prepared.federation.classes == 2
    project = tomllib.loads((place / "pyproject.toml").read_text())
    assert project["project"]["name"] == "clinics-1st"


@pytest.mark.parametrize(
    ("options", "setting", "facts"),
    [
        ({"class_names": ["a", "b"]}, "class-names and shape", ()),
        ({"shape": (1, 8, 8)}, "class-names and shape", ()),
        ({"class_names": ["a", "a"], "shape": (1, 8, 8)}, "class_names", ("['a', 'a']",)),
        ({"class_names": ["a", "b"], "shape": (1, -8, 8)}, "shape", ("[1, -8, 8]",)),
        ({"data": "digit"}, "data", ("'digit'", "'digits'")),
        ({"name": "Clinics' 1st"}, "name", ("'Clinics' 1st'", "hyphens")),
        ({"clients": 0}, "clients", (0, "at least 1")),
        ({"learning_rat": 1}, "setting", ("fedavg", "'learning_rat'", "'learning_rate'")),
        ({"min_replies": 4}, "min_replies", (4, 3)),
        ({"test_fraction": 0}, "test_fraction", ("found 0", "client_test")),
    ],
)
def test_a_slip_writes_nothing(
    tmp_path: Path, options: dict[str, Any], setting: str, facts: tuple[object, ...]
) -> None:
    with refused(setting, *facts):
        init_app(tmp_path / "app", "fedavg", **options)
    assert not (tmp_path / "app").exists()


def test_an_app_is_written_into_a_new_folder_only(app: Path, tmp_path: Path) -> None:
    before = {name: (app / name).read_bytes() for name in FILES}
    with refused("deploy init", "/app", "not empty"):
        init_app(app, "fedavg")
    assert {name: (app / name).read_bytes() for name in FILES} == before
    (tmp_path / "file").write_text("here already")
    with refused("deploy init", "/file", "not empty"):
        init_app(tmp_path / "file", "fedavg")
    (tmp_path / "empty").mkdir()
    assert written(init_app(tmp_path / "empty", "fedavg")) == FILES


def test_the_app_of_a_rehearsal_is_written_anew(tmp_path: Path) -> None:
    prepared = arrange("fedavg", data="digits", partition="iid", model="auto", clients=2, engine="flower")
    task = Task.of(prepared.federation)
    for _ in range(2):
        write_app(tmp_path, prepared.experiment, task, name="r", server={"out": "x"})
        assert written(tmp_path) == FILES - {"README.md"}
        # the fingerprint stands for the data, so that hosts and server agree with whoever started them
        assert read_app(tmp_path / PACKAGE).digest == prepared.digest
        (tmp_path / PACKAGE / "left.py").write_text("from another rehearsal")


def test_a_network_and_an_algorithm_of_ones_own_are_part_of_the_digest(app: Path) -> None:
    class Mine(FedAvg):
        """FedAvg."""

        name = "of_an_app"

        def global_weights(self, server: Any) -> Any:
            return dict(server.state.weights)

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    plain, own = read_app(app / PACKAGE), read_app(app / PACKAGE, algorithm=Mine, model=net)
    assert isinstance(own.algorithm, Mine)
    assert (own.experiment.algorithm, own.experiment.model) == ("of_an_app", "python:Sequential")
    assert len({plain.digest, own.digest, read_app(app / PACKAGE, algorithm=Mine).digest}) == 3


# ---- what is read


@pytest.mark.parametrize(
    ("file", "before", "after", "setting", "facts"),
    [
        ("experiment.toml", "rounds = 3", "rounds = 0", "rounds", (0, "at least 1")),
        ("experiment.toml", "rounds = 3", "round = 3", "experiment.toml", ("'round'", "'rounds'")),
        ("experiment.toml", "rounds = 3", "rounds = ", "config", ("experiment.toml", "not TOML")),
        ("experiment.toml", "clients = 2", "clients = 3", "clients", ("3 in experiment.toml", "2 in task.toml")),
        ("experiment.toml", 'algorithm = "fedavg"', 'algorithm = "fedav"', "algorithm", ("'fedav'", "'fedavg'")),
        ("experiment.toml", __version__, "0.0.0", "version", ("0.0.0", __version__)),
        ("task.toml", "clients = 2", "clients = 3", "clients", ("2 in experiment.toml", "3 in task.toml")),
        ("task.toml", "clients = 2", "hosts = 2", "task.toml", ("'hosts'", "allowed: ")),
        ("task.toml", "clients = 2", "", "task.toml", ("name, clients, class_names and shape",)),
        ("task.toml", "clients = 2", "clients = true", "clients", (True, "a whole number")),
        ("task.toml", 'dtype = "uint8"', 'dtype = "int8"', "dtype", ("'int8'", "uint8, float32")),
        ("task.toml", '    "9",', '    "8",', "class_names", ("'8', '8'",)),
        ("task.toml", '    "9",', "    9,", "class_names", ("'8', 9",)),
        ("task.toml", "    1,", "    0,", "shape", ("[0, 8, 8]",)),
        ("task.toml", 'name = "digits"', "name = 3", "name", (3,)),
    ],
)  # fmt: skip
def test_a_slip_in_an_edited_file_is_one_sentence(
    app: Path, file: str, before: str, after: str, setting: str, facts: tuple[object, ...]
) -> None:
    edit(app / PACKAGE / file, before, after)
    with refused(setting, *facts):
        read_app(app / PACKAGE)


def test_a_missing_file_is_one_sentence(app: Path) -> None:
    (app / PACKAGE / "task.toml").unlink()
    with refused("config", "task.toml", "No such file"):
        read_app(app / PACKAGE)


def test_the_server_may_have_a_test_set_of_its_own(app: Path, tmp_path: Path) -> None:
    place = tmp_path / "test.safetensors"
    test = load("digits").test
    save_host(place, ClientData(test, test[:0]))
    prepared = read_app(app / PACKAGE, test=(str(place), "safetensors"))
    assert torch.equal(prepared.federation.test.inputs, test.inputs)
    assert prepared.digest == read_app(app / PACKAGE).digest, "a host has no test set and must agree"
    with refused("test-data", "/nowhere"):
        read_app(app / PACKAGE, test=("/nowhere", "parquet"))


def test_a_server_that_can_t_write_its_log_says_so(app: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = {**SERVER, "out": str(tmp_path / "out"), "log": str(tmp_path / "file" / "server.log")}
    with refused("out", "can't write", "server.log"):
        programs._serve(app / PACKAGE, None, config, None, None)  # type: ignore[arg-type]


def test_a_server_has_a_key_for_its_noise_beside_the_run_directory(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Callable[[], bytes] | None] = []

    def noted(*arguments: Any) -> Any:
        found.append(arguments[-1])
        raise FedfillError("enough")

    monkeypatch.setattr(programs, "execute", noted)
    for out, noise in (("a/run", "secret"), ("a/other", "secret"), ("b/run", "secret"), ("c/run", "seed")):
        with pytest.raises(FedfillError, match="enough"):
            programs._serve(app / PACKAGE, None, {**SERVER, "out": str(tmp_path / out), "noise": noise}, None, None)  # type: ignore[arg-type]
    assert SERVER["noise"] == "secret"
    *secret, none = found
    assert none is None
    assert not list(tmp_path.rglob("*noise.key")), "it is made where an algorithm asks for it"
    keys = {make() for make in secret if make is not None}
    assert len(keys) == 3, "no two runs draw the same cohorts"
    place = tmp_path / "a" / "run.noise.key"
    assert place.stat().st_mode & 0o777 == 0o600
    assert not keys & {place.read_bytes()}, "another experiment has another one"

    def again() -> bytes:
        with pytest.raises(FedfillError, match="enough"):
            programs._serve(app / PACKAGE, None, {**SERVER, "out": str(tmp_path / "a/run")}, None, None)  # type: ignore[arg-type]
        assert found[-1] is not None
        return found[-1]()

    assert again() in keys
    write_atomically(tmp_path / "a" / "run" / "checkpoint" / "state.safetensors", b"")
    assert again() in keys, "a run that goes on has the key of before"
    place.unlink()
    with refused("noise", "run.noise.key", "gone"):
        again()
    place.write_bytes(b"")
    with refused("noise", "0 bytes", "32"):
        again()
    with refused("noise", "none"):
        programs._serve(app / PACKAGE, None, {**SERVER, "out": str(tmp_path / "d/run"), "noise": "none"}, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "setting", "facts"),
    [
        ({"state_dir": "x"}, "node-config", ("'state_dir'", "'state-dir'")),
        ({"client": "0"}, "client", ("'0'", "a whole number")),
        ({"client": 1.0}, "client", (1.0, "a whole number")),
        ({"client": True}, "client", (True, "a whole number")),
        ({"data": 3}, "data", (3, "text")),
        ({"max-message-bytes": 1.5}, "max-message-bytes", (1.5, "a whole number")),
    ],
)
def test_a_slip_in_a_host_s_settings(config: dict[str, Any], setting: str, facts: tuple[object, ...]) -> None:
    with refused(setting, *facts):
        programs._given(config, HOST, "node-config")


def test_settings_that_are_left_out_have_defaults() -> None:
    assert programs._given({"wait": 5}, SERVER, "run-config") == {**SERVER, "wait": 5}
    assert programs._given({}, HOST, "node-config") == HOST
    with refused("wait", "5"):
        programs._given({"wait": "5"}, SERVER, "run-config")


# ---- a host


def site(app: Path, **config: Any) -> Any:
    context = Context(run_id=1, node_id=5, node_config=config, state=RecordDict(), run_config={})
    return programs._site(read_app(app / PACKAGE), read_task(app / PACKAGE), context)


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """The node configuration of a host with forty digits."""
    place = tmp_path / "digits.safetensors"
    own = load("digits").train[:40]
    with_test = ClientData(own, own[:0])
    save_host(place, with_test)
    return {"data": str(place), "format": "safetensors", "state-dir": str(tmp_path / "state")}


def test_a_host_brings_its_data_and_secret_noise(app: Path, data: dict[str, Any]) -> None:
    found = site(app, client=1, **data)
    assert (found.client, found.classes, len(found.data.train)) == (1, 10, 40)
    assert found.secret, "noise is nobody else's business unless the host says so"
    assert found.digest == read_app(app / PACKAGE).digest
    assert Path(data["state-dir"], "fedfill.log").exists()
    assert not site(app, client=1, noise="seed", **data).secret


def test_a_host_keeps_as_many_labels_as_the_experiment_says(
    app: Path, data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    semi = init_app(tmp_path / "semi", "fedavg", clients=2, rounds=3, local_epochs=1, labelled_per_client=12)
    whole, part = site(app, client=1, **data).data, site(semi, client=1, **data).data
    assert (len(whole.train), len(whole.unlabelled)) == (40, 0)
    assert (len(part.train), len(part.unlabelled)) == (12, 28)
    assert read_app(semi / PACKAGE).digest != read_app(app / PACKAGE).digest
    divided = arrange("fedavg", data="digits", partition="iid", model="auto", clients=2, labelled_per_client=12)
    for i, client in enumerate(divided.federation.clients):
        own = site(semi, **{"partition-id": i, "num-partitions": 2}).data
        assert torch.equal(own.train.inputs, client.train.inputs)
        assert torch.equal(own.unlabelled.inputs, client.unlabelled.inputs)


def test_a_host_of_a_rehearsal_may_take_a_part_of_a_known_data_set(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    parts = [site(app, **{"partition-id": i, "num-partitions": 2}) for i in range(2)]
    whole = arrange("fedavg", data="digits", partition="iid", model="auto", clients=2)
    for part, client in zip(parts, whole.federation.clients, strict=True):
        assert torch.equal(part.data.train.inputs, client.train.inputs)
    with refused("num-partitions", "3", "2"):
        site(app, **{"partition-id": 0, "num-partitions": 3})
    assert parts[0].folder == tmp_path / ".fedfill" / "node-5"


@pytest.mark.parametrize(
    ("config", "setting", "facts"),
    [
        ({}, "client", (-1, "0 to 1", "--node-config")),
        ({"client": 2}, "client", (2, "0 to 1")),
        ({"client": 0}, "data", ("none", "--node-config")),
        ({"client": 0, "noise": "none"}, "noise", ("'none'", "secret, seed")),
        ({"client": 0, "data": "/nowhere"}, "data", ("'/nowhere'", "train*.parquet")),
        ({"client": 0, "data": ".", "format": "parket"}, "format", ("'parket'", "'parquet'")),
        ({"client": 0, "device": "tpu"}, "device", ("'tpu'",)),
        ({"client": 0, "state-dir": "/dev/null/state"}, "state-dir", ("can't write", "/dev/null/state")),
    ],
)
def test_a_slip_of_a_host_is_one_sentence(
    app: Path, data: dict[str, Any], config: dict[str, Any], setting: str, facts: tuple[object, ...]
) -> None:
    with refused(setting, *facts) as caught:
        site(app, **({**data, **config} if {"device", "state-dir"} & config.keys() else config))
    assert "\n" not in str(caught.value)


def test_a_class_that_was_not_agreed_on_is_one_sentence(app: Path, tmp_path: Path) -> None:
    for name in ("1", "one"):
        (tmp_path / "own" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "own" / name / "0.png")
    with refused("data", "/own", "one"):
        site(app, client=0, data=str(tmp_path / "own"), format="images")


# ---- the README, word for word


def test_the_readme_names_every_file_and_setting_that_there_is(app: Path) -> None:
    text = (app / "README.md").read_text()
    for name in re.findall(rf"`{PACKAGE}/([\w.]+)`", text):
        assert (app / PACKAGE / name).exists()
    for setting in re.findall(r"`([a-z-]+)=", text) + re.findall(r"([a-z-]+)=\"", text):
        assert setting in HOST, setting
    assert "`client` is 0 to 1," in text
    for word in FORMATS:
        assert f"`{word}`" in text


@pytest.mark.parametrize(
    ("algorithm", "options", "sentences"),
    [
        ("fedavg", {"client_test": 0.0}, ["`Update.weights`: model update, sent as it is"]),
        (
            "semifl", {"labelled_per_client": 5},
            ["`Labelled.samples`: the client's labelled samples themselves: raw data leave it", "how a model does on the host's own test split: right answers"],
        ),
        ("feddpms", {"n_classes": 1}, ["`SecondaryReply.shared.codes`: the run's account says how it is made"]),
    ],
)  # fmt: skip
def test_the_readme_says_what_leaves_a_host_and_how_to_rehearse(
    algorithm: str, options: dict[str, Any], sentences: list[str], tmp_path: Path
) -> None:
    kept: dict[str, Any] = {"gpus_per_worker": 0.0, "reply_timeout": None}  # a run's experiment.toml has these too
    text = (
        init_app(tmp_path / "app", algorithm, clients=3, local_epochs=2, engine="flower", **kept, **options)
        / "README.md"
    ).read_text()
    for sentence in sentences:
        assert sentence in text
    assert ("own test" in text) == (options.get("client_test") != 0.0)
    (command,) = re.findall(r"`(fedfill deploy rehearse .*)`", text)
    assert f"rehearse {algorithm} --clients 3 --set local_epochs=2" in command
    called = CliRunner().invoke(cli, [*shlex.split(command)[1:], "--rounds", "0"])
    assert "rounds: found 0; allowed" in called.stderr, "everything else is understood"


def test_what_a_handler_without_an_annotation_replies_is_listed_as_unknown() -> None:
    class Plain:
        @client_handler
        def tell(self, client, message):  # type: ignore[no-untyped-def]
            """Say anything."""

    prepared = SimpleNamespace(algorithm=Plain(), experiment=SimpleNamespace(client_test=0.0, client_validation=None))
    assert _sent(prepared).startswith("* what `tell` replies; its code says what that is\n")  # type: ignore[arg-type]


class Walk:
    """Somebody who follows the README in a home folder of their own, with free ports and localhost for the server."""

    def __init__(self, app: Path, home: Path) -> None:
        self.app = app
        self.home = home
        text = (app / "README.md").read_text().replace("server.example.org", "localhost")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            text = text.replace("8000", str(probe.getsockname()[1]))
        self.shell = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        (self.toml,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
        (self.register,) = re.findall(r"`(flwr supernode register [^`]+)`", text)
        self.started: list[subprocess.Popen[bytes]] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLWR_", "FEDFILL_"))}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {**kept, "HOME": str(home), "PATH": path, "OMP_NUM_THREADS": "1"}
        self.environment |= dict(re.findall(r"(FLWR_\w+)=(\w+)", self.shell[1]))

    def do(self, words: str, folder: Path, patience: float = 60) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", words], cwd=folder, env=self.environment, text=True, timeout=patience,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def start(self, words: str, folder: Path, name: str) -> subprocess.Popen[bytes]:
        # the last command takes the shell's place, so that a kill reaches it
        words = re.sub(r"^(flower-)", r"exec \1", words, flags=re.MULTILINE)
        with (folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", words], cwd=folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def stop(self) -> None:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            for process in self.started:
                if process.poll() is None:
                    os.killpg(process.pid, kind)
            deadline = time.monotonic() + 10
            while any(process.poll() is None for process in self.started) and time.monotonic() < deadline:
                time.sleep(0.1)


@pytest.fixture
def walk(tmp_path: Path) -> Iterator[Walk]:
    place = init_app(tmp_path / "app", "fedavg", clients=2, rounds=2, local_epochs=1)
    home = tmp_path / "home"
    home.mkdir()
    walk = Walk(place, home)
    try:
        yield walk
    finally:
        walk.stop()


def give_data(folder: Path, samples: Samples, images: bool) -> None:
    pictures = [Image.fromarray(image[0].numpy()) for image in samples.inputs]
    labels = samples.labels.tolist()
    folder.mkdir(parents=True)
    if images:
        for k, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
            if label in (3, 4, 7):
                (folder / str(label)).mkdir(exist_ok=True)
                picture.save(folder / str(label) / f"{k}.png")
        return
    names = datasets.ClassLabel(names=list("0123456789"))
    features = datasets.Features({"image": datasets.Image(), "label": names})
    datasets.Dataset.from_dict({"image": pictures, "label": labels}, features).to_parquet(str(folder / "train.parquet"))


@pytest.mark.faults
def test_the_readme_leads_from_nothing_to_a_federation_and_past_a_kill_of_the_superlink(walk: Walk) -> None:
    certificates, server, key, node, run = walk.shell
    walk.do(certificates, walk.app)
    walk.do("openssl verify -x509_strict -CAfile ca.crt server.crt", walk.app / "keys")
    superlink = walk.start(server, walk.app, "superlink")
    flower = walk.home / ".flwr"
    flower.mkdir()
    (flower / "config.toml").write_text(walk.toml.replace("keys/ca.crt", str(walk.app / "keys" / "ca.crt")))
    digits = load("digits").train
    for i, form in enumerate(["parquet", "images"]):
        host = walk.home / f"host{i}"
        give_data(host / "own data", digits[200 * i : 200 * i + 200], images=form == "images")
        (host / "ca.crt").write_bytes((walk.app / "keys" / "ca.crt").read_bytes())
        walk.do(key, host)
        assert {path.name for path in host.iterdir()} == {"own data", "ca.crt", "node.key", "node.pub"}
        register = walk.register.replace("node.pub", str(host / "node.pub"))
        walk.do(f"until {register}; do sleep 1; done", walk.app)  # the SuperLink takes a second or two to come up
        words = node.replace("/path/to/data", str(host / "own data")).replace("/var/lib/fedfill", str(host / "state"))
        words = words.replace("client=0", f"client={i}").replace('format="parquet"', f'format="{form}"')
        with socket.socket() as probe:  # one machine here, and two hosts
            probe.bind(("127.0.0.1", 0))
            words = words.replace("--node-config", f"--port {probe.getsockname()[1]} --node-config")
        walk.start(words, host, "node")

    out = walk.home / ".fedfill" / "runs" / "app"
    follower = walk.start(run, walk.app, "run")
    deadline = time.monotonic() + 150
    while not (out / "rounds.jsonl").exists():
        assert time.monotonic() < deadline, (walk.app / "run.log").read_text()
        assert follower.poll() is None, (walk.app / "run.log").read_text()
        time.sleep(0.1)
    time.sleep(2)  # into the second round
    superlink.kill()
    superlink.wait()
    follower.wait(60)
    assert "round 1/2, accuracy" in (walk.app / "run.log").read_text()
    assert RunDirectory(out).summary() is None

    walk.start(server, walk.app, "superlink")
    # until the SuperLink answers, and the server's program of before has given up
    said = walk.do(f"until fedfill resume {out}; do sleep 1; done", walk.app, 200)
    assert "Rounds 1 to 1 had been done before; the run went on from there." in said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["lost_replies"] == 0
    assert len(RunDirectory(out).rounds()) == 2
    assert all(accuracy is not None for accuracy in summary["accuracy_by_client"])
    assert "round 2/2" in (out / "deployment" / "server.log").read_text()
    assert all(list((walk.home / f"host{i}" / "state").glob("client-*.safetensors")) for i in range(2))
    assert tomllib.loads((out / "deployment.toml").read_text()) == {"app": str(walk.app), "connection": "federation"}
    assert "finished before" in walk.do(f"fedfill resume {out}", walk.app)
    # a slip is the last thing that Flower says, and no traceback hides it
    project = tomllib.loads((walk.app / "pyproject.toml").read_text())
    project["tool"]["flwr"]["app"]["config"]["test-data"] = "/nowhere"
    (walk.app / "pyproject.toml").write_bytes(tomli_w.dumps(project).encode())
    said = walk.do(run, walk.app)
    assert "test-data: there is no '/nowhere'; it should be a folder with train*.parquet" in said
    assert "Traceback" not in said or "File" not in said, said
