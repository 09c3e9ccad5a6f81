"""The trainer side as tensors: zero-copy where it can be, safe to write into, ready for the device.

Needs PyTorch (``pip install byhandle[torch]``), which the rest of the package does not import. Every
tensor read here is on the CPU and may be written into; no write reaches a file. `as_index` alone
takes tensors, and leaves them on their device.

torch lacks many operators for uint16, uint32 and uint64 (``max``, ``min``, ``add``, ``index_select``,
among others): ask for another ``dtype``, or use `as_index` for expert and token ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ._gather import Array
from ._plan import Holes
from .ragged import Ragged
from .resolver import Resolver, _Place
from .segment import Segment

__all__ = ["as_index", "as_nested", "as_padded", "as_tensor", "view", "window"]


def view(resolver: Resolver, segment: Segment) -> torch.Tensor:
    """Return the rows of one segment of a fixed side array, without a copy.

    Parameters
    ----------
    resolver : Resolver
    segment : Segment

    Returns
    -------
    Tensor
        ``[rows, *shape]`` in the segment's dtype. It has a copy-on-write map of its own: nothing is
        read until it is touched, what is written into it stays in this process and in this tensor,
        and only pages written to take memory. It stays valid after the resolver is closed and the
        file deleted, as `Resolver.view` has it; if somebody truncates the file, the kernel ends the
        process at the next touch, also of a page that was written to. An element that is not
        aligned, and a file that is not mapped, give a copy, counted in `Resolver.stats`.

    Raises
    ------
    PayloadError
        As for `Resolver.view`.

    Notes
    -----
    What is compared (``verify="checksum"``) or read before it is mapped (network roots) is so once
    for all tensors, until the file changes. Before Python 3.13 each of these maps holds a
    descriptor. In a `DataLoader` worker prefer `window`: a view is copied again on its way to the
    main process.

    Examples
    --------
    >>> import tempfile
    >>> from payload import Writer
    >>> with tempfile.TemporaryDirectory() as root, Resolver(root) as resolver:
    ...     [segment] = Writer(root).write({"routed_experts": (0, np.zeros((2, 1, 2), np.uint8))})
    ...     experts = view(resolver, segment)
    ...     experts[0] = 7
    ...     experts.tolist(), resolver.view(segment).tolist()
    ([[[7, 7]], [[0, 0]]], [[[0, 0]], [[0, 0]]])
    """
    return torch.from_numpy(resolver._view(segment, private=True))


def as_tensor(array: Array) -> torch.Tensor:
    """Return an array as a tensor that may be written into.

    Parameters
    ----------
    array : ndarray
        Of numpy, such as a view or window of a `Resolver`.

    Returns
    -------
    Tensor
        It shares memory with `array` if that is writable and torch takes its strides, else it is
        a copy: torch would write into a read-only map, and the process would end.

    Notes
    -----
    The copy of a mapped view touches all of it here: if somebody truncates the file meanwhile, the
    kernel ends the process. `window` and `view` read or map the file themselves.

    Examples
    --------
    >>> as_tensor(np.arange(3, dtype=np.uint16))
    tensor([0, 1, 2], dtype=torch.uint16)
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"array is {type(array).__name__}: needs a numpy array")
    steps = all(stride >= 0 and not stride % array.itemsize for stride in array.strides)
    if steps and array.flags.writeable and array.flags.aligned:
        return torch.from_numpy(array)
    return _copy(array)


