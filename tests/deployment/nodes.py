"""What an operator does by hand in a federation of real processes, and a node whose every word a test chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.app import Message
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.fleet_http_connection import http_request_response
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedfill.deployment import processes
from fedfill.deployment.commands import program
from fedfill.deployment.processes import LocalFederation, make_node_key


def dismiss_node(federation: LocalFederation, k: int) -> None:
    """Tell the SuperLink that a killed node will not come back: what it owes fails now, not after missed heartbeats.

    Its key is used up; started again, the node has another key and another id.
    """
    name = f"node{k}"
    if found := processes._ONLINE.search(federation._log(name)):
        federation._flwr("supernode", "unregister", found[1], federation.connection)
    (federation.folder / f"{name}.pub").unlink()
    make_node_key(federation.folder / name)
    federation._register(k)


def comes_online(federation: LocalFederation, name: str, key: Path | None, authority: Path) -> tuple[bool, str]:
    """Whether a SuperNode with this key, which trusts this authority, is let in, and what it logs; it is stopped again.

    With no key it makes one and registers itself, as Flower's SuperNodes do where nobody asks who they are.
    """
    node = federation._launch(
        *(name, program("flower-supernode"), "--superlink", federation._address),
        *("--root-certificates", str(authority), "--host", "127.0.0.1", "--port", str(processes._free_port())),
        *(("--auth-supernode-private-key", str(key)) if key else ()),
        home=federation.folder / "flower" / name,
    )
    there = federation._wait(node, lambda: processes._ONLINE.search(federation._log(name)) is not None)
    if there:
        node.terminate()
    node.wait(30)
    return there, federation._log(name)


@dataclass(frozen=True)
class PlayedNode:
    """A registered node that speaks to the SuperLink as a SuperNode does, from this process.

    Attributes:
        id: Its node id.
        connection: Flower's functions of a node that is online.
    """

    id: int
    connection: tuple[Any, ...]

    def receive(self) -> Message | None:
        """The next message with its content, if there is one."""
        receive, _, _, _, pull, _, confirm = self.connection
        if (found := receive()) is None:
            return None
        message, tree = found
        run = message.metadata.run_id
        whole = pull_and_inflate_object_from_tree(
            tree, lambda name: pull(run, name), lambda name: confirm(run, name), return_type=Message
        )
        whole.metadata.__dict__["_message_id"] = tree.object_id
        return whole

    def send(self, reply: Message) -> bool:
        """Send a reply, and tell whether the SuperLink took it: then it asks for the content."""
        _, send, _, _, _, push, _ = self.connection
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            wanted, session = send(reply, get_object_tree(reply), 0.0)
            push_objects(
                get_all_nested_objects(reply),
                lambda name, content: push(reply.metadata.run_id, session, name, content),
                object_ids_to_push=wanted,
            )
        return bool(wanted)


def activation(federation: LocalFederation, claimed: Path, held: Path) -> int:
    """The SuperLink's status code for somebody who claims to own one key and signs with another one."""
    signing = load_ssh_private_key(held.with_suffix(".key").read_bytes(), None)
    public = load_ssh_public_key(claimed.with_suffix(".pub").read_bytes())
    sign = NodeAuthHttpInterceptor(signing, public)  # type: ignore[arg-type]
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    authority = (federation.folder / "ca.crt").read_bytes()
    asked = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=30)  # type: ignore[arg-type]
    with FleetHttpClient.from_server_address(
        federation._address, False, authority, interceptors=[version, sign]
    ) as client:
        try:
            node = client.ActivateNode(asked).node_id
        except httpx.HTTPStatusError as refused:
            return refused.response.status_code
        client.DeactivateNode(DeactivateNodeRequest(node_id=node))
        return httpx.codes.OK


@contextmanager
def played_node(federation: LocalFederation, k: int) -> Iterator[PlayedNode]:
    """Register node `k` of a federation that starts none, and be it."""
    make_node_key(federation.folder / f"node{k}")
    federation._register(k)
    key = load_ssh_private_key((federation.folder / f"node{k}.key").read_bytes(), None)
    authority = (federation.folder / "ca.crt").read_bytes()
    with ExitStack() as stack:
        failures = stack.enter_context(ExitStack())  # Flower's own context logs what is raised in it, and goes on
        node, *connection = stack.enter_context(
            http_request_response(federation._address, False, authority, (key, key.public_key()))  # type: ignore[arg-type]
        )
        try:
            yield PlayedNode(node, tuple(connection))
        except BaseException as failure:
            failures.callback(_raise, failure)


def _raise(failure: BaseException) -> None:
    raise failure
