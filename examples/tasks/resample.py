"""Lanczos resampling of images in torch, as in Pillow: width first, rounded to integer levels after each pass."""

from __future__ import annotations

from typing import Any

import numpy as np

_SUPPORT = 3  # support of the Lanczos filter, in pixels of the coarser image
_BLOCK = 64  # number of results that one matrix product computes


class Axis:
    """The weights that resample one side of an image from ``source`` to ``target`` pixels.

    A result is a weighted sum over a window of the source; the windows of neighbours overlap.
    """

    def __init__(self, source: int, target: int, device: str) -> None:
        self.source, self.target, self._device = source, target, device
        scale = source / target
        stretch = max(1.0, scale)
        centers = (np.arange(target) + 0.5) * scale
        self._first = np.maximum(0, np.floor(centers - _SUPPORT * stretch + 0.5).astype(int))
        self._last = np.minimum(source, np.floor(centers + _SUPPORT * stretch + 0.5).astype(int))
        self._centers, self._stretch = centers, stretch
        self._blocks: list[tuple[int, int, Any]] = []

    def window(self, begin: int, end: int) -> tuple[int, int, Any]:
        """The source window of the results ``begin`` to ``end``.

        Returns:
            First and end of the source pixels, and a matrix of weights (results, source pixels).
        """
        import torch

        low, high = int(self._first[begin]), int(self._last[end - 1])
        pixels = np.arange(low, high)
        inside = (pixels >= self._first[begin:end, None]) & (pixels < self._last[begin:end, None])
        distance = (pixels - self._centers[begin:end, None] + 0.5) / self._stretch
        weights = np.where(inside, np.sinc(distance) * np.sinc(distance / _SUPPORT), 0.0)
        weights /= weights.sum(1, keepdims=True)
        return low, high, torch.from_numpy(weights.astype(np.float32)).to(self._device)

    def along_width(self, image: Any) -> Any:
        """Resample (channels, rows, ``source``) to (channels, rows, ``target``)."""
        if not self._blocks:
            ends = range(0, self.target, _BLOCK)
            self._blocks = [self.window(at, min(at + _BLOCK, self.target)) for at in ends]
        flat = image.reshape(-1, self.source)
        result = flat.new_empty((len(flat), self.target))
        at = 0
        for low, high, weights in self._blocks:
            result[:, at : at + len(weights)] = flat[:, low:high] @ weights.T
            at += len(weights)
        return to_levels(result).reshape(*image.shape[:2], self.target)


def to_levels(image: Any) -> Any:
    """Round to integer levels from 0 to 255, as floats, in place."""
    return image.add_(0.5).floor_().clamp_(0, 255)


def premultiplied(image: Any) -> Any:
    """Multiply the colours of (4, rows, columns) by the opacity, so that transparent pixels spread no colour."""
    image[:3] = to_levels(image[:3] * image[3] / 255)
    return image


def straight(image: Any) -> Any:
    """Undo ``premultiplied``; the colours of transparent pixels are lost."""
    image[:3] = (image[:3] * 255 / image[3].clamp(min=1)).floor_().clamp_(0, 255)
    return image


def upright(image: Any, orientation: int | None) -> Any:
    """Turn (channels, rows, columns) upright by its EXIF orientation; an unknown value changes nothing."""
    if orientation in (5, 6, 7, 8):
        image = image.transpose(1, 2)
    flips = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation or 1, ())
    return image.flip(flips) if flips else image


def stamp(image: Any, mask: Any, left: int, top: int, level: int) -> None:
    """Blend grey of ``level`` into (channels, rows, columns), weighted by the mask (rows, columns) from 0 to 255.

    The part of the mask outside of the image is ignored.
    """
    rows, columns = mask.shape
    bottom, right = min(top + rows, image.shape[1]), min(left + columns, image.shape[2])
    seen = mask[max(0, -top) : bottom - top, max(0, -left) : right - left]
    place = image[:, max(0, top) : bottom, max(0, left) : right]
    place[:3] = to_levels((place[:3] * (255 - seen) + level * seen) / 255)
    place[3:] = to_levels((place[3:] * (255 - seen) + 255 * seen) / 255)
