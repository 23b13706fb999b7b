"""Draws of the augmentation of whole batches, with the meaning of torchvision's transforms.

An image's random numbers follow from (seed, epoch, image) and are drawn on the host, for many images at once: they do
not depend on the batch, the number of processes or an interruption, and the host knows without a sync which images an
operation is for. Shapes: n images, S slots (an image passes through one operation a slot).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import pixel_ops as ops
from .augment import PAD
from .augment_config import AugmentConfig
from .dataset import mix

Array = np.ndarray[Any, Any]
TRIES = 10  # for a box that fits; torchvision's number
RATIO = (3 / 4, 4 / 3)
ERASED, ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)

# Columns of an image's random numbers: one flag does not change the draws of another.
_CROP, _PLACE, _MIRROR = slice(0, 20), slice(20, 22), 22
_JITTER, _ORDER = slice(23, 26), 26
_RAND, _SIGN = slice(27, 29), slice(29, 31)
_ERASE, _ERASE_BOX, _ERASE_PLACE = 31, slice(32, 52), slice(52, 54)
_COLUMNS = 54

_JITTERS = (ops.BRIGHTNESS, ops.CONTRAST, ops.COLOUR)
_ORDERS = np.array([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])


def uniform(seed: int, epoch: int, indices: Array, columns: int = _COLUMNS) -> Array:
    """[n, columns] numbers in [0, 1), a function of (seed, epoch, index, column): splitmix64 used as a hash."""
    step = np.uint64(0x9E3779B97F4A7C15)
    start = np.uint64(mix(seed, epoch, 3))
    key = _scrambled(start + (indices.astype(np.uint64) + np.uint64(1)) * step)
    bits = _scrambled(key[:, None] + np.arange(1, columns + 1, dtype=np.uint64) * step)
    return (bits >> np.uint64(11)) * 2.0**-53


def _scrambled(bits: Array) -> Array:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@dataclass(frozen=True)
class Draws:
    """The augmentation of n images."""

    box: Array  # [n, 4] top, left, height, width in source pixels
    mirror: Array  # [n] bool
    codes: Array  # [n, S] operation of each slot
    amounts: Array  # [n, S, 6] float32: its strength first, or a matrix [2, 3] from target to source pixels
    erase: Array  # [n, 4] top, left, height, width in target pixels; height 0 for nothing


def draw(
    config: AugmentConfig, seed: int, epoch: int, indices: Array, source: tuple[int, int], target: tuple[int, int]
) -> Draws:
    """The draws of these images in an epoch, in this order."""
    u = uniform(seed, epoch, indices)
    codes, amounts = [], []
    if config.color_jitter:
        code, amount = _jitter(u, config.color_jitter)
        codes.append(code)
        amounts.append(amount)
    if config.kind == "rand" and config.rand_magnitude:
        table = rand_table(config.rand_magnitude, target).values()
        kind = (u[:, _RAND] * len(table)).astype(np.int64)
        negative = (u[:, _SIGN] <= 0.5).astype(np.int64)
        codes.append(np.array([code for code, _ in table])[kind])
        amounts.append(np.array([both for _, both in table], np.float32)[kind, negative])
    count = len(indices)
    return Draws(
        _boxes(config, u, source),
        (u[:, _MIRROR] < 0.5) & (config.kind != "none"),
        np.concatenate(codes, 1) if codes else np.zeros((count, 0), np.int64),
        np.concatenate(amounts, 1) if amounts else np.zeros((count, 0, 6), np.float32),
        _erased(config.erasing, u, target),
    )


def _boxes(config: AugmentConfig, u: Array, source: tuple[int, int]) -> Array:
    h, w = source
    if config.kind in ("crop", "rand"):
        size, fits = _tried(u[:, _CROP], source, (config.crop_scale, 1.0), RATIO, wide_first=True)
        return np.where(fits[:, None], _placed(u[:, _PLACE], size, source), np.array(_central(source)))
    if config.kind == "pad":  # by h // 8, w // 8, before the box is taken
        padded = (h + 2 * (h // PAD), w + 2 * (w // PAD))
        return _placed(u[:, _PLACE], np.broadcast_to(np.array(source), (len(u), 2)), padded)
    return np.broadcast_to(np.array([0, 0, h, w]), (len(u), 4))


def _tried(
    u: Array, shape: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], wide_first: bool
) -> tuple[Array, Array]:
    """(height, width) [n, 2] of the first of ten tries that fits, and whether one does.

    ratio is width / height if `wide_first`, else height / width."""
    area = shape[0] * shape[1] * (scale[0] + (scale[1] - scale[0]) * u[:, :TRIES])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = np.exp(low + (high - low) * u[:, TRIES:])
    first, second = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    h, w = (second, first) if wide_first else (first, second)
    most = np.array(shape) if wide_first else np.array(shape) - 1
    fits = (h >= wide_first) & (w >= wide_first) & (h <= most[0]) & (w <= most[1])
    pick = fits.argmax(1)[:, None]
    size = np.concatenate([np.take_along_axis(h, pick, 1), np.take_along_axis(w, pick, 1)], 1).astype(np.int64)
    return size, np.asarray(fits.any(1))


def _central(source: tuple[int, int]) -> tuple[int, int, int, int]:
    """torchvision's box if no try fits: as much of the middle as the ratio allows."""
    h, w = source
    high, wide = min(h, round(w / RATIO[0])), min(w, round(h * RATIO[1]))
    return (h - high) // 2, (w - wide) // 2, high, wide