def window(
    resolver: Resolver,
    segments: Any,
    field: str,
    lo: SupportsIndex,
    hi: SupportsIndex,
    *,
    fill: float | Literal["field"] | None = None,
    holes: Holes | None = None,
    extent: tuple[int, int] | None = None,
    dtype: torch.dtype | Literal["field"] | None = None,
    layers: Iterable[SupportsIndex] | None = None,
    num_layers: SupportsIndex | None = None,
    pin_memory: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return the rows of the token positions [lo, hi), see `Resolver.window`.

    Parameters
    ----------
    resolver : Resolver
    segments, field, lo, hi, fill, holes, extent, layers, num_layers
        As for `Resolver.window`.
    dtype : torch.dtype or "field", optional
        Dtype of the result; default as written. A value that would change is refused.
    pin_memory : bool
        Read straight into pinned memory, if there is an accelerator to pin for; else as without,
        and in a `DataLoader` worker as well, which must not touch the device.
    out : Tensor, optional
        Where to put the rows: on the CPU, contiguous, of exactly the result's shape and dtype. It
        may be pinned. As after any in-place write, a backward pass that needs what it held before
        is refused.

    Returns
    -------
    Tensor or None
        ``[hi - lo, *row shape]``, or `out`. As `view` if one segment covers the window and nothing
        must change (not contiguous, if layers are chosen), else each byte is read once into fresh
        memory: in a `DataLoader` worker that is shared memory, which goes to the main process
        without another copy. None when no segment carries the field.

    Raises
    ------
    PayloadError, ValueError, TypeError
        As for `Resolver.window`.
    RuntimeError
        torch's, when there is no room for pinned or shared memory (a full /dev/shm).

    Examples
    --------
    >>> import tempfile
    >>> from payload import Writer
    >>> with tempfile.TemporaryDirectory() as root, Resolver(root) as resolver:
    ...     segments = Writer(root).write({"routed_experts": (2, np.full((2, 1, 2), 7, np.uint8))})
    ...     holes = [(4, 5)]
    ...     window(resolver, segments, "routed_experts", 3, 5, fill=0, holes=holes, dtype=torch.int32)
    tensor([[[7, 7]],
    <BLANKLINE>
            [[0, 0]]], dtype=torch.int32)
    """
    made: list[torch.Tensor] = []

    def new(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        made.append(_empty(shape, dtype, memory))
        return _array_of(made[0])

    memory = _memory(pin_memory)
    place = _Place(None, new, "private" if memory == "own" else "never")
    if out is not None:
        place = _Place(_array_of(out))
        made.append(out)
    asked = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    try:
        found = resolver._placed(
            segments, field, lo, hi, fill, holes, extent, asked, layers, num_layers, place
        )
    except BaseException:
        _note_write(out)  # perhaps of a part
        raise
    if found is None:
        return None
    _note_write(out)
    return made[0] if made else torch.from_numpy(found)


def as_index(tensor: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return ids in a dtype that indexes; as they come they would not, or not so.

    torch takes a uint8 index for a boolean mask: ``x[ids]`` then has other rows than those of the
    ids, and other shapes of index are refused.

    Parameters
    ----------
    tensor : Tensor
        Of integers, such as expert or token ids.
    dtype : {torch.int64, torch.int32}

    Returns
    -------
    Tensor
        Of the same shape, values and device; `tensor` itself if it has the dtype.

    Raises
    ------
    ValueError
        When a value is negative (-1 pads sampling masks, and would index from the end), or does
        not fit.
    TypeError
        When `tensor` has no integers, is neither strided nor jagged, or `dtype` is not one of the
        two.

    Examples
    --------
    >>> as_index(torch.tensor([2, 0], dtype=torch.uint8))
    tensor([2, 0])
    """
    if dtype not in (torch.int64, torch.int32):
        raise TypeError(f"dtype is {dtype}: needs torch.int64 or torch.int32")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor is {type(tensor).__name__}: needs a tensor")
    if (tensor.is_nested or tensor.layout != torch.strided) and tensor.layout != torch.jagged:
        raise TypeError(f"tensor has layout {tensor.layout}: needs a strided or jagged one")
    kind = tensor.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise TypeError(f"tensor has dtype {kind}: needs integers")
    # Through int64, as torch compares no uint16 to uint64; what is 2^63 or more becomes negative.
    wide = tensor.to(torch.int64)
    most = torch.iinfo(dtype).max
    values = wide.values() if wide.is_nested else wide
    checked = kind not in (torch.uint8, torch.uint16) and values.numel() > 0
    if checked and (int(values.min()) < 0 or int(values.max()) > most):
        wrong = (values < 0) | (values > most)
        place = [int(at) for at in wrong.nonzero()[0]]
        value = int(values[tuple(place)])
        if wide.is_nested:
            jagged: Any = wide  # torch's types do not know of offsets
            starts = jagged.offsets()
            row = int((starts <= place[0]).sum()) - 1
            place = [row, place[0] - int(starts[row]), *place[1:]]
        value += 2**64 if kind == torch.uint64 and value < 0 else 0
        raise ValueError(f"tensor has {value} at {place}: an index of {dtype} is 0 to {most}")
    return wide.to(dtype)


def as_nested(ragged: Ragged) -> torch.Tensor:
    """Return ragged rows as a nested tensor of jagged layout.

    Parameters
    ----------
    ragged : Ragged
        Such as `Resolver.ragged` gives.

    Returns
    -------
    Tensor
        ``[rows, j]``, `torch.jagged`; its values share memory with those of `ragged` if they are
        writable, else they are a copy, as `as_tensor` makes it. Its offsets are its own.

    Examples
    --------
    >>> as_nested(Ragged.from_lists([[7], [8, 9], []])).offsets()
    tensor([0, 1, 3, 3])
    """
    values, offsets = as_tensor(ragged.values), _copy(ragged.offsets)
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return nested


def as_padded(ragged: Ragged, fill: float, width: int | None = None) -> torch.Tensor:
    """Return ragged rows as ``[rows, width]``, each followed by `fill`.

    Parameters
    ----------
    ragged, fill, width
        As for `Ragged.to_padded`.

    Returns
    -------
    Tensor
        Of its own.

    Examples
    --------
    >>> as_padded(Ragged.from_lists([[7], [8, 9]]), -1).tolist()
    [[7, -1], [8, 9]]
    """
    return torch.from_numpy(ragged.to_padded(fill, width))


def _memory(pin_memory: bool = False) -> Literal["own", "pinned", "shared"]:
    """Which memory fresh tensors have: of a worker what torch hands to the main process as it is."""
    if get_worker_info() is not None:
        return "shared"  # a worker must not touch the device
    return "pinned" if pin_memory and torch.accelerator.is_available() else "own"


def _empty(
    shape: tuple[int, ...], dtype: np.dtype[Any], memory: Literal["own", "pinned", "shared"]
) -> torch.Tensor:
    if memory == "own":
        return torch.from_numpy(np.empty(shape, dtype))
    if memory == "pinned":
        return torch.empty(shape, dtype=_torch_of(dtype), pin_memory=True)
    new_shared: Any = torch.UntypedStorage._new_shared  # as torch's own collate does
    storage = new_shared(math.prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=_torch_of(dtype)).set_(storage).view(shape)


def _copy(array: Array) -> torch.Tensor:
    copy = _empty(array.shape, array.dtype, _memory())
    copy.numpy()[...] = array
    return copy


def _note_write(out: torch.Tensor | None) -> None:
    """Tell autograd of a write that went past it: gradients would be those of the new rows."""
    if out is not None:
        torch.autograd.graph.increment_version(out)


def _torch_of(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _array_of(out: torch.Tensor) -> Array:
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is {type(out).__name__}: needs a tensor")
    if out.device.type != "cpu" or out.layout != torch.strided:
        raise ValueError(f"out is {out.layout} on {out.device}: needs a strided tensor on the CPU")
    array: Array = out.detach().numpy()
    return array
