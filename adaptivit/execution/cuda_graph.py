"""One CUDA graph for a whole forward pass: decisions, moves and readout included, replayed with one launch.

Nothing in a captured pass waits for the host, so one graph serves every input of its batch size, however many tokens
stay. torch.compile joins the small operations between the kernels (scores, masks, sums) before that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..budget.control import Budgets, RunSetting
from ..decision import Trace
from ..errors import UserError
from ..kernels.constants import joined
from ..layouts import PackedOnDevice
from ..output import Output
from . import row_schedule
from .compiling import compiled

if TYPE_CHECKING:
    from ..model import AdaptiveViT

MIB = 2**20


class Captured:
    """A model's forward pass for batches of up to `batch` images, as a CUDA graph.

    Weights may be trained on between calls; settings of the policy, device and dtype may not change. A budget may,
    where the policy's dial shifts scores; one that fixes counts, and with them all shapes, stays as it was.
    """

    def __init__(
        self,
        model: AdaptiveViT,
        batch: int,
        layout: str = "auto",
        profile: Tensor | Trace | Sequence[float] | None = None,
        compile: bool = True,
        warm_up: int = 3,
    ) -> None:
        weight = next(model.parameters())
        if weight.device.type != "cuda":
            raise UserError("capture: a CUDA graph needs the model on a GPU; on a CPU call the model itself.")
        if model.training:
            raise UserError("capture: the model is in training mode; call model.eval() first.")
        if batch < 1:
            raise UserError(f"capture: expected a batch of at least 1 image, got {batch}.")
        self.model, self.batch, self.asked = model, batch, layout
        self.compiled = compile
        height, width = model.backbone.image_size
        shape = (batch, model.backbone.in_chans, height, width)
        head, *_, tail = (name.rpartition(".") for name, _ in model.named_parameters())
        owners = [(model.get_submodule(owner), name) for owner, _, name in (head, tail)]
        self._ends = [(m, name, getattr(m, name).data_ptr()) for m, name in owners]  # where a graph reads weights
        self._images = _room(shape, weight)
        with torch.inference_mode():
            choice = model.choose(layout, weight.device)
            self.layout, self.plan = choice.layout.name, None
            if choice.layout is PackedOnDevice:
                self.plan = row_schedule.plan(model, batch, profile)
            plan, setting = self.plan, self._first_setting()
            self._setting = setting
            self._pattern = model.run(choice, self._images, plan=plan, setting=setting)
            self._choice = choice
            first, _ = _masks(self._pattern)

            def run(images: Tensor) -> list[Tensor]:
                return _tensors(model.run(choice, images, plan=plan, setting=setting), first)

            step: Callable[[Tensor], list[Tensor]] = compiled(run, fullgraph=True) if self.compiled else run
            stream = torch.cuda.Stream(weight.device)
            stream.wait_stream(torch.cuda.current_stream(weight.device))
            with torch.cuda.stream(stream):
                for _ in range(warm_up):
                    step(self._images)
            torch.cuda.current_stream(weight.device).wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                if choice.fused:
                    _set_rows_apart(batch * model.shape.tokens * model.shape.dim, weight)  # taken, and free at once
                self._made = step(self._images)

    def _first_setting(self) -> RunSetting:
        """Where the dial stands, in tensors that the graph reads anew at every replay."""
        model, images = self.model, self._images
        (setting,) = model.budget_state.settings(images)
        if setting.shift is None and model.policy.traits.dial == "shift" and model.calibration is not None:
            setting = replace(setting, shift=torch.zeros(self.batch, device=images.device))
        return setting

    def _set(self, images: Tensor, budget: Budgets | None, max_macs: Budgets | None) -> None:
        """Write the budget and the limit of this call where the graph reads them."""
        now, model = self._setting, self.model
        free = budget is None and max_macs is None and model.budget_state.free
        if free and now.policy is model.policy and now.shift is None and now.limit is None:
            return
        wanted = model.budget_state.settings(images, budget, max_macs)
        if len(wanted) > 1 or wanted[0].policy is not now.policy:
            raise UserError("Captured at another budget, which fixes all shapes; capture again after setting it.")
        shift, limit = wanted[0].shift, wanted[0].limit
        if (shift is not None and now.shift is None) or (limit is not None and now.limit is None):
            raise UserError("Captured before calibration, or without max_macs; capture again.")
        if now.shift is not None:
            now.shift[: len(images)] = 0.0 if shift is None else shift
        if now.limit is not None:
            now.limit[: len(images)] = float("inf") if limit is None else limit

    def __call__(self, images: Tensor, *, budget: Budgets | None = None, max_macs: Budgets | None = None) -> Output:
        """Classify `images` [b, C, H, W], b <= batch. The answer is the caller's own.

        Its trace says who was computed where; record() gives the policy's steps and facts, too.
        """
        with torch.inference_mode():
            self._make_ready(images, budget, max_macs)
            self._images[: len(images)].copy_(images)
            self._graph.replay()
            return _answer(self._pattern, self._made, len(images))

    def record(self, images: Tensor) -> Output:
        """The same pass of a whole batch, neither compiled nor replayed: its trace has the policy's steps and facts."""
        if images.shape != self._images.shape:
            raise UserError(f"record: expected images {tuple(self._images.shape)}, got {tuple(images.shape)}.")
        with torch.inference_mode():
            self._make_ready(images, None, None)
            return self.model.run(self._choice, images, plan=self.plan, setting=self._setting)

    def _make_ready(self, images: Tensor, budget: Budgets | None, max_macs: Budgets | None) -> None:
        if images.shape != self._images.shape or images.dtype != self._images.dtype or not images.is_cuda:
            self._check(images)
        if any(getattr(module, name).data_ptr() != place for module, name, place in self._ends):
            raise UserError(
                "The model was converted or moved, or its weights replaced, after capture; capture it again."
            )
        self._set(images, budget, max_macs)

    def _check(self, images: Tensor) -> None:
        self.model.check_images(images)
        if len(images) > self.batch:
            raise UserError(f"Captured for batches of up to {self.batch} images, got {len(images)}.")
        if images.shape[2:] != self._images.shape[2:] or images.device != self._images.device:
            raise UserError(
                f"Captured for images of {tuple(self._images.shape[2:])} px on {self._images.device}, "
                f"got {tuple(images.shape[2:])} on {images.device}."
            )

    def explain(self) -> str:
        """What was captured, in a line."""
        how = "compiled" if self.compiled else "as it is"
        moves = None if self.plan is None else self.plan.moves
        when = "wherever tokens leave" if moves is None else "after blocks " + ", ".join(map(str, sorted(moves)))
        rows = "" if self.plan is None else f"; rows move {when if moves != frozenset() else 'never (dense)'}"
        return f"one CUDA graph of {self.batch} images, {how}: {self.model.explain_layout(self.asked)}{rows}"


