"""Every policy setting: its default, its meaning, its limits. Nothing here imports torch, so that --help is instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..utils.coerce import convert, require


@dataclass(frozen=True)
class StaticSettings:
    """Every token through every block; with fewer blocks or channels the papers' static baselines at equal cost."""

    depth: int | None = None
    """Only the first so many blocks: sharp halting."""
    width: float | None = None
    """A narrower backbone: this share of the channels, the weights cut down to them."""
    share: float | None = None
    """isoFLOP: the largest model that costs at most this share of the whole one's MACs."""
    by: Literal["depth", "width"] = "depth"
    """What `share` makes smaller."""

    def __post_init__(self) -> None:
        require(self.depth is None or self.depth >= 1, "depth", "a number of blocks >= 1", self.depth)
        for name in ("width", "share"):
            value = getattr(self, name)
            require(value is None or 0 < value <= 1, name, "a share in (0, 1]", value)
        given = [n for n in ("depth", "width", "share") if getattr(self, n) is not None]
        require(len(given) < 2, "static", "one of depth, width and share", " and ".join(given))


@dataclass(frozen=True)
class NoSettings:
    """No settings."""


@dataclass(frozen=True)
class AHTSettings:
    """AHT-ViT: planned depth per token, carried out by a two-parameter supervisor."""

    threshold: float = 1.0
    """T: a token halts when its cumulative score reaches T - eps. Lower is cheaper."""
    eps: float = 0.01
    """Slack of the threshold, so that one layer can be enough; 0 is the letter of the paper."""
    stages: tuple[int, ...] | None = None
    """Planners sit after this many blocks, e.g. 3+6+9; default: a quarter, half and three quarters of the depth."""
    feature: Literal["fc1", "gelu", "residual", "received", "class_row", "worth"] = "fc1"
    """What the supervisor reads: an element after fc1, after its activation, or of the residual stream (A-ViT); how
    little attention the token gets, from all or from the class token: -log(n a); or how little it is worth: little
    attended by the class token and like another patch, -log(a sqrt(n d)), as in fold."""
    index: int = 0
    """Which element of the feature is read."""
    relative: float = 0.0
    """How much of the mean over the image's live patches is taken off the feature: 0 lets images differ in how many
    tokens they keep, 1 leaves that to the plan and compares the tokens of an image with each other."""
    gamma: float = 1.0
    """Starting scale of the supervisor, shared by all layers."""
    beta: float = -3.0
    """Starting shift of the supervisor; `train` calibrates it on one batch."""
    learn_gate: bool = True
    """Whether gamma and beta are learned."""
    gate: Literal["shared", "layer"] = "shared"
    """One gamma and beta for all layers (the paper), or one for each, which start so that gamma f is spread alike."""
    decide: Literal["after", "between"] = "after"
    """Tokens halt after a block (the paper), or already between its attention and its MLP, which needs a feature that
    attention shows."""
    spare: int = 0
    """In so many first blocks nobody halts and nothing is looked at."""
    supervised: tuple[int, ...] | None = None
    """Blocks that have a supervisor, counted from 0, e.g. 3+6+9: tokens leave there alone, and nothing is looked at
    elsewhere. Default: all that are not spared, but the last."""
    start: Literal["depth", "budget"] = "depth"
    """Training starts at a mean depth of L - 1, or at the cost that --budget-share names."""
    sample: tuple[float, ...] = ()
    """In training every image gets a budget of its own, drawn between two shares of static's MACs, e.g. 0.45+0.95; then
    one checkpoint serves all of them."""
    class_token: Literal["stays", "mean_field"] = "stays"
    """The class token never halts and the head reads the last layer, or A-ViT's mean-field readout."""
    halted: Literal["frozen", "zeroed"] = "frozen"
    """What a pooling head sees of a halted token: its last value, or zeros."""
    straight_through: bool = False
    """Pass the task's gradient to the scores through the key weights (forward stays 0/1)."""
    tau: float = 0.25
    """Width of the soft step whose slope that gradient takes: in the cumulative score, or with slope=logit in f."""
    slope: Literal["score", "logit"] = "score"
    """Whether the soft step is one of the cumulative score, or of gamma f + beta: for gates so sharp that a score is
    0 or 1."""
    plan_weight: float = 0.0
    """How much the plan acts on the score, kappa (l - N_plan); 0 is the paper: planners enter only the loss."""
    plan_against: Literal["layer", "image"] = "layer"
    """What an acting plan is held against: the layer, kappa (l - N_plan), or the mean plan of the image's live patches,
    kappa (mean - N_plan), which says who of an image leaves and not how many."""
    plan_range: Literal["1..L", "s..L", "s..L+1"] = "1..L"
    """Depths that a planner of stage s can predict."""
    planner_width: float = 0.5
    """Hidden width of a planner as a share of the token's."""
    planner_context: Literal["mean", "class", "none"] = "mean"
    """What a planner sees beside the token: the mean of the live tokens, the class token, or nothing."""
    leave: Literal["drop", "fold"] = "drop"
    """A halted patch vanishes (the paper), or folds into its most similar live patch."""

    def __post_init__(self) -> None:
        require(self.threshold > 0, "threshold", "a number > 0", self.threshold)
        require(0 <= self.eps < self.threshold, "eps", "0 <= eps < threshold", self.eps)
        require(self.tau > 0, "tau", "a number > 0", self.tau)
        require(self.index >= 0, "index", "an index >= 0", self.index)
        require(self.plan_weight >= 0, "plan_weight", "a number >= 0", self.plan_weight)
        require(0 <= self.relative <= 1, "relative", "a share in 0..1", self.relative)
        require(self.planner_width > 0, "planner_width", "a number > 0", self.planner_width)
        require(self.spare >= 0, "spare", "a number of blocks >= 0", self.spare)
        _distinct("supervised", self.supervised)
        ordered = len(self.sample) == 2 and 0 < self.sample[0] < self.sample[1] < 1
        require(not self.sample or ordered, "sample", "two shares, the lower first, e.g. 0.45+0.95", self.sample)
        early = self.decide == "between"
        shown = self.feature in ("received", "class_row", "worth")
        require(not early or shown, "decide", "after, or a feature that attention shows", f"between, {self.feature}")
        stays = self.class_token == "stays"
        require(not early or stays, "decide", "after, or class_token=stays", f"between, {self.class_token}")
        stages = (1,) if self.stages is None else self.stages
        require(all(s >= 1 for s in stages), "stages", "block numbers in 1..L", stages)
        require(len(set(stages)) == len(stages), "stages", "different block numbers", stages)
        require(not self.plan_weight or bool(stages), "plan_weight", "0 where there is no stage", self.plan_weight)