def _placed(u: Array, size: Array, shape: tuple[int, int]) -> Array:
    """[n, 4]: boxes of this size anywhere inside."""
    corner = (u * (np.array(shape) - size + 1)).astype(np.int64)
    return np.concatenate([corner, size], 1)


def _jitter(u: Array, strength: float) -> tuple[Array, Array]:
    """Brightness, contrast and saturation in a random order, each by a factor around 1."""
    low, high = max(0.0, 1 - strength), 1 + strength
    factor = low + (high - low) * u[:, _JITTER]
    order = _ORDERS[(u[:, _ORDER] * len(_ORDERS)).astype(np.int64)]
    amounts = np.zeros((*order.shape, 6), np.float32)
    amounts[..., 0] = np.take_along_axis(factor, order, 1)
    return np.array(_JITTERS)[order], amounts


def rand_table(magnitude: int, target: tuple[int, int]) -> dict[str, tuple[int, Array]]:
    """RandAugment's fourteen: (operation, [2, 6] amounts for the signs + and -), at a magnitude of 0..30.

    Matrices go from target to source, pixels counted from the centre."""
    (height, width), m = target, magnitude / 30
    right, down = int(150 / 331 * width * m), int(150 / 331 * height * m)
    turn, shear = math.radians(30 * m), 0.3 * m

    def affine(matrix: Callable[[int], list[float]]) -> tuple[int, Array]:
        return ops.AFFINE, np.array([matrix(1), matrix(-1)])

    def strength(operation: int, plus: float, minus: float) -> tuple[int, Array]:
        return operation, np.array([[plus] + [0.0] * 5, [minus] + [0.0] * 5])

    def around_1(operation: int) -> tuple[int, Array]:
        return strength(operation, 1 + 0.9 * m, 1 - 0.9 * m)

    mask, level = 256 - 2 ** int(np.rint(magnitude / 7.5)), 255 * (1 - m)
    return {
        "identity": strength(ops.IDENTITY, 0, 0),
        "shear_x": affine(lambda sign: [1, sign * shear, sign * shear * height / 2, 0, 1, 0]),
        "shear_y": affine(lambda sign: [1, 0, 0, sign * shear, 1, sign * shear * width / 2]),
        "translate_x": affine(lambda sign: [1, 0, -sign * right, 0, 1, 0]),
        "translate_y": affine(lambda sign: [1, 0, 0, 0, 1, -sign * down]),
        "rotate": affine(lambda s: [math.cos(turn), -math.sin(s * turn), 0, math.sin(s * turn), math.cos(turn), 0]),
        "brightness": around_1(ops.BRIGHTNESS),
        "colour": around_1(ops.COLOUR),
        "contrast": around_1(ops.CONTRAST),
        "sharpness": around_1(ops.SHARPNESS),
        "posterize": strength(ops.POSTERIZE, mask, mask),
        "solarize": strength(ops.SOLARIZE, level, level),
        "autocontrast": strength(ops.AUTOCONTRAST, 0, 0),
        "equalize": strength(ops.EQUALIZE, 0, 0),
    }


def _erased(chance: float, u: Array, target: tuple[int, int]) -> Array:
    size, fits = _tried(u[:, _ERASE_BOX], target, ERASED, ERASED_RATIO, wide_first=False)
    box = _placed(u[:, _ERASE_PLACE], size, target)
    return np.where((fits & (u[:, _ERASE] < chance))[:, None], box, 0)
