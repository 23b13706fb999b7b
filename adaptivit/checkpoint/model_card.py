"""The model card of a checkpoint: README.md in plain Markdown, with what is known of the model and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from .. import tasks
from ..data.image_files import open_image
from ..errors import UserError
from ..tasks.protocol import Task
from ..utils.text import markdown_table

if TYPE_CHECKING:
    from ..model import AdaptiveViT

PICTURE = "halting_maps.png"
MARK = "<!-- Written by adaptivit. Take this line out and your own text stays when the checkpoint is saved again. -->"
SAMPLES = "samples"
_CREDIT = (
    "The photos are scikit-learn's sample images, cropped: china.jpg by "
    "[danielbuechele](https://www.flickr.com/photos/danielbuechele/6061409035/) and flower.jpg by "
    "[vultilion](https://www.flickr.com/photos/vultilion/6056698931/), both under "
    "[CC BY 2.0](https://creativecommons.org/licenses/by/2.0/)."
)
_COSTS = {"gmacs": "GMACs", "gmacs_static": "GMACs of static", "mean_depth": "mean depth"}


def text(config: dict[str, Any], name: str = "", images: Any = None) -> str:
    """The card of a checkpoint with this config.json; `images` as it was given to `maps`, `name` as on the Hub."""
    backbone, policy, task = config["backbone"], config["policy"], tasks.get(config["task"])
    given = backbone.get("kwargs", {})
    called = backbone["name"] or backbone.get("family", "timm_vit")
    if "embed_dim" in given and not backbone["name"]:
        called = f"VisionTransformer of width {given['embed_dim']} with {given['depth']} blocks"
    size = " x ".join(map(str, config["preprocessing"]["size"]))
    parts = [
        f"---\nlibrary_name: adaptivit\npipeline_tag: {task.tag}\ntags:\n- adaptivit\n- {policy}\n---",
        MARK,
        f"# {_cell(name) or f'{called}, {policy}'}",
        f"{called} with the policy `{policy}` of adaptivit: it spends work where the image needs it. "
        f"Images of {size} px, {_outputs(config, task)}.",
        "```python\nimport adaptivit\n\n"
        f'model = adaptivit.from_pretrained("{name or "this directory, or user/name on the Hub"}")\n'
        "transform = model.preprocessing.evaluation()  # from a PIL image to a tensor\n```",
        "## Results\n\n" + _results(config.get("results"), task),
    ]
    if images is not None:
        credit = f" {_CREDIT}" if images == SAMPLES else ""
        parts.append(
            f"## Where it works\n\n![Pictures beside a map of how many blocks computed each patch]({PICTURE})\n\n"
            f"Left: the input. Right: how many blocks computed each patch.{credit}"
        )
    rows = [(k, _cell(v)) for k, v in config["settings"].items()]
    settings = "\n".join(markdown_table(("setting", "value"), rows)) if rows else "None."
    parts.append(f"## Settings of {policy}\n\n{settings}")
    if config.get("calibration"):
        parts.append("## Budgets\n\nconfig.json holds a calibration curve: `model.budget` needs no data.")
    parts.append(f"Saved by adaptivit {config['adaptivit']}, format {config['format']}.")
    return "\n\n".join(parts) + "\n"


def _outputs(config: dict[str, Any], task: Task) -> str:
    names, count = config.get("class_names"), config["backbone"]["changes"].get("num_classes")
    if not names:
        return f"{count} {task.noun}" if count else "no classifier"
    few = ", ".join(_cell(n) for n in names[:8])
    return f"{len(names)} {task.noun} ({few}{', ...' if len(names) > 8 else ''})"


def _results(results: Any, task: Task) -> str:
    """A table of what was measured; what is not understood stays in config.json."""
    rows = {k: v for k, v in results.items() if isinstance(v, dict)} if isinstance(results, dict) else {}
    columns = {"images": "images"} | {k: f"{m.title} {m.unit}".strip() for k, m in task.metrics.items()} | _COSTS
    known = {k: title for k, title in columns.items() if any(isinstance(r.get(k), (int, float)) for r in rows.values())}
    if not known:
        return "None are known."
    cells = [[_cell(name), *(_figure(row.get(k)) for k in known)] for name, row in rows.items()]
    lines = markdown_table(["measured on", *known.values()], cells)
    return "\n".join(lines) + "\n\nGMACs are billions of multiply-accumulates for an image, as the papers' GFLOPs are."


def _figure(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(value: Any) -> str:
    """One line without HTML."""
    return " ".join(str(value).replace("<", "&lt;").split())


def maps(model: AdaptiveViT, images: Any) -> bytes:
    """A PNG of each picture beside its halting map: PIL images, paths, or "samples" (scikit-learn's two photos)."""
    from ..utils.plotting import halting_maps

    tensors, keep = pictures_for(model, images), next(model.parameters())
    was_training = model.training
    with torch.inference_mode():
        trace = model.eval()(tensors.to(keep.device, keep.dtype)).trace
    model.train(was_training)
    depth = trace.depth[:, trace.num_prefix_tokens :].unflatten(1, model.backbone.grid(*tensors.shape[2:])).cpu()
    pixels = model.preprocessing.to_pixels(tensors)
    return halting_maps(pixels.numpy(), depth.numpy(), model.shape.layers, columns=2)


def pictures_for(model: AdaptiveViT, images: Any) -> Tensor:
    """[B, C, H, W] pictures as the model reads them: PIL images, paths, or "samples"."""
    channels = model.backbone.in_chans
    if channels not in (1, 3):
        raise UserError(f"images: a model of {channels} channels does not read pictures; leave them out.")
    if images == SAMPLES:
        from sklearn.datasets import load_sample_images

        images = [Image.fromarray(array) for array in load_sample_images().images]
    elif isinstance(images, (str, Path)) or not isinstance(images, Sequence) or not images:
        raise UserError(f"images: expected a list of pictures or their paths, or {SAMPLES!r}, got {images!r}.")
    mode, transform = "RGB" if channels == 3 else "L", model.preprocessing.evaluation()
    return torch.stack([transform(open_image(image).convert(mode)) for image in images])
