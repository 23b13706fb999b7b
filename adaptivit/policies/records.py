"""Every built-in policy: a record with its settings, its class, its title and colour in plots, and its recipe.

A policy of this package is its file and one record here. Nothing here imports torch, so that --help is instant.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from ..utils.coerce import Check, Count, Index, NotNegative, Positive, Share, convert, require, up_to

S = TypeVar("S", bound=type)


@dataclass(frozen=True)
class Record:
    """What the rest of the package needs to know of a policy before it is built."""

    settings: type  # a frozen dataclass; the string under a field is its meaning
    home: str | type  # "module:Class" in this package, or the class
    title: str  # in tables and pictures
    colour: str = ""  # in plots; an unused one where empty
    recipe: str = ""  # the losses that it trains with where no recipe is named; the task loss alone where empty


BUILT_IN: dict[str, Record] = {}


def record(name: str, home: str, title: str, colour: str = "", recipe: str = "") -> Callable[[S], S]:
    """Decorator of a settings dataclass: the policy `name`, whose class is at `home`."""

    def add(settings: S) -> S:
        BUILT_IN[name] = Record(settings, home, title, colour, recipe)
        return settings

    return add


Slack = Annotated[float, Check(lambda v: 0 <= v < 1, "0 <= eps < 1")]
_DISTINCT = Check(lambda v: len(set(v)) == len(v), "different block numbers")
_FALLING = Check(lambda v: len(v) > 0 and list(v) == sorted(v, reverse=True), "shares that do not rise, e.g. 0.7+0.4")
Blocks = Annotated[tuple[int, ...], Check(lambda v: len(v) > 0, "at least one block number"), _DISTINCT]


@dataclass(frozen=True)
class Settings:
    """Base of the settings: values are checked by their annotations."""

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            checks = [m for kind in (hint, *typing.get_args(hint)) for m in getattr(kind, "__metadata__", ())]
            for check in checks if value is not None else ():
                require(check.ok(value), name, check.expected, value)


@dataclass(frozen=True)
class NoSettings(Settings):
    """No settings."""


@record("static", "static:Static", "static", "#667079")
@dataclass(frozen=True)
class StaticSettings(Settings):
    """Every token through every block; with fewer blocks or channels the papers' static baselines at equal cost."""

    depth: Count | None = None
    """Only the first so many blocks: sharp halting."""
    width: Share | None = None
    """A narrower backbone: this share of the channels, the weights cut down to them."""
    share: Share | None = None
    """isoFLOP: the largest model that costs at most this share of the whole one's MACs."""
    by: Literal["depth", "width"] = "depth"
    """What `share` makes smaller."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [n for n in ("depth", "width", "share") if getattr(self, n) is not None]
        require(len(given) < 2, "static", "one of depth, width and share", " and ".join(given))


@record("aht", "aht:AHT", "AHT-ViT", "#0f8b80", recipe="aht-budget")
@dataclass(frozen=True)
class AHTSettings(Settings):
    """AHT-ViT: planned depth per token, carried out by a two-parameter supervisor."""

    threshold: Positive = 1.0
    """T: a token halts when its cumulative score reaches T - eps. Lower is cheaper."""
    eps: float = 0.01
    """Slack of the threshold, so that one layer can be enough; 0 is the letter of the paper."""
    planner_blocks: Annotated[tuple[int, ...], _DISTINCT] | None = None
    """Planners sit before these blocks, e.g. 3+6+9; default: a quarter, half and three quarters of the depth."""
    planner_width: Positive = 0.5
    """Hidden width of a planner as a share of the token's."""
    planner_context: Literal["mean", "class", "none"] = "mean"
    """What a planner reads beside the token: the mean of the present tokens, the class token, or nothing."""
    index: Index = 0
    """Which element of the feature is read."""
    gamma: float = 1.0
    """Starting scale of the supervisor."""
    beta: float = -3.0
    """Starting shift of the supervisor; `train` sets it on one batch."""
    straight_through: bool = False
    """Pass the task's gradient to the scores through the key weights (forward stays 0/1)."""
    surrogate_width: Positive = 0.25
    """Width of the soft step whose slope that gradient takes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.eps < self.threshold, "eps", "0 <= eps < threshold", self.eps)


@record("aht_merge", "aht_merge:AHTMerge", "AHT-ViT, merging", "#00594f", recipe="aht-merge")
@dataclass(frozen=True)
class AHTMergeSettings(AHTSettings):
    """AHT-ViT's improved form (ours): tokens halt by merge score and merge."""

    feature: Literal["merge_score", "class_row", "received", "fc1", "residual"] = "merge_score"
    """What the gate reads: redundancy and little attention from the class token, -log(a sqrt(n d)), as in fold; little
    attention from the class token or from all tokens, -log(n a); or an element after fc1 or of the residual stream."""
    center_per_image: Annotated[float, Check(lambda v: 0 <= v <= 1, "a share in 0..1")] = 1.0
    """Share of the feature's mean over the image's patches that is taken off: 0 lets images differ in how many tokens
    they keep, 1 compares the tokens of an image with each other."""
    gate: Literal["block", "shared"] = "block"
    """One gamma and beta a block, which start with the same spread of gamma f, or one for all blocks (the paper)."""
    gamma: float = 30.0
    """Starting scale of the gate."""
    halt_point: Literal["before_mlp", "after"] = "before_mlp"
    """Tokens halt between attention and MLP, by a feature that attention shows, or after the block (the paper)."""
    halting_blocks: Blocks | None = None
    """Blocks in which tokens halt, from 0, e.g. 3+6+9; default: from a quarter of the depth to the last but one."""
    removal: Literal["merge", "drop"] = "merge"
    """A halted patch merges into its most similar remaining patch, or vanishes (the paper)."""
    straight_through: bool = True
    """Pass the task's gradient to the scores through the key weights (forward stays 0/1)."""
    surrogate: Literal["logit", "score"] = "logit"
    """The soft step is one of gamma f + beta, which sharp gates need, or of the cumulative score."""
    surrogate_width: Positive = 0.5
    """Width of the soft step whose slope that gradient takes."""
    start_at: Literal["budget", "depth"] = "budget"
    """Training starts at its cost target, or at a mean depth of L - 1."""
    train_budget_range: tuple[float, ...] = ()
    """In training every image draws a budget between two shares of static's MACs, e.g. 0.45+0.95, so that one
    checkpoint serves all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        drawn = self.train_budget_range
        ordered = len(drawn) == 2 and 0 < drawn[0] < drawn[1] < 1
        require(not drawn or ordered, "train_budget_range", "two shares, the lower first, e.g. 0.45+0.95", drawn)
        early = self.halt_point == "before_mlp" and self.feature in ("fc1", "residual")
        require(not early, "halt_point", "'after' with a feature that attention does not show", self.feature)


@record("avit", "avit:AViT", "A-ViT", "#d1495b", recipe="avit-paper")
@dataclass(frozen=True)
class AViTSettings(Settings):
    """A-ViT: adaptive tokens by one neuron of the residual stream."""

    gate_scale: float = 5.0
    """gamma in score = sigmoid(gate_scale * x[index] - gate_center); 5 in the paper, 10 in the public recipe."""
    gate_center: float = 10.0
    """-beta: 10 in the paper; 30 (tiny) and 75 (small) in the public recipe."""
    eps: Slack = 0.01
    """A token halts when its cumulative score reaches 1 - eps."""
    index: Index = 0
    """Which element of a token is its halting neuron."""
    gate: Literal["neuron", "network"] = "neuron"
    """That neuron, or a learned network a layer (D -> D/2 -> 1), as in the paper's discussion."""
    removal: Literal["drop", "merge"] = "drop"
    """A halted patch vanishes (the paper), or merges into its most similar remaining patch."""
    finish_with_class: bool = False
    """End an image when its class token has halted: exact for the logits, cheaper; depths then stop there too."""
    surrogate_width: Positive = 0.25
    """Width of the soft step behind the cost loss's gradient."""


