# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Helpers of captured passes: constants that are kept, and masks that are stacked in one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .launch import jit, operation, pointers, run_on, tl, triton

_kept: dict[tuple[Any, ...], Tensor] = {}
KEPT = 64  # at most; others are made in every pass


def _constant(like: Tensor, key: tuple[Any, ...], make: Callable[[], Tensor], now: Callable[[], Tensor]) -> Tensor:
    """The result of `make`, kept for good, since a CUDA graph reads it where it is; not to be written to. While a pass
    is traced or recorded its tensors cannot be kept: then the result of `now`."""
    if key in _kept:
        return _kept[key]
    traced = torch.compiler.is_compiling() or (like.is_cuda and torch.cuda.is_current_stream_capturing())
    if traced or type(like) not in (Tensor, Parameter) or len(_kept) >= KEPT:
        return now()
    with torch.inference_mode(False):
        made = make()
    if type(made) is Tensor:
        _kept[key] = made
    return made


@operation("steps", lambda like, stop, step: like.new_empty(-(-stop // step), dtype=torch.int32))
def _steps(out: Tensor, like: Tensor, stop: int, step: int) -> None:
    """An operation of its own, since torch.compile would write a plain arange anew for each of its readers."""
    torch.arange(0, stop, step, out=out)


def steps(like: Tensor, stop: int, step: int) -> Tensor:
    """[stop / step] 0, step, 2 step ..., int32; not to be written to."""
    make = functools.partial(torch.arange, 0, stop, step, device=like.device, dtype=torch.int32)
    return _constant(like, (like.device, stop, step), make, functools.partial(_steps, like, stop, step))


def filled(like: Tensor, shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
    """One value everywhere; not to be written to. Kept where our kernels read it."""
    make = functools.partial(torch.full, tuple(shape), value, dtype=dtype, device=like.device)
    return _constant(like, (like.device, *shape, value, dtype), make, make) if run_on(like) else make()


@jit
def _stack_kernel(
    masks,  # a tuple of k pointers [cells]
    out_pointer,  # [k, cells]
    cells,
    TILE: tl.constexpr,
):
    """A program copies a part of one of them."""
    which = tl.program_id(1)
    source = masks[0]
    for n in tl.static_range(1, len(masks)):
        if which == n:
            source = masks[n]
    cell = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(source + cell, mask=cell < cells, other=0)
    tl.store(out_pointer + which.to(tl.int64) * cells + cell, value, mask=cell < cells)


@operation("stacked", lambda masks: masks[0].new_empty(len(masks), *masks[0].shape))
def _stacked(out: Tensor, masks: Sequence[Tensor]) -> None:
    cells = masks[0].numel()
    if cells:
        given = pointers(*(mask.contiguous() for mask in masks))
        _stack_kernel[(triton.cdiv(cells, 1024), len(masks))](given, *pointers(out), cells, TILE=1024)


def stacked(masks: Sequence[Tensor]) -> Tensor:
    """torch.stack of masks in one launch, where they come from our kernels: torch.compile would copy each by itself."""
    plain = not run_on(masks[0]) or any(mask.dtype != torch.bool for mask in masks)
    out: Tensor = torch.stack(list(masks)) if plain else _stacked(masks)
    return out


@operation("joined", lambda masks: masks[0].new_empty(sum(len(m) for m in masks), *masks[0].shape[1:]))
def _joined(out: Tensor, masks: Sequence[Tensor]) -> None:
    torch.cat(list(masks), out=out)


def joined(masks: Sequence[Tensor]) -> Tensor:
    """torch.cat in one launch; see stacked."""
    out: Tensor = _joined(masks) if run_on(masks[0]) else torch.cat(list(masks))
    return out
