"""A Flower grid in this process: the real server side, the real ClientApps and the real messages, without the wire."""

from __future__ import annotations

import functools
import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from fedfill import tree
from fedfill.algorithms import Algorithm
from fedfill.data.federation import Federation
from fedfill.engines.flower import FlowerEngine
from fedfill.engines.flower_host import Kept, Site, client_app
from fedfill.privacy.masking import Parties
from fedfill.training.precision import Precision
from fedfill.tree import Tree, Weights

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
logging.getLogger("fedfill").addHandler(logging.NullHandler())

RAISED = 2


class InProcessGrid(Grid):
    """Runs a node's app when its reply is asked for; ``spoil`` may change, or lose, any reply."""

    def __init__(self, apps: dict[int, ClientApp], run_id: int = 1) -> None:
        self.apps = apps
        self.online = set(apps)
        self.run_id = run_id
        self.spoil: Callable[[Message, Message], Message | None] = lambda message, reply: reply
        self.sent: list[Message] = []
        self._mail: dict[str, Message] = {}
        self._count = itertools.count()
        self.contexts = {
            node: Context(run_id=run_id, node_id=node, node_config={}, state=RecordDict(), run_config={})
            for node in apps
        }

    def set_run(self, run: Any) -> None:
        pass

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.online)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            name = f"m{next(self._count)}"
            message.metadata.__dict__["_message_id"] = name
            self._mail[name] = message
            self.sent.append(message)
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for name in list(message_ids):
            message = self._mail.pop(name, None)
            if message is None:
                continue
            node = message.metadata.dst_node_id
            try:
                reply = self.apps[node](message, self.contexts[node])
            except Exception as error:
                reply = Message(Error(code=RAISED, reason=repr(error)), reply_to=message)
            spoilt = self.spoil(message, reply)
            if spoilt is not None:
                found.append(spoilt)
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def hosts(
    program: Algorithm,
    federation: Federation,
    template: nn.Module,
    initial: Weights,
    folder: Path,
    *,
    seed: int = 0,
    digest: str = "digest",
    timeout: float | None = None,
    limit: int = 2**30,
    run_id: int = 1,
    secret: bool = False,
    parties: Sequence[Parties] = (),
    precision: Precision = "float32",
) -> InProcessGrid:
    """A grid with a node for each client; node 100 + i is client i."""

    def app(i: int) -> ClientApp:
        site = Site(
            client=i, data=federation.clients[i], program=program, template=template, initial=tree.clone(initial),
            classes=federation.classes, seed=seed, digest=digest, device=torch.device("cpu"),
            folder=folder / f"host{i}", timeout=timeout, secret=secret, limit=limit,
            parties=parties[i] if parties else None, precision=precision, schema=federation.schema,
        )  # fmt: skip
        return client_app(program, lambda context: site)

    return InProcessGrid({100 + i: app(i) for i in range(len(federation.clients))}, run_id)


@functools.cache
def parties_of(clients: int) -> list[Parties]:
    """Each host's key, and everybody's public one."""
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(clients)]
    return [Parties(own, {i: key.public_key() for i, key in enumerate(keys)}) for own in keys]


class InProcessEngine(FlowerEngine):
    """The engine on such a grid; what lies on the hosts' disks can be looked at, and put back."""

    def __init__(
        self, program: Algorithm, federation: Federation, template: nn.Module, initial: Weights, *, seed: int = 0,
        folder: Path | None = None, timeout: float | None = None, secret: bool = False, parties: Sequence[Parties] | None = None,
        precision: Precision = "float32", **options: Any,
    ) -> None:  # fmt: skip
        self._threads = torch.get_num_threads()
        self._given = folder
        parties = parties_of(len(federation.clients)) if parties is None else parties
        self.folder = folder or Path(tempfile.mkdtemp())
        self.grid = hosts(
            program, federation, template, initial, self.folder, seed=seed, timeout=timeout, secret=secret,
            digest=options.get("digest", "digest"), parties=parties, precision=precision,
        )  # fmt: skip
        super().__init__(
            self.grid, program, clients=len(federation.clients), classes=federation.classes, test=federation.test,
            template=template, device=torch.device("cpu"), timeout=timeout, times=federation.times,
            **{"digest": "digest", "wait": 0.0, **options},
        )  # fmt: skip

    def states(self) -> dict[int, Tree]:
        found = {}
        for path in self.folder.glob("host*/client-*.safetensors"):
            now = tree.from_bytes(path.read_bytes()).now
            if now:
                found[int(path.name.split("-")[1])] = now
        return dict(sorted(found.items()))

    def restore(self, states: Mapping[int, Tree]) -> None:
        for i, state in states.items():
            path = self.folder / f"host{i}" / f"client-{i}-digest.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(tree.to_bytes(Kept("1", -1, None, state, self.origin)))

    def close(self) -> None:
        torch.set_num_threads(self._threads)
        if self._given is None:
            shutil.rmtree(self.folder)