@dataclass(frozen=True)
class _Routing(Settings):
    """What MoD and A-MoD share."""

    capacity: Share = 0.5
    """C: ceil(C N) tokens go through a routed block, the class token among them."""
    blocks: Blocks | None = None
    """Routed blocks, e.g. 1+3+5, from 0; default: every second one."""
    first_block: Index = 1
    """The first of these; 4 keeps the first four dense (the later-layers variant)."""


@record("mod", "mod:MoD", "MoD", "#8ab0e0")
@dataclass(frozen=True)
class MoDSettings(_Routing):
    """MoD: a learned router sends the best tokens through a block; the others skip it."""

    router: Literal["linear", "mlp"] = "linear"
    """One linear layer without bias a routed block (the paper), or a small MLP."""
    gate: Literal["raw", "sigmoid", "none"] = "raw"
    """What the block's change is multiplied by: the score (the paper), its sigmoid, or nothing."""


@record("amod", "amod:AMoD", "A-MoD", "#3d5a98")
@dataclass(frozen=True)
class AMoDSettings(_Routing):
    """A-MoD: attention received in the block before decides which tokens skip this one; no parameters."""

    multiply: bool = False
    """Multiply the block's change by the score, as MoD does."""


@record("dynamicvit", "dynamicvit:DynamicViT", "DynamicViT", "#e08e1b", recipe="dynamicvit")
@dataclass(frozen=True)
class DynamicViTSettings(Settings):
    """DynamicViT: small predictors drop patches in stages."""

    keep: Share = 0.7
    """Share of the patches kept at the first stage; its square, cube ... at the next ones."""
    blocks: Blocks | None = None
    """Before which blocks, e.g. 3+6+9; default: a quarter, half and three quarters of the depth."""
    removal: Literal["drop", "merge"] = "drop"
    """A dropped patch vanishes (the paper), or merges into its most similar kept patch."""


