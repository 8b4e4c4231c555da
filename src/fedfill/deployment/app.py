"""The app folder of a deployment: what Flower ships to every party, and how to start each of them."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from fedfill.data.schema import read_schema
from fedfill.deployment.host_data import Task
from fedfill.errors import FedfillError
from fedfill.experiment.loop import document_of
from fedfill.experiment.prepare import Prepared, arrange
from fedfill.experiment.settings import SIMULATION, Experiment
from fedfill.protocol.messages import Message, declarations
from fedfill.runs.directory import write_atomically, writing

PACKAGE = "federation"
"""The folder in an app with its code and its two tables of settings."""

_SIDE = '''"""{what} of this federation; Flower ships this folder to every party."""

from pathlib import Path

from fedfill.deployment.programs import {side}_app

# A network or an algorithm of your own, the same at every party: {side}_app(..., model=Net(), algorithm=MyAlgorithm)
app = {side}_app(Path(__file__).parent)
'''


def init_app(
    folder: Path,
    algorithm: str,
    *,
    name: str = "federation",
    class_names: Sequence[str] | None = None,
    shape: Sequence[int] | None = None,
    data: str = "digits",
    **options: Any,
) -> Path:
    """Write the app of a new deployment, ready to be edited and run.

    Args:
        folder: New or empty.
        algorithm: A name of ``fedfill list algorithms``.
        name: Of the app, and of the connection to its SuperLink.
        class_names: What all hosts call their classes, in order; None: as in `data`.
        shape: Of one image, such as ``(1, 28, 28)``; None: as in `data`.
        data: A known data set that looks like the hosts' data; with `class_names` and `shape` only a name.
        **options: As for `fedfill.run`.

    Returns:
        The folder.

    Raises:
        FedfillError: Where an option is not allowed, or the folder is not empty.
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9-]*", name) is None:
        raise FedfillError(f"name: found '{name}'; allowed: small letters, digits and hyphens")
    if (class_names is None) != (shape is None):
        raise FedfillError(
            "class-names and shape: one is given and one is not; allowed: both, or a --data that has them"
        )
    if options.get("start_from") is not None:
        raise FedfillError(
            f"start_from: found {options['start_from']}, a folder that the parties of a deployment don't have; allowed: the run's weights "
            "as a file that all of them have under one name, with model.weights"
        )
    if (test_fraction := options.get("test_fraction")) is not None:
        raise FedfillError(
            f"test_fraction: found {test_fraction}, and no host gives samples to a test set of all; allowed: none, and client_test for "
            "each host's own"
        )
    given = {"clients": 3, **options}
    options = {"partition": "iid", "model": "auto", **given, "engine": "flower"}
    if options.get("schema_file") is not None:
        # the app holds the schema itself, and the hosts have no such file
        schema = read_schema(options.pop("schema_file"))
        given.pop("schema_file")
        task = Task.by(schema, data, int(options["clients"]))
    elif class_names is not None and shape is not None:
        task = Task(data, int(options["clients"]), tuple(class_names), tuple(shape))
    else:
        divided = arrange(algorithm, data=data, **options).federation
        task = replace(Task.of(divided), fingerprint="")
    prepared = arrange(algorithm, data=data, federation=task.remote(), **options)
    for what, word in prepared.experiment.own.items():
        raise FedfillError(
            f"{what}: found {word}, a file that the parties of a deployment don't have; allowed: a name, and then the class given to "
            "server_app and client_app in the app's two programs"
        )
    place = folder.resolve()
    server = {
        "out": f"~/.fedfill/runs/{place.name}",
        "test-data": "",
        "test-format": "parquet",
        "wait": 300.0,
        "app": str(place),
        "connection": name,
    }
    stand_in = {"data": data, **given} if class_names is None and data != "digits" else given
    text = _readme(prepared, task, name, _rehearsal(algorithm, stand_in))
    write_app(place, prepared.experiment, task, name=name, server=server, readme=text)
    return place


