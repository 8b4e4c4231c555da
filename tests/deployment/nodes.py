"""What an operator does by hand in a federation of real processes."""

from __future__ import annotations

from fedfill.deployment import processes
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
