"""Mistakes in paths and flags are reported before torch is imported, by every command."""

from __future__ import annotations

from adaptivit.cli.main import COMMANDS
from tests.support.commands import without_torch

MODEL = ("--backbone", "test_vit")
CASES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("apply", *MODEL, "--out", "out", "--weights", "no.pth"), "Weights not found: no.pth."),
    (("apply", *MODEL, "--out", "out", "--data", "no"), "Data not found: no."),
    (("apply", *MODEL, "--out", "out", "--policy", "fold:kep=0.5"), "Did you mean 'keep'?"),
    (("apply", *MODEL, "--out", "out", "--budget", "33%"), "written with a minus"),
    (("apply", *MODEL, "--out", "."), ". is there already"),
    (("train", "--data", "no"), "Data not found: no."),
    (("train", "--data", "hf:no"), "Data not found: no."),
    (("train", "--data", ".", "--weights", "no.pth"), "Weights not found: no.pth."),
    (("train", "--data", ".", "--teacher", "no"), "Weights not found: no."),
    (("train", "--data", ".", "--policy", "avitt"), "Did you mean 'avit'?"),
    (("train", "--data", ".", "--recipe", "no.json"), "Cannot read the recipe no.json"),
    (("compare", "--data", "no", "--methods", "avit"), "Data not found: no."),
    (("recipes", "avit-papr"), "Did you mean 'avit-paper'?"),
    (("reproduce", "digits", "--data", "no"), "Data not found: no."),
    (("reproduce", "cifar100-main", "--data", "."), "needs --weights"),
    (("sweep", "--data", "no", "--space", "optim.lr=1|2"), "Data not found: no."),
    (("evaluate", "--data", "no", *MODEL), "Data not found: no."),
    (("evaluate", "--data", ".", "--checkpoint", "no"), "No such directory, so no config.json: no."),
    (("evaluate", "--data", ".", "--checkpoint", "no", *MODEL), "Expected either --checkpoint"),
    (("evaluate", "--data", ".", *MODEL, "--compare-to", "no"), "no config.json: no."),
    (("evaluate", "--data", ".", *MODEL, "--policy", "replay:trace=no"), "replay: file not found: no."),
    (("calibrate", "no", "--data", "."), "no config.json: no."),
    (("calibrate", ".", "--data", "no"), "no config.json"),
    (("predict", "no.jpg", *MODEL), "Image not found: no.jpg."),
    (("predict", *MODEL), "at least one image"),
    (("predict", ".", *MODEL, "--class-names", "no.txt"), "class_names: file not found: no.txt."),
    (("predict", ".", *MODEL, "--max-macs", "many"), "max_macs: expected"),
    (("visualize", "no", "--images", "."), "no config.json: no."),
    (("visualize", *MODEL, "--images", ".", "--static", "no"), "Weights not found: no."),
    (("export", "no", "--out", "x.onnx"), "no config.json: no."),
    (("serve", "no"), "no config.json: no."),
    (("serve", *MODEL), "has random weights"),
    (("serve", *MODEL, "--random-weights", "--token-file", "no"), "token_file: file not found: no."),
    (("demo", "no"), "no config.json: no."),
    (("benchmark", "--weights", "no"), "Weights not found: no."),
    (("benchmark", "--data", "no"), "Data not found: no."),
    (("benchmark", "--profile", "replay:no"), "profile: file not found: no."),
)


def test_mistakes_are_reported_without_torch() -> None:
    for (given, message), said in zip(CASES, without_torch([words for words, _ in CASES]), strict=True):
        assert message in said, (given, said)
    assert {given[0] for given, _ in CASES} == set(COMMANDS) - {"quickstart"}, "quickstart takes no path"
