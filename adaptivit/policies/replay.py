"""Replay: carry out a recorded trace again, on any layout. It separates errors of execution from flipped decisions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cost import Shape
from ..decision import Decision, Keep, Merge, Skip, Trace, When, detached
from ..errors import UserError
from .base import Policy, Traits
from .records import ReplaySettings

if TYPE_CHECKING:
    from .context import BlockContext


class Replay(Policy):
    """Takes the answers of a recorded pass: `trace` is a Trace or a file made by save_trace."""

    def __init__(self, settings: ReplaySettings, shape: Shape) -> None:
        trace: Any = settings.trace
        if isinstance(trace, (str, Path)) and str(trace):
            from ..checkpoint.traces import load_trace

            trace = load_trace(trace)
        if not isinstance(trace, Trace):
            raise UserError("replay: give trace=output.trace of an earlier pass, or the path of a saved trace.")
        if len(trace.attended) != shape.layers:
            raise UserError(f"replay: the trace has {len(trace.attended)} layers, the backbone {shape.layers}.")
        answers: dict[tuple[int, When], Decision] = {(s.layer, s.when): s.decision for s in trace.steps}
        leaving = [getattr(s.decision, "leaving", None) for s in trace.steps if not isinstance(s.decision, Skip)]
        moving = any(isinstance(s.decision, Merge) for s in trace.steps)
        prefix = max(trace.num_prefix_tokens, shape.num_prefix_tokens)
        traits = Traits(
            keeps_prefix=not moving and not any(m is not None and bool(m[:, :prefix].any()) for m in leaving),
            ignores_last_mlp_patches=isinstance(answers.get((shape.layers - 1, "after"), Keep()), Keep),
            pools_alive=trace.pooled == "remaining",
        )
        super().__init__(settings, shape, traits)
        self.answers = answers
        self.grid = tuple(trace.attended.shape[1:])
        self.device = trace.attended.device

    def init_state(self, ctx: BlockContext) -> None:
        if tuple(ctx.present.shape) != self.grid:
            raise UserError(
                f"replay: the trace was recorded for {self.grid[0]} images of {self.grid[1]} tokens, "
                f"this batch has {ctx.present.shape[0]} of {ctx.present.shape[1]}."
            )
        if ctx.present.device != self.device:  # moved once
            self.device = ctx.present.device
            self.answers = {place: detached(answer, self.device) for place, answer in self.answers.items()}

    def before(self, ctx: BlockContext, state: None) -> Decision | None:
        return self.answers.get((ctx.layer, "before"))

    def between(self, ctx: BlockContext, state: None) -> Decision | None:
        return self.answers.get((ctx.layer, "between"))

    def after(self, ctx: BlockContext, state: None) -> Decision | None:
        return self.answers.get((ctx.layer, "after"))