def write_app(
    folder: Path, experiment: Experiment, task: Task, *, name: str, server: Mapping[str, Any], readme: str = ""
) -> None:
    """Write an app that Flower can run.

    Args:
        folder: New or empty; an app of a rehearsal is written anew.
        experiment: What to run, its settings resolved.
        task: What all parties agreed on.
        name: Of the app and of the connection to its SuperLink.
        server: The server's settings, ``[tool.flwr.app.config]``.
        readme: What people are told; empty for a rehearsal.

    Raises:
        FedfillError: Where the folder is not empty or can't be written.
    """
    with writing(folder):
        if readme and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FedfillError(f"deploy init: '{folder}' is not empty; choose a new folder")
        shutil.rmtree(folder / PACKAGE, ignore_errors=True)
    project = {
        "project": {
            "name": name,
            "version": "1.0.0",
            "description": f"{experiment.algorithm} on {task.clients} hosts, with fedfill",
            # fedfill itself is installed on every host beforehand: Flower installs nothing
            "dependencies": ["flwr>=1.41,<1.42"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedfill",
                    "components": {
                        "serverapp": f"{PACKAGE}.server_app:app",
                        "clientapp": f"{PACKAGE}.client_app:app",
                    },
                    "config": dict(server),
                }
            }
        },
    }
    files = {
        "pyproject.toml": tomli_w.dumps(project),
        f"{PACKAGE}/__init__.py": '"""The parties\' programs and what they agree on."""\n',
        f"{PACKAGE}/server_app.py": _SIDE.format(what="The server's program", side="server"),
        f"{PACKAGE}/client_app.py": _SIDE.format(what="A host's program", side="client"),
        f"{PACKAGE}/experiment.toml": tomli_w.dumps(document_of(experiment)),
        f"{PACKAGE}/task.toml": tomli_w.dumps(task.document()),
    }
    if readme:
        files["README.md"] = readme
    for path, text in files.items():
        write_atomically(folder / path, text.encode())


def _rehearsal(algorithm: str, options: Mapping[str, Any]) -> str:
    """The command that runs the same on stand-in data."""
    words = ["fedfill", "deploy", "rehearse", algorithm]
    for name, value in options.items():
        # a network of one's own, and what is not given, can't be told there
        if name in SIMULATION or not isinstance(value, str | int | float | Path):
            continue
        if name in Experiment.model_fields:
            words += [f"--{name.replace('_', '-')}", str(value)]
        else:
            words += ["--set", f"{name}={value}"]
    return shlex.join(words)


def _sent(prepared: Prepared) -> str:
    """What a host may send, a line for each: the fields of its replies with the words of the ledger."""
    # here: without Flower there is a sentence, and no traceback
    from fedfill.engines.flower_messages import handlers_of

    lines: dict[str, None] = {}
    for handler, (_, reply) in handlers_of(prepared.algorithm).items():
        if not (
            isinstance(reply, type) and issubclass(reply, Message)
        ):  # an algorithm of one's own that does not say what it replies
            lines[f"* what `{handler}` replies; its code says what that is"] = None
            continue
        for name, release in declarations(reply):
            words = release.mechanism if release is not None else "the run's account says how it is made"
            lines[f"* `{reply.__name__}.{name}`: {words}"] = None
    shares = {"test": prepared.experiment.client_test, "validation": prepared.experiment.client_validation}
    if splits := [name for name, share in shares.items() if share]:
        lines[
            f"* after a round: how a model does on the host's own {' and '.join(splits)} split: right answers and samples, for the "
            "test split by class, and the sum of losses, exact"
        ] = None
    lines["* at the start: its number, the digest of the experiment, and whether it has a test split of its own"] = None
    lines[
        "* with each reply: seconds in training and samples that passed through it; where a handler fails one line of the error, "
        "which may name files"
    ] = None
    return "\n".join(lines)


