"""Limits of a service. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..utils.coerce import at_least, positive, require

TOKEN = "ADAPTIVIT_TOKEN"  # the environment variable that may hold the bearer token


def share(most: int) -> int:
    """How much of a limit one client may take, so that others find room: three quarters."""
    return -(-3 * most // 4)


@dataclass(frozen=True)
class Limits:
    """Limits on requests. What exceeds one is refused with one line."""

    max_upload: float = 16.0
    """Megabytes of a request's body, however it is sent."""
    max_pixels: float = 32.0
    """Megapixels of an image, read from its header before anything is decoded."""
    max_request_pixels: float = 128.0
    """Megapixels of all images of a request."""
    max_pixels_under_way: float = 512.0
    """Megapixels that wait to be decoded; with more, 429."""
    max_images: int = 32
    """Images a request."""
    max_queue: int = 256
    """Images that wait for the model; with more, requests are answered with 429 and Retry-After."""
    max_requests: int = 64
    """Requests under way at once; with more, 429."""
    max_connections: int = 512
    """Connections open at once; more are closed."""
    timeout: float = 30.0
    """Seconds for a request, its upload included; for its head to arrive, and for its answer to be fetched."""

    def __post_init__(self) -> None:
        for name in ("max_upload", "max_pixels", "max_request_pixels", "max_pixels_under_way", "timeout"):
            positive(name, getattr(self, name))
        for name in ("max_images", "max_queue", "max_requests", "max_connections"):
            at_least(name, getattr(self, name), 1)
        room = f"room for at least one request of {self.max_images} images (--max-images)"
        require(self.max_queue >= self.max_images, "max_queue", room, self.max_queue)
        image = f"room for at least one image of {self.max_pixels:g} megapixels (--max-pixels)"
        require(self.max_request_pixels >= self.max_pixels, "max_request_pixels", image, self.max_request_pixels)
        room = f"room for at least one request of {self.max_request_pixels:g} megapixels (--max-request-pixels)"
        enough = self.max_pixels_under_way >= self.max_request_pixels
        require(enough, "max_pixels_under_way", room, self.max_pixels_under_way)

    @property
    def bytes(self) -> int:
        return int(self.max_upload * 1e6)

    @property
    def pixels(self) -> int:
        return int(self.max_pixels * 1e6)

    @property
    def request_pixels(self) -> int:
        return int(self.max_request_pixels * 1e6)
