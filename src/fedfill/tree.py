"""Trees: what messages and states are made of, and how they are measured, copied, stored and read back.

A tree is None, a bool, int, float or str, a tensor, a list, tuple or dict (string or integer keys) of trees, or a
`Record`: a frozen dataclass whose fields are trees. Nothing else can be sent or stored, so nothing needs pickle:
bytes are safetensors with the structure as JSON in its header.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any, ClassVar

import safetensors
import safetensors.torch
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

Tree = Any
PLAIN = (bool, int, float, str)
_LARGE = 1 << 20  # bytes from which equal tensors are looked for
Weights = dict[str, Tensor]
"""Tensors by the names of a model's state dict: parameters and buffers, of the whole model or of some parts."""


class UnknownKindError(ValueError):
    """Bytes that hold a record of a class that this program has not, or has with other fields: the bytes are none the worse."""


class Record:
    """Base of the frozen dataclasses that may travel in a message or lie in a state."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        # for `validated`
        "arbitrary_types_allowed": True,
        "strict": True,
        "revalidate_instances": "always",
    }
    _kinds: ClassVar[dict[str, type[Record]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Remember the class by its name, so that only known records are ever read back."""
        super().__init_subclass__(**options)
        Record._kinds[_kind(cls)] = cls


def _kind(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_NAMES: dict[type, tuple[str, ...]] = {}


def _names(record: Record) -> tuple[str, ...]:
    """Names of a record's fields; thousands of messages of one class pass in a round."""
    kind = type(record)
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in dataclasses.fields(record))  # type: ignore[arg-type]
    return _NAMES[kind]


def _fields(record: Record) -> dict[str, Tree]:
    return {name: getattr(record, name) for name in _names(record)}


def map_tensors(tree: Tree, function: Callable[[Tensor], Tensor]) -> Tree:
    """The same tree in new containers, with `function` applied to every tensor.

    Args:
        tree: Any tree.
        function: Called once for each tensor, in order.

    Returns:
        A new tree; lists, tuples, dicts and records are rebuilt, numbers and strings shared.

    Raises:
        TypeError: Where something in the tree can't be sent or stored.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Record):
        return type(tree)(**{name: map_tensors(getattr(tree, name), function) for name in _names(tree)})
    if isinstance(tree, dict):
        return {key: map_tensors(item, function) for key, item in tree.items()}
    if tree is None or isinstance(tree, PLAIN):
        return tree
    if isinstance(tree, (list, tuple)):
        return type(tree)([map_tensors(item, function) for item in tree])
    raise TypeError(_refusal(tree))


def _refusal(thing: object) -> str:
    kind = type(thing).__name__
    return f"a {kind} can't be sent or stored; trees hold tensors, numbers, strings, lists, dicts and records"


def leaves(tree: Tree) -> list[Any]:
    """The tensors, numbers and strings of a tree, in order."""
    found: list[Any] = []
    _gather(tree, found)
    return found


def _gather(tree: Tree, found: list[Any]) -> None:
    # every client's message passes here several times: what is met most often comes first
    if type(tree) is Tensor:
        found.append(tree)
    elif isinstance(tree, Record):
        for name in _names(tree):
            _gather(getattr(tree, name), found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _gather(item, found)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _gather(item, found)
    elif tree is not None:
        found.append(tree)


def tensors(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in order."""
    return [leaf for leaf in leaves(tree) if type(leaf) is Tensor or isinstance(leaf, Tensor)]


def size(tree: Tree) -> int:
    """Payload in bytes: a tensor's own bytes, 8 for a number, 1 for a bool, UTF-8 for text.

    Names of fields and keys are not counted: both sides know them.
    """
    total = 0
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            total += leaf.numel() * leaf.element_size()
        elif isinstance(leaf, bool):
            total += 1
        elif isinstance(leaf, str):
            total += len(leaf.encode())
        elif isinstance(leaf, (int, float)):
            total += 8
        else:
            raise TypeError(_refusal(leaf))
    return total


def copy(tree: Tree) -> Tree:
    """New containers around the same tensors."""
    return map_tensors(tree, lambda tensor: tensor)


def clone(tree: Tree) -> Tree:
    """New containers around new tensors."""
    return map_tensors(tree, lambda tensor: tensor.detach().clone())


def to(tree: Tree, device: torch.device | str) -> Tree:
    """The tree with its tensors on `device`."""
    return map_tensors(tree, lambda tensor: tensor.detach().to(device))


def zeros_like(weights: Weights) -> Weights:
    """Zeros under the same names, of the same shapes, types and devices."""
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def is_finite(tree: Tree) -> bool:
    """Whether every floating-point number in the tree is finite.

    A tensor's sum is a NaN or an infinity as soon as one of its elements is, so mostly one pass of additions is enough; and
    a GPU is asked once for all tensors of a type, as each answer waits for all that it has to do.
    """
    floats: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point() and leaf.numel():
                floats.setdefault((leaf.dtype, leaf.device), []).append(leaf)
        elif isinstance(leaf, float) and not (float("-inf") < leaf < float("inf")):
            return False
    return all(
        bool(torch.isfinite(torch.stack([tensor.sum() for tensor in tensors])).all())
        or all(bool(torch.isfinite(tensor).all()) for tensor in tensors)  # a sum of large numbers overflows
        for tensors in floats.values()
    )


