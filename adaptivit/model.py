"""An adaptive ViT: a timm backbone and a policy, run by the loop in forward.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from . import layouts, policies
from .backbones import timm_vit
from .backbones.timm_vit import Shape, inspect
from .budget import control
from .budget import curve as budgets
from .budget.curve import Budget, Calibration
from .cost import CostModel
from .data.preprocess import Preprocessing
from .decision import Trace
from .errors import UserError
from .execution import checkpointed, compiled, cpu, triton
from .execution.cuda_graph import Captured
from .forward import forward
from .layouts import Layout, PackedOnDevice, RowSchedule
from .output import Output
from .policies.base import Policy


class AdaptiveViT(nn.Module):
    """`vit` is the timm model, untouched; `policy` decides. Both are ordinary modules with ordinary parameters."""

    whole_end = False  # compact layouts take patches through the last MLP though nobody reads them

    def __init__(self, vit: VisionTransformer, policy: str, settings: dict[str, Any], name: str | None = None) -> None:
        super().__init__()
        self.shape = inspect(vit)
        self.vit = vit
        self.policy_name = policy
        self.backbone_name = name  # the timm name, where there is one
        self.policy = policies.build(policy, self.shape, settings)
        self.whole: Shape | None = None  # of the backbone that this one was cut out of (static:width)
        self.regional = False  # the blocks of training, and of a teacher, are compiled (--compile blocks)
        self.recompute = False  # in training: blocks are computed again in the backward pass instead of kept
        self.class_names: list[str] | None = None
        self.calibration: Calibration | None = None  # what each position of the policy's dial costs
        self._budget: Budget | None = None
        self._settled: tuple[torch.device, float | None] | None = None  # the position of that budget
        self._max_macs: str | None = None
        self._limit: float | None = None
        self._turned: dict[float, Policy] = {}  # this policy at other positions, with the same parameters
        self.preprocessing = Preprocessing.of(vit)
        self.notes: dict[str, Any] = {}  # what its checkpoint says beside the model: results, calibration ...
        self.noted = ""  # the weights and settings for which they hold (checkpoint.identity)

    def forward(
        self,
        images: Tensor,
        *,
        layout: str = "auto",
        aux: Collection[str] = (),
        budget: control.Budgets | None = None,
        max_macs: control.Budgets | None = None,
    ) -> Output:
        """Classify `images` [B, C, H, W].

        layout: "masked", "packed", "gathered" or "auto". aux: facts wanted though they do not act ("plan"), "tokens"
        for the last value of every token, "patches" for those of the patches after the final norm. budget, max_macs:
        instead of the model's own, for all images or one an image.
        """
        self._check(images)
        choice = self._choose(layout, images.device)
        if budget is None and max_macs is None and self._budget is None and self._limit is None:
            return self._run(choice, images, aux)
        turns = control.split_batch(self, images, budget, max_macs, aux)
        if len(turns) == 1:
            return self._run(choice, images, aux, turn=turns[0])
        return control.join_outputs(turns, [self._run(choice, images[t.images], aux, turn=t) for t in turns])

    def _run(
        self,
        choice: layouts.Choice,
        images: Tensor,
        aux: Collection[str] = (),
        plan: RowSchedule | None = None,
        turn: control.RunSetting | None = None,
    ) -> Output:
        turn = control.RunSetting(self.policy) if turn is None else turn
        make: Callable[[Tensor, int], Layout] = choice.type
        if choice.type is PackedOnDevice:
            make = functools.partial(PackedOnDevice, plan=plan)
        blocks: Any = triton if choice.fused else timm_vit
        if blocks is timm_vit and self.regional and (self.training or not choice.type.drops_rows):
            blocks = compiled
        if self.recompute and self.training and torch.is_grad_enabled():
            blocks = checkpointed
        if blocks is timm_vit and choice.type.drops_rows and not self.training:
            blocks = cpu if cpu.refusal(self.vit, images.dtype, images.device) is None else timm_vit
        whole = self.whole_end or blocks is compiled  # which would need one more graph
        return forward(self.vit, self.shape, turn.policy, make, images, aux, blocks, turn.shift, turn.limit, whole)

    # -- what it may cost --------------------------------------------------------------------------------------
    def calibrate(
        self,
        images: Tensor | Sequence[Tensor],
        budget: str | float | None = None,
        *,
        batch_size: int = 32,
        latency_batch: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Calibration:
        """Measure on unlabelled images [n, C, H, W] (or batches of them) what each position of the policy's dial costs,
        keep the curve, and set `budget`. A budget in milliseconds is for `latency_batch` images (default 1) on the
        model's device. See docs/calibrate.md."""
        from .budget.measure import calibrate

        return calibrate(self, images, budget, batch_size, latency_batch, progress)

    @property
    def budget(self) -> str | None:
        """What an image may cost in the mean: "0.8 GMACs", "-33%", "3 ms"; None: what the policy's settings give."""
        return None if self._budget is None else self._budget.text

    @budget.setter
    def budget(self, given: str | float | None) -> None:
        made = None if given is None else budgets.parse(given)
        made = None if made is None or made.free else made
        device = next(self.parameters()).device
        settled = None if made is None else (device, control.solve(self, made, device))
        self._budget, self._settled = made, settled

    def _position(self, device: torch.device) -> float | None:
        """Where the budget has put the dial. Milliseconds are settled anew on every device."""
        if self._budget is None:
            return None
        if self._settled is None or (self._budget.ms is not None and self._settled[0] != device):
            self._settled = (device, control.solve(self, self._budget, device))
        return self._settled[1]

    def _turn(self, position: float | None) -> Policy:
        """The policy with its dial, one that fixes counts, at this position."""
        if position is None:
            return self.policy
        if position not in self._turned:
            self._turned[position] = self.policy.turned(position)
        return self._turned[position]

    @property
    def max_macs(self) -> str | None:
        """What any single image may cost at most, whatever it shows: "1.0 GMACs", "-20%"; None: no limit."""
        return self._max_macs

    @max_macs.setter
    def max_macs(self, given: str | float | None) -> None:
        limit = None if given is None else control.checked_limit(self, given, self.shape.tokens)
        self._limit, self._max_macs = limit, None if limit is None else budgets.parse(given).text

    def _choose(self, layout: str, device: torch.device) -> layouts.Choice:
        refusal = "training" if self.training else triton.refusal(self.vit, next(self.parameters()).dtype, device)
        equal = self.policy.equal_in_training if self.training else self.policy.equal
        return layouts.choose(layout, training=self.training, device=device, equal=equal, refusal=refusal)

    def capture(
        self,
        batch: int,
        *,
        layout: str = "auto",
        profile: Tensor | Trace | Sequence[float] | None = None,
        compile: bool = True,
    ) -> Captured:
        """This model's forward pass for batches of up to `batch` images as one CUDA graph: call it like the model.

        profile: some images, a trace or the mean live share of every block; from it, and from times measured on this
        GPU, is chosen where rows are moved (schedule.py). compile: let torch.compile join what lies between the
        kernels first (up to half a minute, once).
        """
        return Captured(self, batch, layout, profile, compile)

    def explain_layout(self, layout: str = "auto") -> str:
        """Which layout would run now, with which kernels, and why, in a line."""
        device = next(self.parameters()).device
        dtype = next(self.parameters()).dtype
        with torch.inference_mode():
            choice, refusal = self._choose(layout, device), triton.refusal(self.vit, dtype, device)
            lean_too = choice.type.drops_rows and not self.training and cpu.refusal(self.vit, dtype, device) is None
        how = "fused Triton kernels" if choice.fused else "products in place" if lean_too else "timm's modules"
        because = "" if choice.fused or refusal is None or device.type == "cpu" else f" (no fused kernels: {refusal})"
        return f"{choice.type.name} on {device.type} with {how}{because}: {choice.why}"

    def _check(self, images: Tensor) -> None:
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
            what = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise UserError(f"Expected a float tensor [batch, channels, height, width], got {what}.")
        if len(images) == 0:
            raise UserError("Expected at least one image, got an empty batch.")
        if images.shape[1] != self.vit.in_chans:
            raise UserError(f"Expected images with {self.vit.in_chans} channels, got {images.shape[1]}.")
        wanted = next(self.parameters()).dtype
        if images.dtype != wanted and not torch.is_autocast_enabled(images.device.type):
            raise UserError(f"Expected images of {wanted}, as the weights are, got {images.dtype}.")
        patch, embed = self.vit.patch_embed.patch_size, self.vit.patch_embed
        whole = all(s % p == 0 for s, p in zip(images.shape[2:], patch, strict=True))
        if self.vit.dynamic_img_size and not embed.dynamic_img_pad and not whole:
            raise UserError(
                f"Expected sides that are multiples of the {patch[0]} x {patch[1]} px patch, "
                f"got {images.shape[2]} x {images.shape[3]}."
            )
        size = self.vit.patch_embed.img_size
        if not self.vit.dynamic_img_size and size is not None and tuple(images.shape[2:]) != tuple(size):
            raise UserError(
                f"Expected images of {size[0]} x {size[1]} px, got {images.shape[2]} x {images.shape[3]}. "
                "Resize them, or create the model with img_size=..."
            )

    def static_macs(self, output: Output) -> float:
        """MACs an image of the whole backbone with every token everywhere: what a saving is measured against."""
        return CostModel(self.whole or self.shape, output.costs.tokens).static

    @property
    def settings(self) -> dict[str, Any]:
        """The policy's settings."""
        return asdict(self.policy.settings)

    def save_pretrained(self, directory: str | Path, *, images: Any = None, **extra: Any) -> None:
        """Write model.safetensors (timm's keys, and policy.*), config.json and a model card; adaptivit.load reads them.

        images: pictures or their paths, or "samples" for scikit-learn's two photos: the card shows where tokens
        stopped. extra: what config.json is to say beside the model, e.g. results={"validation": ...}.
        """
        from .checkpoint.format import save

        save(self, directory, extra, images)

    def push_to_hub(self, repo: str, *, images: Any = "samples", **options: Any) -> str:
        """Save to a repository on the Hugging Face Hub and return its address; options as in hub.push."""
        from .checkpoint.hub import push

        return push(self, repo, images=images, **options)
