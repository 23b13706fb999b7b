"""Processes that train together: accelerate's state, torchrun's restarts, and what each process must be given."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from ..errors import UserError, first_line
from .config import TrainConfig


def accelerator_for(config: TrainConfig) -> Accelerator:
    """accelerate keeps one state a process; a second run of another precision or device begins with a fresh one."""
    if PartialState._shared_state and PartialState().num_processes == 1:
        AcceleratorState._reset_state(reset_partial_state=True)
    gpu = torch.cuda.is_available() and config.device != "cpu"
    half = config.precision == "bf16" or (config.precision == "auto" and gpu)
    return Accelerator(mixed_precision="bf16" if half else "no", cpu=config.device == "cpu")


def check_divisible(config: TrainConfig, processes: int) -> None:
    how, parts = config.run, processes * config.run.accumulate
    what = f"{processes} processes" + f" times {how.accumulate} parts (--run.accumulate)" * (how.accumulate > 1)
    if config.batch_size % parts:
        raise UserError(f"batch_size: expected a multiple of {what}, got {config.batch_size}.")
    if (config.augment.mixup or config.augment.cutmix) and config.batch_size // parts % 2:
        raise UserError(
            f"augment.mixup: expected an even number of images a process and part, got {config.batch_size} / {parts}."
        )
    if how.fsdp and processes == 1:
        raise UserError("run.fsdp: expected several processes to share the weights, got one; start it with torchrun.")
    if how.fsdp and how.compile:
        raise UserError("run.fsdp: cannot be combined with --run.compile yet; leave one of them out.")
    if how.checkpoint_activations and how.compile:
        raise UserError("run.checkpoint_activations: cannot be combined with --run.compile, which keeps what it needs.")


@contextlib.contextmanager
def peers(accelerator: Accelerator) -> Iterator[None]:
    """A process that lost another ends with one line; that one's own message, or torchrun's, has the reason."""
    try:
        yield
    except RuntimeError as error:
        signs = ("closed by peer", "reset by peer", "Broken pipe", "gloo", "NCCL", "Timed out", "timeout")
        lost = isinstance(error, torch.distributed.DistError) or any(sign in str(error) for sign in signs)
        if accelerator.num_processes == 1 or not lost:
            raise
        raise UserError(
            f"Process {accelerator.process_index} of {accelerator.num_processes} lost another one, which ended or does "
            f"not answer ({first_line(error)[-160:]}). The last checkpoint was kept: start all again with --resume."
        ) from error


def meet_again(config: TrainConfig, restarts: int) -> None:
    """Join the processes that torchrun has started again, under names of their own.

    Without a rendezvous backend its store outlives them and holds addresses of ended processes, which a process would
    wait for that reads them before its peer has written.
    """
    dist: Any = torch.distributed  # its stores are not among its typed names
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not kept or dist.is_initialized() or int(os.environ["WORLD_SIZE"]) == 1:
        return
    gpu = torch.cuda.is_available() and config.device != "cpu"
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=dist.PrefixStore(f"restart{restarts}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