def finite_or_none(tree: Tree) -> Tree:
    """A tree of dicts, lists, tuples and numbers with None where a number is a NaN or an infinity, of which JSON has none."""
    if isinstance(tree, dict):
        return {key: finite_or_none(item) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([finite_or_none(item) for item in tree])
    return None if isinstance(tree, float) and not is_finite(tree) else tree


class Unchanged:
    """Notices in-place writes to the tensors of a tree, by torch's own version counters."""

    def __init__(self, tree: Tree) -> None:
        """Remember the tensors of `tree` and their versions."""
        self._seen = [(tensor, tensor._version) for tensor in tensors(tree) if not tensor.is_inference()]

    def holds(self) -> bool:
        """Whether no tensor was written to since."""
        return all(tensor._version == version for tensor, version in self._seen)


def to_bytes(tree: Tree) -> bytes:
    """Safetensors bytes that hold the tree; see `from_bytes`.

    Args:
        tree: Any tree.

    Returns:
        Bytes with the tensors in safetensors' own layout and the structure in its header.

    Raises:
        TypeError: Where something in the tree can't be sent or stored.
    """
    store: dict[str, Tensor] = {}
    places: set[int] = set()
    large: dict[tuple[torch.dtype, tuple[int, ...], bytes], str] = {}

    def put(node: Tensor) -> str:
        name = str(len(store))
        tensor = node.detach().to("cpu").contiguous()
        place = tensor.untyped_storage().data_ptr()
        if place in places:  # safetensors refuses tensors that share memory
            tensor = tensor.clone()
        places.add(place)
        if tensor.nbytes >= _LARGE:
            # what all clients keep, such as a pool of images, is stored once
            digest = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).digest()  # type: ignore[arg-type]
            name = large.setdefault((tensor.dtype, tuple(tensor.shape), digest), name)
        store[name] = tensor
        return name

    structure = _encode(tree, put)
    return safetensors.torch.save(store, metadata={"tree": json.dumps(structure)})


def _encode(node: Tree, put: Callable[[Tensor], str]) -> Any:
    # a function of the module: one that calls itself out of to_bytes would keep all copies until the next collection of cycles
    if node is None or isinstance(node, PLAIN):
        return node
    if isinstance(node, Tensor):
        return {"tensor": put(node)}
    if isinstance(node, list):
        return [_encode(item, put) for item in node]
    if isinstance(node, tuple):
        return {"tuple": [_encode(item, put) for item in node]}
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                raise TypeError(f"a key of type {type(key).__name__} can't be sent or stored; use strings or integers")
        return {"dict": [[key, _encode(item, put)] for key, item in node.items()]}
    if isinstance(node, Record):
        return {
            "record": _kind(type(node)),
            "fields": {name: _encode(item, put) for name, item in _fields(node).items()},
        }
    raise TypeError(_refusal(node))


def from_bytes(data: bytes, structure: int | None = None, *, unknown: bool = False) -> Tree:
    """The tree that `to_bytes` wrote.

    Args:
        data: What `to_bytes` returned.
        structure: Bytes of the header at the most, which in memory may become a hundred times as many; None: as many as
            safetensors reads.
        unknown: Whether a record of a class that this program has not becomes the dict of its fields, for who looks elsewhere.

    Returns:
        An equal tree, tensors on the CPU.

    Raises:
        UnknownKindError: Where they name an unknown record, or one with other fields.
        ValueError: Where the bytes are cut short, or are not of this form.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        if structure is not None and length > structure:
            raise ValueError(f"their structure has {length:,} bytes, and {structure:,} are the most")
        store = safetensors.torch.load(data)  # first: it checks the header
        return _decode(json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["tree"]), store, unknown)
    except UnknownKindError:
        raise
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"these bytes hold no tree: {error}") from error


def _decode(node: Any, store: dict[str, Tensor], unknown: bool) -> Tree:
    if isinstance(node, list):
        return [_decode(item, store, unknown) for item in node]
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        return store[node["tensor"]]
    if "tuple" in node:
        return tuple(_decode(item, store, unknown) for item in node["tuple"])
    if "dict" in node:
        return {key: _decode(item, store, unknown) for key, item in node["dict"]}
    kind = node["record"]
    fields = {name: _decode(item, store, unknown) for name, item in node["fields"].items()}
    if kind in Record._kinds and _fit(Record._kinds[kind], fields):
        return Record._kinds[kind](**fields)
    if not unknown:
        other = f"'{kind}' with other fields" if kind in Record._kinds else f"the unknown kind '{kind}'"
        raise UnknownKindError(f"these bytes hold a record of {other}")
    return fields


def _fit(kind: Any, fields: dict[str, Tree]) -> bool:
    """Whether a record can be made of these fields."""
    own = dataclasses.fields(kind)
    nothing = dataclasses.MISSING
    needed = {one.name for one in own if one.default is nothing and one.default_factory is nothing}
    return needed <= fields.keys() <= {one.name for one in own}


def validated(value: Tree, kind: Any) -> None:
    """Make sure that a tree from elsewhere is a record of a kind, or of one that extends it, its fields of their types.

    Args:
        value: What arrived.
        kind: A `Record` class; anything else, such as Any, lets everything pass.

    Raises:
        ValueError: Where it is not.
    """
    if not isinstance(kind, type) or not issubclass(kind, Record):
        return
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} in place of a {kind.__name__}")
    if not dataclasses.is_dataclass(value):
        return
    kind = type(value)
    try:
        _validator(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"'{where}' of a {kind.__name__} is wrong: {first['msg']}") from None


@functools.cache
def _validator(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def sha256(weights: Weights) -> str:
    """SHA-256 over names, types, shapes and bytes of the tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
