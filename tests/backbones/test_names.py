"""A timm name that does not work is refused before it is built, with the reason and one that works."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

import adaptivit
from adaptivit.backbones.names import check_name, nearest
from adaptivit.errors import UnsupportedBackbone, UserError
from tests.support.commands import refused

CASES = {
    "vit_base_patch16_rope_224": (r"rotary \(`rope`\)", "vit_base_patch16_224"),
    "swin_tiny_patch4_window7_224.ms_in1k": ("no `blocks`", "vit_tiny_patch16_224"),
    "vit_base_patch14_dinov2.lvd142m": ("", ""),
    "vit_giant_patch14_dinov2": ("Unsupported MLP type in block 0: GluMlp", "vit_giant_patch14_224"),
    "vit_base_r50_s16_224": ("Unsupported patch embedding type: HybridEmbed", "vit_base_patch16_224"),
    "resnet18": ("no `blocks`", "deit_tiny_patch16_224"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reason_and_the_nearest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = timm.create_model

    def on_meta(*given: Any, **more: Any) -> Any:
        assert torch.empty(1).is_meta, "weights were made"
        return real(*given, **more)

    monkeypatch.setattr(timm, "create_model", on_meta)
    reason, works = CASES[name]
    if not works:
        check_name(name)
        return
    with pytest.raises(UnsupportedBackbone, match=f"^{name} cannot be .*{reason}.* nearest that works: {works}.$"):
        adaptivit.create(name, "static", weights=True)


def test_the_command_line_says_it_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "predict", ".", "--backbone", "vit_base_patch16_rope_224")
    assert "rotary" in said
    assert "The nearest that works: vit_base_patch16_224." in said


def test_the_nearest_works() -> None:
    for name in ("cait_s24_224", "mobilenetv3_small_100"):
        check_name(nearest(name))
    assert nearest("DeiT-tiny-patch16") == "deit_tiny_patch16_224"
    with pytest.raises(
        UserError, match=r"^Unknown timm model 'vit_smal_patch16'.* nearest that works: vit_base_patch16_224.$"
    ):
        adaptivit.create("vit_smal_patch16", "static")
