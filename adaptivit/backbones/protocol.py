"""What a backbone family fills in, in one file: how a model embeds images, runs a block on rows, and reads out.

Shapes: B images, N slots, D width, H heads, d head width, F hidden width of the MLP; R rows of a layout, in any order.

A block is run as

    y = norm1(x);   q, k, v = qkv(y);   x = x + project(attend(q, k, v), y)
    y = norm2(x);   h = mlp_hidden(y);   x = x + mlp_out(h)

where only `attend` mixes rows; layouts do that. Everything else acts row by row, so it does not matter which tokens are
left or where they are stored. A module is used as it is: its weights and state-dict keys stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ..cost import Shape
from ..errors import UserError


class Rates(NamedTuple):
    """Probabilities of dropping, all 0 in evaluation."""

    attention: float  # of attention weights
    branch1: float  # of the whole attention branch, image by image (stochastic depth)
    branch2: float  # of the whole MLP branch


class AttentionWeights(NamedTuple):
    """The modules of an attention branch that is norm, product, attention, product and nothing else."""

    norm: nn.LayerNorm
    qkv: nn.Linear  # weight [3 H d, D]
    proj: nn.Linear  # weight [D, H d]
    scale: Tensor | None  # [D] LayerScale
    heads: int
    head_dim: int


class MlpWeights(NamedTuple):
    """The modules of an MLP branch that is norm, product, exact GELU, product and nothing else."""

    norm: nn.LayerNorm
    fc1: nn.Linear  # weight [F, D]
    fc2: nn.Linear  # weight [D, F]
    scale: Tensor | None  # [D] LayerScale


class Stem(NamedTuple):
    """A patch embedding that is one product for every patch."""

    weight: Tensor  # [D, C patch_height patch_width]
    bias: Tensor | None  # [D]
    patch_size: tuple[int, int]
    grid_size: tuple[int, int]  # patches (rows, columns)


class Backbone(ABC):
    """A model of one family, as the loop and the executors use it."""

    family: ClassVar[str]  # name in checkpoints
    stored: ClassVar[type | None] = None  # TypedDict of `arguments`, whose types and ranges a checkpoint's must have
    head_keys: ClassVar[tuple[str, ...]] = ("head.weight", "head.bias")  # of the classifier, its weight first

    def __init__(self, module: Any) -> None:
        self.module = module

    # -- what it is ------------------------------------------------------------------------------------------
    @classmethod
    @abstractmethod
    def drives(cls, module: nn.Module) -> bool:
        """Whether this family is the one for the module; `inspect` may still refuse it."""

    @abstractmethod
    def inspect(self) -> Shape:
        """The model's facts; UnsupportedBackbone names the part that the loop cannot run."""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[Any]: ...

    @property
    @abstractmethod
    def in_chans(self) -> int: ...

    @property
    @abstractmethod
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels that the model was made for."""

    @property
    @abstractmethod
    def patch_size(self) -> tuple[int, int]: ...

    @property
    def drop_path_rate(self) -> float:
        """Of the last block, which has the highest."""
        return 0.0

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Patches (rows, columns) of an image of this size."""
        return height // self.patch_size[0], width // self.patch_size[1]

    def check_size(self, height: int, width: int) -> None:
        """Refuse images of a size that the model does not take."""
        size = self.image_size
        if (height, width) != tuple(size):
            raise UserError(
                f"Expected images of {size[0]} x {size[1]} px, got {height} x {width}. "
                "Resize them, or create the model with img_size=..."
            )

    # -- making it -------------------------------------------------------------------------------------------
    @classmethod
    @abstractmethod
    def build(cls, arguments: Mapping[str, Any]) -> nn.Module:
        """The module that `arguments` describes: those of `arguments()`, with num_classes (0: no classifier), img_size
        (a number, or height and width) and drop_path_rate beside them where they are asked for."""

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Plain values from which `build` makes such a module again, for checkpoints; classes and image size are stored
        beside them."""

    @abstractmethod
    def adapt(self, num_classes: int | None, img_size: tuple[int, int] | None) -> None:
        """Put in a fresh classifier, or resize the position embedding, where a value is given."""

    def no_weight_decay(self) -> Collection[str]:
        """Parameters of the module that are trained without weight decay; vectors and scalars are anyway."""
        return ()

    # -- images to rows, rows to logits ----------------------------------------------------------------------
    @abstractmethod
    def embed(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, N, D], prefix tokens first. `len(images)` would fix B in an export."""

    def positions(self, images: Tensor) -> Tensor | None:
        """[N, ...] what `qkv` must know of each slot, e.g. rotary angles; None: positions are in the embedding."""
        return None

    @abstractmethod
    def norm(self, rows: Tensor) -> Tensor:
        """The norm after the last block."""

    @abstractmethod
    def head(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[B, head_tokens, D] before the norm -> features [B, D] and logits [B, classes]."""

    # -- a block, row by row ---------------------------------------------------------------------------------
    @staticmethod
    @abstractmethod
    def norm1(block: Any, rows: Tensor) -> Tensor: ...

    @staticmethod
    @abstractmethod
    def qkv(block: Any, y: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[R, D], and [R, ...] of `positions` -> queries, keys and values [R, H, d]."""

    @staticmethod
    @abstractmethod
    def project(block: Any, out: Tensor, y: Tensor) -> Tensor:
        """[R, H, d] attended values, [R, D] the normed rows -> [R, D] what the branch adds."""

    @staticmethod
    @abstractmethod
    def norm2(block: Any, rows: Tensor) -> Tensor: ...

    @staticmethod
    @abstractmethod
    def mlp_hidden(block: Any, y: Tensor) -> Tensor:
        """[R, D] -> [R, F] before the activation."""

    @staticmethod
    @abstractmethod
    def mlp_out(block: Any, hidden: Tensor) -> Tensor:
        """[R, F] before the activation -> [R, D] what the branch adds."""

    @staticmethod
    @abstractmethod
    def rates(block: Any) -> Rates: ...

    # -- for fused kernels -----------------------------------------------------------------------------------
    def fusion_refusal(self) -> str | None:
        """Why `attention_weights` and `mlp_weights` would not be all of a block; None where they are."""
        return f"there are none for {self.family}"

    @staticmethod
    def attention_weights(block: Any) -> AttentionWeights:
        raise NotImplementedError

    @staticmethod
    def mlp_weights(block: Any) -> MlpWeights:
        raise NotImplementedError

    def stem(self) -> Stem | None:
        """The patch embedding as one product; None where it is anything else, or image sizes vary."""
        return None

    def finish_embedding(self, patches: Tensor) -> Tensor:
        """[B, patches, D] out of the stem's product -> [B, N, D], as `embed` does it."""
        raise NotImplementedError

    def added_to_patches(self) -> tuple[Tensor, Tensor] | None:
        """Prefix rows [P, D] and patch positions [patches, D], where the embedding adds these and `embedding_norm`."""
        return None

    def embedding_norm(self, rows: Tensor) -> Tensor:
        return rows