def _set_rows_apart(size: int, like: Tensor) -> list[Tensor]:
    """Blocks of memory for the rows of a pass, and a segment for what is smaller (evidence).

    Up to four are needed at once: before and after a product, a move and a norm.

    torch's allocator gives out the smallest free block that is large enough, and cuts off the rest. Without these, rows
    would be cut out of the block that qkv and the hidden layer take turns in, and those would need another. Rows of
    less than 10 MiB share segments of 20 anyway."""
    if size * like.element_size() < 10 * MIB:
        return []
    return [like.new_empty(n) for n in (size, size, size, size, 2 * MIB // like.element_size())]


def _room(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros. For 1 to 10 MiB torch's allocator sets 20 aside, and nothing else of a capture would use the rest; for
    10, it sets 10 aside."""
    size, one = math.prod(shape), MIB // like.element_size()
    held = 10 * one if one < size < 10 * one else size
    return torch.zeros(held, dtype=like.dtype, device=like.device)[:size].view(shape)


def _masks(output: Output) -> tuple[list[int], list[int]]:
    """The masks of added costs that are not in the trace, each once.

    Of each mask the first cost that has it; and for each cost the place of its mask there, -1 if it is in the trace."""
    places: dict[int, int] = {}
    which = [-1 if s.block is not None else places.setdefault(id(s.present), len(places)) for s in output.added_macs]
    return [which.index(place) for place in range(len(places))], which


def _tensors(output: Output, first: list[int]) -> list[Tensor]:
    """What a captured pass gives back, in two tensors, so that two copies serve all: logits and features one behind the
    other (three tensors where their dtypes differ), and the masks of the trace and of what was spent. _answer makes an
    Output of them again."""
    trace, values = output.trace, [output.logits, output.features]
    if output.logits.dtype == output.features.dtype:
        values = [torch.cat([value.flatten() for value in values])]
    masks = [trace.attended] if trace.updated is trace.attended else [trace.attended, trace.updated]
    masks += [torch.stack([output.added_macs[i].present for i in first])] if first else []
    return [*values, joined(masks) if len(masks) > 1 else masks[0].contiguous()]


def _answer(pattern: Output, made: list[Tensor], images: int) -> Output:
    """A copy of what the graph will overwrite, for the first `images` of its batch."""
    *values, masks = made
    whole = images == len(pattern.logits)
    if len(values) == 1:  # one behind the other
        both = values[0].clone() if whole else values[0]
        logits, features = both.tensor_split([pattern.logits.numel()])
        values = [logits.view(pattern.logits.shape), features.view(pattern.features.shape)]
    if not whole or len(made) > 2:
        values = [value[:images].clone() for value in values]
    masks = masks[:, :images].clone()
    layers, same = len(pattern.trace.attended), pattern.trace.updated is pattern.trace.attended
    attended = masks[:layers]
    updated = attended if same else masks[layers : 2 * layers]
    others = masks[layers if same else 2 * layers :].unbind()
    which = zip(pattern.added_macs, _masks(pattern)[1], strict=True)
    spent = [replace(s, present=others[i] if s.block is None else attended[s.block]) for s, i in which]
    return replace(
        pattern,
        logits=values[0],
        features=values[1],
        trace=Trace(attended, updated, pattern.trace.num_prefix_tokens, pooled=pattern.trace.pooled),
        added_macs=tuple(spent),
    )