def _readme(prepared: Prepared, task: Task, name: str, rehearsal: str) -> str:
    experiment, shape = prepared.experiment, "x".join(map(str, task.shape))
    return f"""# {experiment.algorithm} on {task.clients} hosts

{task.clients} hosts train on their own samples ({task.dtype} of shape {shape}, {len(task.class_names)} classes) and send what the algorithm asks
for, listed [below](#what-a-host-sends). `{PACKAGE}/experiment.toml` says what is run and `{PACKAGE}/task.toml` what all parties agreed on: edit both before the first start. Every
party needs the same release of fedfill: `pip install 'fedfill[flower]'`.

Try everything on one machine first, with stand-in data: `{rehearsal}`.

## What a host sends

The following, each where the settings call for it: fields of its replies, and what goes beside them. `summary.json` has the account of a run, with what is protected.

{_sent(prepared)}

## 1. Certificates, once, on the server's machine

In this folder; replace `server.example.org` by the name under which the hosts reach the server.

```sh
mkdir keys && cd keys
openssl ecparam -name secp384r1 -genkey -noout -out ca.key
openssl req -x509 -new -key ca.key -sha384 -days 3650 -subj "/CN={name} CA" -addext "keyUsage=critical,keyCertSign" -out ca.crt
openssl ecparam -name secp384r1 -genkey -noout -out server.key
openssl req -new -key server.key -subj "/CN=server.example.org" -out server.csr
printf "subjectAltName=DNS:server.example.org,DNS:localhost,IP:127.0.0.1" > san.txt
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 825 -sha384 -extfile san.txt -out server.crt
cd ..
```

`ca.crt` goes to every host. `ca.key` goes into a safe: whoever has it can pose as the server.

## 2. The server

```sh
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
flower-superlink --host 0.0.0.0 --port 8000 --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.crt \\
  --ssl-keyfile keys/server.key --enable-supernode-auth --disable-runtime-dependency-installation --database superlink.db
```

`superlink.db` holds the hosts' keys, so that a restart needs no new registration. **Let nobody but the hosts reach this port**: Flower asks
no one who registers a key or starts a run who they are, and a run is code that the server and every host execute.

Tell the `flwr` command where it is, in `~/.flwr/config.toml`:

```toml
[superlink.{name}]
address = "server.example.org:8000"
root-certificates = "keys/ca.crt"   # as an absolute path
```

## 3. Each host

Make a key, and send `node.pub`, never `node.key`, to the server's people:

```sh
ssh-keygen -t ecdsa -b 384 -N "" -f node.key && mv node.key.pub node.pub
```

On the server, once for each host, with its `node.pub`: `flwr supernode register node.pub {name} --name host0`. Then, on the host:

```sh
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
flower-supernode --superlink server.example.org:8000 --root-certificates ca.crt --auth-supernode-private-key node.key \\
  --node-config 'client=0 data="/path/to/data" format="parquet" state-dir="/var/lib/fedfill"'
```

`client` is 0 to {task.clients - 1}, another one on each host. `format` is `parquet` (a folder with train*.parquet), `images` (a folder for each class), `table` (CSV or Parquet, by the schema in `task.toml`) or `safetensors`
(a file with the tensors `inputs` and `labels`); classes are found by their names in `task.toml`, and a host may lack some. `state-dir` holds what
the client keeps between rounds, `noise.key`, which undoes the protection of its noise in other hands, and `fedfill.log`: it belongs on a disk that outlives a restart. Further: `device="cuda"`, `max-message-bytes=1073741824`.
Run it under a supervisor that starts it again after a minute (systemd: `Restart=always`, `RestartSec=60`): a SuperLink refuses a node for as
long as it believes it online.
Where the experiment says `trust` secure, each host also needs `key="/path/to/node.key" peers="/path/to/keys"`: a folder with the public keys of all hosts, `node0.pub` to
`node{task.clients - 1}.pub`, which it gets from their people and **never from the server**. A host that is refused for a slip says why in its own log and in the server's.

## 4. Run

```sh
flwr run . {name} --stream
```

The run directory lies where `out` in `pyproject.toml` says, on the server: `rounds.jsonl`, `summary.json`, `checkpoint/`, `deployment/server.log`.
Beside it lies `NAME.noise.key` where the algorithm's server adds noise: give it to nobody, and let it move with the run. After a
crash of the server, start the SuperLink as before and say `fedfill resume OUT` with that directory, or the command above again: the run goes on
after its last finished round. A host that comes back joins the next round. For a new run from the beginning, change `out`: hosts
begin anew with it.
"""
