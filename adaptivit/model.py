"""An adaptive ViT: a backbone and a policy, run by the loop in forward.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import policies
from .backbones.families import family_of
from .backbones.preprocessing import Preprocessing
from .backbones.protocol import Backbone
from .budget.control import Budgets, BudgetState, RunSetting, join_outputs
from .budget.curve import Calibration
from .cost import CostModel, Shape
from .decision import Trace
from .errors import UserError
from .execution import select
from .execution.cuda_graph import Captured
from .execution.select import Choice
from .forward import forward
from .layouts import Layout, PackedOnDevice, RowSchedule
from .output import Output


class AdaptiveViT(nn.Module):
    """`vit` is the backbone's module, untouched; `policy` decides. Both have ordinary parameters."""

    full_last_mlp = False  # compact layouts take patches through the last MLP though nothing reads them

    def __init__(self, vit: nn.Module, policy: str, settings: dict[str, Any], name: str | None = None) -> None:
        super().__init__()
        self._family = family_of(vit)
        self.vit: Any = vit
        self.shape = self.backbone.inspect()
        self.policy_name = policy
        self.backbone_name = name  # the timm name, where there is one
        self.policy = policies.build(policy, self.shape, settings)
        self.whole: Shape | None = None  # of the backbone that this one was cut out of (static:width)
        self.recompute = False  # in training: execution/checkpointed.py
        self.task = "classification"  # by name; adaptivit.tasks has what it means
        self.class_names: list[str] | None = None  # of the outputs
        self.budget_state = BudgetState(self)
        self.preprocessing = Preprocessing.of(vit, self.backbone.image_size)
        self.notes: dict[str, Any] = {}  # what its checkpoint says beside the model: results, calibration ...
        self.noted = ""  # the weights and settings for which they hold (checkpoint.identity)

    def forward(
        self,
        images: Tensor,
        *,
        layout: str = "auto",
        aux: Collection[str] = (),
        budget: Budgets | None = None,
        max_macs: Budgets | None = None,
    ) -> Output:
        """Classify `images` [B, C, H, W].

        layout: "masked", "packed", "gathered" or "auto". aux: facts wanted though they do not act ("plan"), "tokens"
        for the last value of every token, "patches" for those of the patches after the final norm. budget, max_macs:
        instead of the model's own, for all images or one an image.
        """
        self.check_images(images)
        choice = self.choose(layout, images.device)
        if budget is None and max_macs is None and self.budget_state.free:
            return self.run(choice, images, aux)
        settings = self.budget_state.settings(images, budget, max_macs, aux)
        if len(settings) == 1:
            return self.run(choice, images, aux, setting=settings[0])
        return join_outputs(settings, [self.run(choice, images[s.images], aux, setting=s) for s in settings])

    @property
    def backbone(self) -> Backbone:
        """`vit` as the loop uses it."""
        return self._family(self.vit)

    def run(
        self,
        choice: Choice,
        images: Tensor,
        aux: Collection[str] = (),
        plan: RowSchedule | None = None,
        setting: RunSetting | None = None,
    ) -> Output:
        """One pass with a layout and an executor that were chosen, on checked images."""
        make: Callable[[Tensor, int], Layout] = choice.layout
        if choice.layout is PackedOnDevice:
            make = functools.partial(PackedOnDevice, plan=plan)
        return forward(choice.executor, make, images, setting or RunSetting(self.policy), aux, self.full_last_mlp)

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
        """Measure what each position of the policy's dial costs, keep the curve, and set `budget`.

        On unlabelled images [n, C, H, W], or batches of them. A budget in milliseconds is for `latency_batch` images
        (default 1) on the model's device. See docs/guide/calibrate.md."""
        from .budget.measure import calibrate

        return calibrate(self, images, budget, batch_size, latency_batch, progress)

    @property
    def calibration(self) -> Calibration | None:
        """What each position of the policy's dial costs."""
        return self.budget_state.calibration

    @property
    def budget(self) -> str | None:
        """What an image may cost in the mean: "0.8 GMACs", "-33%", "3 ms"; None: what the policy's settings give."""
        budget = self.budget_state.budget
        return None if budget is None else budget.text

    @budget.setter
    def budget(self, given: str | float | None) -> None:
        self.budget_state.set_budget(given)

    @property
    def max_macs(self) -> str | None:
        """What any single image may cost at most, whatever it shows: "1.0 GMACs", "-20%"; None: no limit."""
        limit = self.budget_state.limit
        return None if limit is None else limit[0]

    @max_macs.setter
    def max_macs(self, given: str | float | None) -> None:
        self.budget_state.set_limit(given)

    def choose(self, layout: str, device: torch.device) -> Choice:
        """The layout and the executor that run on this device."""
        fixed = self.policy.traits.fixed_counts_in_training if self.training else self.policy.traits.fixed_counts
        return select.choose(
            self.backbone,
            layout,
            device,
            next(self.parameters()).dtype,
            fixed_counts=fixed,
            training=self.training,
            recompute=self.recompute,
        )

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
        GPU, is chosen where rows are moved (execution/row_schedule.py). compile: torch.compile joins what lies between
        the kernels first (seconds on many cores, minutes on two; docs/guide/gpu.md).
        """
        return Captured(self, batch, layout, profile, compile)

    def explain_layout(self, layout: str = "auto") -> str:
        """Which layout would run now, with which kernels, and why, in a line."""
        device = next(self.parameters()).device
        with torch.inference_mode():
            return self.choose(layout, device).explain(device)

    def check_images(self, images: Tensor) -> None:
        """Refuse what is no batch of images for this model."""
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
            what = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise UserError(f"Expected a float tensor [batch, channels, height, width], got {what}.")
        if len(images) == 0:
            raise UserError("Expected at least one image, got an empty batch.")
        backbone, dtype = self.backbone, next(self.parameters()).dtype
        if images.shape[1] != backbone.in_chans:
            raise UserError(f"Expected images with {backbone.in_chans} channels, got {images.shape[1]}.")
        if images.dtype != dtype and not torch.is_autocast_enabled(images.device.type):
            raise UserError(f"Expected images of {dtype}, as the weights are, got {images.dtype}.")
        backbone.check_size(*images.shape[2:])

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