@record("spvit", "spvit:SPViT", "SPViT", "#b3541e", recipe="spvit")
@dataclass(frozen=True)
class SPViTSettings(Settings):
    """SPViT: a multi-head selector prunes patches in stages, each stage's into one package token."""

    keep: Annotated[tuple[Share, ...], _FALLING] = (0.7, 0.39, 0.21)
    """Share of all patches kept after each stage: what training aims at, and what `select=count` keeps."""
    blocks: Blocks | None = None
    """Before which blocks, e.g. 3+6+9; default: a quarter, half and three quarters of the depth."""
    select: Literal["threshold", "count"] = "threshold"
    """A patch stays whose keep probability is at least 0.5 (the paper), or the best ones, as many in every image."""


@record("evit", "evit:EViT", "EViT", "#8e5aa8")
@dataclass(frozen=True)
class EViTSettings(Settings):
    """EViT: the class token's attention keeps patches; the others fuse into one."""

    keep: Share = 0.7
    """Share of the present patches kept at every stage."""
    blocks: Blocks | None = None
    """In which blocks, e.g. 3+6+9; default: a quarter, half and three quarters of the depth."""
    fuse: bool = True
    """The others become one patch; otherwise they vanish."""
    warm_epochs: NotNegative = 0.0
    """Training keeps everything for so many epochs; 10 in the public recipe."""
    shrink_epochs: NotNegative = 0.0
    """Then the rate falls by a cosine within so many epochs."""


@record("patch_slimming", "patch_slimming:PatchSlimming", "Patch Slimming", "#5f7f3a", recipe="patch-slimming")
@dataclass(frozen=True)
class PatchSlimmingSettings(Settings):
    """Patch Slimming: masks of patches, the same for all images, found from the last block down."""

    tolerance: Positive = 0.01
    """The fit keeps so many patches of a block that the next one's output changes by this share (squared) at most."""
    step: Count = 10
    """Patches that the fit adds at a time."""
    counts: tuple[Count, ...] | None = None
    """Instead of a tolerance: patches left after each block but the last, e.g. 196+150+100."""


