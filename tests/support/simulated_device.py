"""A device that is not the CPU, simulated on the CPU: finds tensors on the wrong device, and reads that wait for it.

    with SimulatedDevice() as device:
        module = device.moved(module)          # its tensors say that they are on `device.name`
        ...                                    # results are those of the CPU
    device.reads                               # where a number was copied back to the host

It is called "meta", which is the one device without kernels of its own; the tensors have contents all the same. An
operation on tensors of both devices fails as on a GPU, where only numbers without dimensions and indices may differ.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "meta"
_READING = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select"),
    *("_unique2", "unique_dim", "unique_consecutive", "bincount"),
}
"""Operations that wait for the device, as Python needs a number or a shape depends on one."""


class DeviceTensor(Tensor):
    """A tensor of the simulated device; `contents` are on the CPU."""

    contents: Tensor

    @staticmethod
    def __new__(cls, contents: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            contents.shape,
            strides=contents.stride(),
            storage_offset=contents.storage_offset(),
            dtype=contents.dtype,
            device=NAME,
        )
        made.contents = contents
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.contents!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func} outside of `with SimulatedDevice()`")


class SimulatedDevice:
    """The device while a `with` block runs."""

    name = NAME

    def __init__(self) -> None:
        self.reads: list[str] = []
        """Where the host has waited for a number: the functions of ours, the innermost last."""

    def __enter__(self) -> SimulatedDevice:
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            # inference mode forbids what a tensor subclass needs
            patch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad())
            stack.enter_context(torch.no_grad())
            stack.enter_context(_Operations(self))
            stack.enter_context(_Functions(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def moved(self, module: nn.Module) -> nn.Module:
        """A module with its parameters, buffers and plain tensors on the device, in place."""
        for part in module.modules():
            for name, weight in part._parameters.items():
                if weight is not None:
                    part._parameters[name] = nn.Parameter(DeviceTensor(weight.data), requires_grad=False)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = DeviceTensor(buffer)
            for name, value in list(vars(part).items()):
                if type(value) is Tensor:
                    setattr(part, name, DeviceTensor(value))
        return module

    def note_read(self) -> None:
        """Notes that the host waits."""
        calls: list[str] = []
        frame = sys._getframe(1)
        while frame.f_back is not None and len(calls) < 4:
            if "/kvmosaic/" in frame.f_code.co_filename:
                calls.insert(0, f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
            frame = frame.f_back
        self.reads.append(" > ".join(calls))


def _is_here(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


class _Functions(TorchFunctionMode):
    """What torch does in C++ before any operation is dispatched."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and _is_here(kwargs.get("device")):
            kwargs["device"] = "cpu"
            return DeviceTensor(func(*args, **kwargs))
        if args and isinstance(args[0], DeviceTensor):
            if func in (Tensor.tolist, Tensor.numpy):
                self._device.note_read()
                return func(args[0].contents)
            if func in (Tensor.__getitem__, Tensor.__setitem__):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                index = tuple(DeviceTensor(torch.tensor(n, dtype=torch.long)) if type(n) is list else n for n in index)
                args = (args[0], index, *args[2:])
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        here = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        there = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor)]
        if not here and not _is_here(kwargs.get("device")):
            return func(*args, **kwargs)
        name = func.name().removeprefix("aten::").split(".")[0]
        leaves_device = name == "_to_copy" and not _is_here(kwargs.get("device", NAME))
        leaves_device = leaves_device or (name == "copy_" and not isinstance(args[0], DeviceTensor))
        indexes = args[1:2] if name.startswith("index") else ()
        if (
            leaves_device
            or name in _READING
            or any(isinstance(x, Tensor) and x.dtype is torch.bool for x in tree_leaves(indexes))
        ):
            self._device.note_read()
        if here and name not in ("_to_copy", "copy_") and not name.startswith("index"):
            wrong = [tuple(tensor.shape) for tensor in there if tensor.dim()]
            if wrong:
                raise RuntimeError(f"{name} on two devices; on the CPU are tensors of {wrong}")
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        args, kwargs = tree_map_only(DeviceTensor, lambda tensor: tensor.contents, (args, kwargs))
        result = func(*args, **kwargs)
        if leaves_device:
            return result
        known = {id(tensor.contents): tensor for tensor in here}  # what is written in place stays the same tensor
        return tree_map_only(
            Tensor, lambda tensor: known[id(tensor)] if id(tensor) in known else DeviceTensor(tensor), result
        )
