"""The pictures of docs/guide/visualize.md: real DeiT-T weights on scikit-image's sample photos.

    uv run python benchmarks/visualize_pictures.py --weights deit_tiny_patch16_224.safetensors --out docs/images

The photos may be redistributed: astronaut and rocket are in the public domain (NASA, SpaceX), coffee and chelsea are
CC0. With Chromium on the machine the report is photographed too. Policies that need no training; seed 0.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import skimage.data
import torch
from PIL import Image

import adaptivit
from adaptivit import visualize

PHOTOS = ("chelsea", "astronaut", "coffee", "rocket")
BACKBONE = "deit_tiny_patch16_224"


def photos(folder: Path) -> list[Path]:
    paths = [folder / f"{name}.png" for name in PHOTOS]
    for name, path in zip(PHOTOS, paths, strict=True):
        Image.fromarray(getattr(skimage.data, name)()).save(path)
    return paths


def save(picture: Image.Image, path: Path, width: int) -> None:
    """As WebP, no wider than `width`."""
    if picture.width > width:
        picture = picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
    picture.save(path, "WEBP", quality=82, method=6)


def photograph(page: Path, out: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, width, height, scheme in (("desk", 1280, 1500, "light"), ("phone", 390, 1500, "dark")):
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            tab = context.new_page()
            tab.goto(page.as_uri())
            tab.screenshot(path=str(page.parent / f"{name}.png"))
            context.close()
        browser.close()
    desk, phone = (Image.open(page.parent / f"{name}.png").convert("RGB") for name in ("desk", "phone"))
    both = Image.new("RGB", (desk.width + phone.width + 24, desk.height), "white")
    both.paste(desk, (0, 0))
    both.paste(phone, (desk.width + 24, 0))
    save(both, out / "visualize_report.webp", 1400)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--out", default="docs/images", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = photos(Path(folder))
        models = {
            "fold": adaptivit.create(BACKBONE, "fold", weights=given.weights, budget=0.6),
            "amod": adaptivit.create(BACKBONE, "amod", weights=given.weights),
            "evit": adaptivit.create(BACKBONE, "evit", weights=given.weights, keep=0.6, fuse=False),
        }
        seen = {name: visualize.look(model, paths) for name, model in models.items()}
        save(visualize.strip(seen["fold"], 0, "groups"), given.out / "visualize_groups.webp", 1500)
        save(visualize.strip(seen["amod"], 0), given.out / "visualize_routing.webp", 1500)
        save(visualize.maps(seen["evit"], range(4), columns=2), given.out / "visualize_maps.webp", 1100)
        frames = visualize.frames(seen["evit"], 0, width=200)
        times = [450] * (len(frames) - 1) + [1800]
        kind = {"save_all": True, "append_images": frames[1:], "duration": times, "loop": 0, "quality": 70, "method": 6}
        frames[0].save(given.out / "visualize_leaving.webp", "WEBP", **kind)
        if shutil.which("chromium"):
            page = visualize.report(models["fold"], paths, Path(folder) / "report", static=None)
            photograph(page, given.out)


if __name__ == "__main__":
    main()
