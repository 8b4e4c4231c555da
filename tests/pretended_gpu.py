"""A GPU for machines that have none: tensors that say they are on ``cuda:0`` and whose numbers lie in this memory.

All that torch would refuse on a real GPU and can be seen from Python is refused here with an error of its own: tensors of two
devices in one operation, a generator of another device, and a way into NumPy that goes past `Tensor.cpu`. What it can't show is
speed, rounding, memory, and kernels that a GPU lacks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._functorch import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

_flat_vmap = vmap._flat_vmap
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


class WrongDeviceError(RuntimeError):
    """What a GPU would have refused."""


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = GPU  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(function, args, dict(kwargs or {}))

    def get_device(self) -> int:
        return 0


class Generator(torch.Generator):
    """A generator that says where it is."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        made._where = _placed(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._where

    def manual_seed(self, seed: int) -> Generator:
        super().manual_seed(seed)
        return self


def _placed(device: Any) -> torch.device:
    found = torch.device(device)
    return GPU if found.type == "cuda" else found


def place_of(x: Any) -> torch.device | None:
    """Where a tensor is; None: it has no place of its own, as inside of torch.func, or has no numbers at all."""
    if isinstance(x, OnGPU):
        return GPU
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return None
    with torch._C.DisableTorchFunction():
        return CPU if x.device.type == "cpu" else None


MOVES = {"copy_", "_foreach_copy_", "load_state_dict"}
"""Operations that are there to go from one device to another."""
INTO_NUMPY = {"numpy", "__array__"}
SCALARS_TOO = {"cat", "stack", "hstack", "vstack", "concat", "matmul", "mm", "bmm", "addmm", "addmm_", "linear"}
"""Operations in which not even a number may be of another device."""


def _check(name: str, args: Any, kwargs: Mapping[str, Any]) -> torch.device | None:
    """Raise what a GPU would raise; returns where the result is, None: no tensor told."""
    tensors = [
        x for x in tree_iter((args, {k: v for k, v in kwargs.items() if k != "out"})) if isinstance(x, torch.Tensor)
    ]
    placed = [(x, place_of(x)) for x in tensors]
    on_gpu = [x for x, place in placed if place == GPU]
    on_cpu = [x for x, place in placed if place == CPU]
    if name in ("__getitem__", "__setitem__", "index_put_", "index_put"):
        if place_of(args[0]) == CPU and any(
            place_of(x) == GPU for x in tree_iter(args[1]) if isinstance(x, torch.Tensor)
        ):
            raise WrongDeviceError(f"{name}: an index on the GPU for a tensor on the CPU")
        return place_of(args[0])
    if on_gpu and on_cpu and name not in MOVES:
        numbers = all(x.dim() == 0 for x in on_cpu) and any(x.dim() for x in on_gpu) and name not in SCALARS_TOO
        if not (numbers or (all(x.dim() == 0 for x in (*on_gpu, *on_cpu)) and name not in SCALARS_TOO)):
            raise WrongDeviceError(f"{name}: tensors on cuda:0 and on the cpu")
    if name in INTO_NUMPY and on_gpu:
        raise WrongDeviceError(f"{name}: can't be had of a tensor on cuda:0; .cpu() first")
    if name in MOVES and tensors:
        return place_of(tensors[0])
    return GPU if on_gpu else CPU if on_cpu else None


def _call(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    name = getattr(function, "__name__", str(function))
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", name)
        if name in ("device", "is_cuda", "is_cpu"):
            return getattr(args[0], name)
    if name == "_has_compatible_shallow_copy_type":
        return type(args[0]) is type(args[1])  # so that Module.to makes a new parameter, which is of another class
    if name in ("to", "cuda", "cpu"):
        return _moved(name, args, kwargs)
    where = _check(name, args, kwargs)
    if kwargs.get("device") is not None:
        where = _placed(kwargs["device"])
        kwargs["device"] = "cpu" if where.type == "cuda" else where
    stream = kwargs.get("generator")
    if stream is not None and where is not None and stream.device.type != where.type:
        raise WrongDeviceError(f"{name}: expected a generator of {where}, found one of {stream.device}")
    if "generator" in kwargs and where is None and stream is not None and stream.device.type != "cpu":
        raise WrongDeviceError(f"{name}: expected a generator of the cpu, found one of {stream.device}")
    with torch._C.DisableTorchFunction():
        result = function(*args, **kwargs)
    return _said(result, where)


def _said(result: Any, where: torch.device | None) -> Any:
    """The result as tensors that say `where` they are."""
    if where == GPU:
        return tree_map(lambda x: _on_gpu(x) if isinstance(x, torch.Tensor) else x, result)
    if where == CPU:
        return tree_map(lambda x: _plain(x) if isinstance(x, OnGPU) else x, result)
    return result


def _on_gpu(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, OnGPU) or place_of(x) is None:
        return x
    with torch._C.DisableTorchFunction():
        return x.as_subclass(OnGPU)


def _plain(x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return x.as_subclass(torch.Tensor)


def _moved(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """`Tensor.to` and its kin: a copy where the place changes, as on a real machine."""
    where = place_of(args[0])
    there = {"cuda": GPU, "cpu": CPU}.get(name)
    flags = iter(("non_blocking", "copy"))
    for value in args[1:] if name == "to" else ():
        if isinstance(value, torch.Tensor):
            there, kwargs["dtype"] = place_of(value), value.dtype
        elif isinstance(value, torch.dtype):
            kwargs["dtype"] = value
        elif isinstance(value, bool):
            kwargs[next(flags)] = value
        elif value is not None:
            there = _placed(value)
    if kwargs.get("device") is not None:
        there = _placed(kwargs["device"])
    there = where if there is None else there
    kwargs = {key: value for key, value in kwargs.items() if key != "device" and value is not None}
    with torch._C.DisableTorchFunction():
        result = torch.Tensor.to(args[0], **kwargs) if kwargs else args[0]
        if there is not None and there.type == "meta":
            return torch.Tensor.to(result, "meta")
        if there != where and result is args[0]:
            result = result.clone()
    return _said(result, there)


class Factories(TorchFunctionMode):
    """Makes what is asked for with ``device="cuda"``, in the thread that it is entered in."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(function, args, dict(kwargs or {}))


def _vmapped(function: Any, size: int, dims: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
    """What comes out of `torch.vmap` has lost its class on the way."""
    result = _flat_vmap(function, size, dims, inputs, *rest, **kwargs)
    return _said(result, GPU) if any(isinstance(x, OnGPU) for x in inputs) else result


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Within it torch has one GPU, in all threads."""
    run = threading.Thread.run

    def pretending(thread: threading.Thread) -> None:
        with Factories():
            run(thread)

    with (
        mock.patch.object(threading.Thread, "run", pretending),
        mock.patch.object(torch, "Generator", Generator),
        mock.patch.object(vmap, "_flat_vmap", _vmapped),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(torch.cuda, "get_device_name", return_value="pretended GPU"),
        Factories(),
    ):
        yield