@record("tome", "tome:ToMe", "ToMe", "#4c9a2a")
@dataclass(frozen=True)
class ToMeSettings(Settings):
    """ToMe: the most similar tokens merge, a few in every block."""

    r: Any = 8
    """Tokens merged a block: a number; a list, one a block, e.g. 16+12+8; in Python also a tuple (r, inflection)."""
    inflection: float = 0.0
    """How r changes over the blocks, in a line around its mean: 1 rises from 0 to 2r, -1 falls from 2r to 0."""
    prop_attn: bool = True
    """Attention in proportion to the size of merged tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        r = self.r
        if isinstance(r, tuple) and len(r) == 2:
            object.__setattr__(self, "inflection", convert("inflection", r[1], float))
            r = r[0]
        if isinstance(r, str) and "+" in r:
            r = r.split("+")
        one = not isinstance(r, (list, tuple))
        clean = [convert("r", value, int) for value in ([r] if one else r)]
        require(bool(clean) and all(value >= 0 for value in clean), "r", "numbers of tokens >= 0", self.r)
        require(one or not self.inflection, "inflection", "0 where r is a list", self.inflection)
        object.__setattr__(self, "r", clean[0] if one else clean)
        require(-1 <= self.inflection <= 1, "inflection", "a number in -1..1", self.inflection)


@record("fold", "fold:Fold", "fold", "#a3a51c")
@dataclass(frozen=True)
class FoldSettings(Settings):
    """fold (ours): low-attention, redundant patches merge into their nearest kept patch; no training needed."""

    keep: Share = 0.87
    """Share of the patches that stays at every block that merges."""
    budget: Any = None
    """Instead of `keep`: what an image may cost, evidence included: -33%, or as a share of static's MACs 0.67."""
    first_block: Index | None = None
    """Merge in every block from this one on; default: after a quarter of the depth (block 3 of 12)."""
    blocks: Blocks | None = None
    """Instead: merge in these blocks alone, e.g. 3+6+9 (with keep=0.7)."""
    power: NotNegative = 0.5
    """How much redundancy counts: score = attention (1 - cosine)^power; 0 takes attention alone."""
    value: NotNegative = 0.5
    """How much attention counts in the mean of merged patches: weights size * attention^value; 0 is ToMe's mean."""
    evidence: Literal["auto", "class", "column"] = "auto"
    """Attention from the class token (EViT's) or received from all tokens (A-MoD's); auto: class where there is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget in (None, "none"):
            object.__setattr__(self, "budget", None)
            return
        saving = re.fullmatch(r"[-−](\d+(?:\.\d+)?) ?%", str(self.budget)) if len(str(self.budget)) < 20 else None
        share = 1 - float(saving[1]) / 100 if saving else convert("budget", self.budget, float)
        require(0 < share <= 1, "budget", "a saving like -33%, or a share of static's MACs in (0, 1]", self.budget)
        object.__setattr__(self, "budget", share)


@record("act", "act:ACT", "ACT", "#8c6239", recipe="act")
@dataclass(frozen=True)
class ACTSettings(Settings):
    """ACT: the image halts, or each token (spatial ACT); the output is the mean field over layers."""

    unit: Literal["image", "token"] = "image"
    """What halts: the image, or each token by itself."""
    gate: Literal["shared", "block"] = "shared"
    """One gate for all blocks, or one a block."""
    eps: Slack = 0.01
    """A unit halts when its cumulative score reaches 1 - eps."""
    bias: float = -3.0
    """Starting bias of the gate: how late units halt at first."""
    surrogate_width: Positive = 0.25
    """Width of the soft step behind the cost loss's gradient."""


@record("confidence", "exits:Confidence", "confidence", "#c86fb0", recipe="confidence")
@dataclass(frozen=True)
class ConfidenceSettings(Settings):
    """Early exit when the head is sure enough; no parameters without heads of its own."""

    criterion: Literal["probability", "entropy"] = "probability"
    """How sure a head is: its largest probability, or 1 - entropy / log(classes)."""
    heads: Literal["shared", "own"] = "shared"
    """What answers after a block: the model's own head, or one a block (norm and linear layer)."""
    threshold: Share = 0.9
    """Leave when it is so sure. FastBERT's speed is 1 - threshold."""
    patience: Count = 1
    """After so many blocks in a row."""


@record("similarity", "exits:SimilarityExit", "similarity", "#2aa6c9", recipe="similarity")
@dataclass(frozen=True)
class SimilaritySettings(Settings):
    """Early exit when the output has stopped changing."""

    threshold: NotNegative = 0.05
    """Leave when the change from the block before is at most this."""
    measure: Literal["mse", "lpips"] = "mse"
    """Mean squared change; or LPIPS's distance of the logits, under weights that --loss.exits trains."""
    of: Literal["logits", "token"] = "logits"
    """Change of the logits, or of the token that the head reads."""
    patience: Count = 1
    """After so many blocks in a row."""


@record("pondernet", "pondernet:PonderNet", "PonderNet", "#5b5f97", recipe="pondernet")
@dataclass(frozen=True)
class PonderNetSettings(Settings):
    """PonderNet: halting as a chance at every layer, near a geometric prior."""

    prior: Annotated[float, Check(lambda v: 0 < v < 1, "a probability in (0, 1)")] = 0.1
    """Chance of stopping at each layer that the prior assumes; its mean depth is about 1 / prior."""
    unit: Literal["image", "token"] = "image"
    """What halts: the image, or each token by itself."""
    gate_scale: float = 5.0
    """gamma in lambda = sigmoid(gate_scale * x[index] - gate_center), A-ViT's neuron."""
    gate_center: float = 10.0
    """Its shift."""
    index: Index = 0
    """Which element is read."""
    sample: Annotated[int, up_to(2**63 - 1, 0)] | None = None
    """Draw where to stop from this seed; default: where the cumulative chance passes one half."""


@record("replay", "replay:Replay", "replay")
@dataclass(frozen=True)
class ReplaySettings(Settings):
    """Carry out a recorded trace again."""

    trace: Any = ""
    """A Trace, or the path of one saved by adaptivit.save_trace."""