@dataclass(frozen=True)
class AViTSettings:
    """A-ViT: adaptive tokens by one neuron of the residual stream."""

    gate_scale: float = 5.0
    """gamma in score = sigmoid(gate_scale * x[index] - gate_center); 5 in the paper, 10 in the public recipe."""
    gate_center: float = 10.0
    """-beta: 10 in the paper; 30 (tiny) and 75 (small) in the public recipe."""
    eps: float = 0.01
    """A token halts when its cumulative score reaches 1 - eps."""
    index: int = 0
    """Which element of a token is its halting neuron."""
    gate: Literal["neuron", "network"] = "neuron"
    """That neuron, or a learned network a layer (D -> D/2 -> 1), as in the paper's discussion."""
    leave: Literal["drop", "fold"] = "drop"
    """A halted patch vanishes (the paper), or folds into its most similar live patch."""
    finish_with_class: bool = False
    """End an image when its class token has halted: exact for the logits, cheaper; depths then stop there too."""
    tau: float = 0.25
    """Width of the soft step behind the budget loss's gradient."""

    def __post_init__(self) -> None:
        require(0 <= self.eps < 1, "eps", "0 <= eps < 1", self.eps)
        require(self.index >= 0, "index", "an index >= 0", self.index)
        require(self.tau > 0, "tau", "a number > 0", self.tau)


@dataclass(frozen=True)
class _Routing:
    """What MoD and A-MoD share."""

    capacity: float = 0.5
    """C: ceil(C N) tokens go through a routed block, the class token among them."""
    blocks: tuple[int, ...] | None = None
    """Routed blocks, e.g. 1+3+5, from 0; default: every second one."""
    first: int = 1
    """The first of these; 4 keeps the first four dense (the later-layers variant)."""

    def __post_init__(self) -> None:
        require(0 < self.capacity <= 1, "capacity", "a share in (0, 1]", self.capacity)
        require(self.first >= 0, "first", "a block number >= 0", self.first)
        _distinct("blocks", self.blocks)


def _distinct(name: str, blocks: tuple[int, ...] | None) -> None:
    if blocks is not None:
        require(len(blocks) > 0, name, "at least one block number", blocks)
        require(len(set(blocks)) == len(blocks), name, "different block numbers", blocks)


@dataclass(frozen=True)
class MoDSettings(_Routing):
    """MoD: a learned router sends the best tokens through a block; the others skip it."""

    router: Literal["linear", "mlp"] = "linear"
    """One linear layer without bias a routed block (the paper), or a small MLP."""
    gate: Literal["raw", "sigmoid", "none"] = "raw"
    """What the block's change is multiplied by: the score (the paper), its sigmoid, or nothing."""


@dataclass(frozen=True)
class AMoDSettings(_Routing):
    """A-MoD: attention received in the block before decides who skips this one; no parameters."""

    multiply: bool = False
    """Multiply the block's change by the score, as MoD does."""


@dataclass(frozen=True)
class DynamicViTSettings:
    """DynamicViT: small predictors drop patches in stages."""

    keep: float = 0.7
    """Share of the patches kept at the first stage; its square, cube ... at the next ones."""
    stages: tuple[int, ...] | None = None
    """Before which blocks, e.g. 3+6+9; default: a quarter, half and three quarters of the depth."""
    leave: Literal["drop", "fold"] = "drop"
    """A dropped patch vanishes (the paper), or folds into its most similar kept patch."""

    def __post_init__(self) -> None:
        require(0 < self.keep <= 1, "keep", "a share in (0, 1]", self.keep)
        _distinct("stages", self.stages)


@dataclass(frozen=True)
class EViTSettings:
    """EViT: the class token's attention keeps patches; the others fuse into one."""

    keep: float = 0.7
    """Share of the present patches kept at every stage."""
    stages: tuple[int, ...] | None = None
    """In which blocks, e.g. 3+6+9; default: a quarter, half and three quarters of the depth."""
    fuse: bool = True
    """The others become one patch; otherwise they vanish."""
    warm_epochs: float = 0.0
    """Training keeps everything for so many epochs; 10 in the public recipe."""
    shrink_epochs: float = 0.0
    """Then the rate falls by a cosine within so many epochs."""

    def __post_init__(self) -> None:
        require(0 < self.keep <= 1, "keep", "a share in (0, 1]", self.keep)
        _distinct("stages", self.stages)
        require(self.warm_epochs >= 0, "warm_epochs", "a number >= 0", self.warm_epochs)
        require(self.shrink_epochs >= 0, "shrink_epochs", "a number >= 0", self.shrink_epochs)


@dataclass(frozen=True)
class ToMeSettings:
    """ToMe: the most alike tokens merge, a few in every block."""

    r: Any = 8
    """Tokens merged a block: a number; a list, one a block, e.g. 16+12+8; in Python also a tuple (r, inflection)."""
    inflection: float = 0.0
    """How r changes over the blocks, in a line around its mean: 1 rises from 0 to 2r, -1 falls from 2r to 0."""
    prop_attn: bool = True
    """Attention in proportion to the size of merged tokens."""

    def __post_init__(self) -> None:
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


@dataclass(frozen=True)
class FoldSettings:
    """fold (ours): who is little attended and well represented folds into its likeness; no training needed."""

    keep: float = 0.87
    """Share of the patches that stays at every block that folds."""
    budget: float | None = None
    """Instead of `keep`: a share of static's MACs, evidence included, e.g. 0.67."""
    blocks: int | None = None
    """Fold in every block from this one on; default: after a quarter of the depth (block 3 of 12)."""
    stages: tuple[int, ...] | None = None
    """Instead: fold in these blocks alone, e.g. 3+6+9 (with keep=0.7)."""
    power: float = 0.5
    """How much likeness counts in who leaves: score = attention (1 - cosine)^power; 0 looks at attention alone."""
    value: float = 0.5
    """How much attention counts in the mean of those that meet: weights size * attention^value; 0 is ToMe's mean."""
    evidence: Literal["auto", "class", "column"] = "auto"
    """Attention from the class token (EViT's) or received from all tokens (A-MoD's); auto: class where there is one."""

    def __post_init__(self) -> None:
        require(0 < self.keep <= 1, "keep", "a share in (0, 1]", self.keep)
        require(self.budget is None or 0 < self.budget <= 1, "budget", "a share in (0, 1]", self.budget)
        require(self.blocks is None or self.blocks >= 0, "blocks", "a block number >= 0", self.blocks)
        require(self.power >= 0, "power", "a number >= 0", self.power)
        require(self.value >= 0, "value", "a number >= 0", self.value)
        _distinct("stages", self.stages)


@dataclass(frozen=True)
class ACTSettings:
    """ACT: the whole image halts; the output is the mean field over layers."""

    eps: float = 0.01
    """An image halts when its cumulative score reaches 1 - eps."""
    bias: float = -3.0
    """Starting bias of the gate: how late images halt at first."""
    tau: float = 0.25
    """Width of the soft step behind the budget loss's gradient."""

    def __post_init__(self) -> None:
        require(0 <= self.eps < 1, "eps", "0 <= eps < 1", self.eps)
        require(self.tau > 0, "tau", "a number > 0", self.tau)


@dataclass(frozen=True)
class ConfidenceSettings:
    """Early exit when the largest probability is high enough; no parameters."""

    threshold: float = 0.9
    """Leave at this probability."""
    patience: int = 1
    """After so many blocks in a row."""

    def __post_init__(self) -> None:
        require(0 < self.threshold <= 1, "threshold", "a probability in (0, 1]", self.threshold)
        require(self.patience >= 1, "patience", "a number of blocks >= 1", self.patience)


@dataclass(frozen=True)
class SimilaritySettings:
    """Early exit when the output has stopped changing; no parameters."""

    threshold: float = 0.05
    """Leave when the mean squared change from the block before is at most this."""
    of: Literal["logits", "token"] = "logits"
    """Change of the logits, or of the token that the head reads."""
    patience: int = 1
    """After so many blocks in a row."""

    def __post_init__(self) -> None:
        require(self.threshold >= 0, "threshold", "a number >= 0", self.threshold)
        require(self.patience >= 1, "patience", "a number of blocks >= 1", self.patience)


@dataclass(frozen=True)
class PonderNetSettings:
    """PonderNet: halting as a chance at every layer, near a geometric prior."""

    prior: float = 0.1
    """Chance of stopping at each layer that the prior assumes; its mean depth is about 1 / prior."""
    unit: Literal["image", "token"] = "image"
    """Who halts: the image, or each token by itself."""
    gate_scale: float = 5.0
    """gamma in lambda = sigmoid(gate_scale * x[index] - gate_center), A-ViT's neuron."""
    gate_center: float = 10.0
    """Its shift."""
    index: int = 0
    """Which element is read."""
    sample: int | None = None
    """Draw where to stop from this seed; default: where the cumulative chance passes one half."""

    def __post_init__(self) -> None:
        require(0 < self.prior < 1, "prior", "a chance in (0, 1)", self.prior)
        require(self.index >= 0, "index", "an index >= 0", self.index)


@dataclass(frozen=True)
class ReplaySettings:
    """Carry out a recorded trace again."""

    trace: Any = ""
    """A Trace, or the path of one saved by adaptivit.save_trace."""
