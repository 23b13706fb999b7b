"""Training under torch.compile: whole or block by block, the same losses and gradients, and no second compilation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivit.data.dataset import Loaded
from adaptivit.execution import compiling
from adaptivit.training.processes import accelerator_for
from adaptivit.training.run import Trainer, _trainer
from tests.support.commands import train, weights
from tests.support.data_sets import split_folder
from tests.support.models import pictures, tiny
from tests.support.training import named

# torch's own, while it traces an autograd function
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings, losses
    "static": ({}, {}),
    "aht": ({"straight_through": True, "beta": -2.0}, {"target_depth": 0.1, "cost": 10.0, "ponder": 0.01}),
    "avit": ({"gate_scale": 1.0, "gate_center": 2.0}, {"ponder": 0.01, "prior": 0.1}),
}


@pytest.fixture
def one_graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile that neither breaks a graph nor needs a compiler, whose arithmetic is the eager one's."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True, backend="aot_eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trainer(method: str, compile: bool, precision: str, depth: int = 4) -> Trainer:
    given, losses = METHODS[method]
    config = named(precision=precision, device="cpu", lr=1e-3, compile=compile, **losses)
    torch.manual_seed(0)  # a policy's own weights
    return _trainer(config, tiny(method, more={"depth": depth}, **given), accelerator_for(config))


def step(one: Trainer, number: int) -> tuple[float, dict[str, Tensor], Any]:
    batch = Loaded(pictures(4, seed=number), torch.arange(4), torch.arange(4), [])
    torch.manual_seed(number)  # for policies that draw
    losses, output = one.step(batch, number, 4)
    gradients = {k: p.grad.clone() for k, p in one.model.named_parameters() if p.grad is not None}
    return float(losses.total.detach()), gradients, output


@pytest.mark.usefixtures("one_graph")
@pytest.mark.parametrize("method", METHODS)
def test_the_same_training(method: str) -> None:
    plain, compiled = trainer(method, False, "fp32"), trainer(method, True, "fp32")
    for number in range(3):
        loss, gradients, output = step(plain, number)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            other_loss, other_gradients, other_output = step(compiled, number)
        # static to the bit; weighted attention is traced as it stands, and written out by hand when it is not compiled
        bound = 0.0 if method == "static" else 1e-5
        assert loss == pytest.approx(other_loss, rel=bound)
        assert gradients.keys() == other_gradients.keys()
        for name, gradient in gradients.items():
            difference = float((gradient - other_gradients[name]).norm())
            assert difference <= bound * float(gradient.norm()) + bound * 1e-3, name
        assert torch.equal(output.trace.attended, other_output.trace.attended)
        assert method == "static" or not output.trace.attended.all()


@pytest.mark.usefixtures("one_graph")
def test_the_same_training_under_autocast() -> None:
    """As on a GPU: accelerate's wrapper is part of the graph."""
    plain, compiled = trainer("aht", False, "bf16", 2), trainer("aht", True, "bf16", 2)
    for number in range(2):
        loss, _, output = step(plain, number)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            other_loss, _, other_output = step(compiled, number)
        assert loss == pytest.approx(other_loss, rel=1e-2)
        assert output.logits.dtype == other_output.logits.dtype == torch.bfloat16


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0"])
def test_a_message_does_not_write_out_the_graph(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 formats all that an operation depends on, exponentially often; later ones do so when asked."""
    from torch._inductor.exc import OperatorIssue

    whole = OperatorIssue.operator_str
    monkeypatch.setattr(OperatorIssue, "operator_str", staticmethod(whole))  # undone afterwards
    monkeypatch.setattr(torch, "__version__", version)
    assert int(compiling.compiled(lambda x: x + 1, backend="eager")(torch.ones(()))) == 2
    message = OperatorIssue.operator_str("mine::op", ["all the rest"], {})
    assert "mine::op" in message
    assert ("all the rest" in message) == (version == "2.13.0")


@pytest.mark.usefixtures("one_graph")
def test_the_flag(tmp_path: Path) -> None:
    """Validation and what is saved are those of the plain model."""
    where = split_folder(tmp_path / "in")
    arguments = ("--policy", "static", "--optim.ema", 0.9)
    assert train(where, tmp_path / "plain", *arguments) == 0
    assert train(where, tmp_path / "compiled", *arguments, "--run.compile") == 0
    plain, compiled = weights(tmp_path / "plain"), weights(tmp_path / "compiled")
    assert plain.keys() == compiled.keys()
    for name, weight in plain.items():
        assert torch.allclose(weight, compiled[name], rtol=1e-4, atol=1e-5), name


# -- many of them ---------------------------------------------------------------------------------------------------
def test_a_process_compiles_as_many_models_as_it_likes() -> None:
    """Closures of one place, as captured passes are: torch gives up at the ninth set of constants of one code."""
    torch._dynamo.reset()
    x = torch.ones(3)

    def scaled(by: float) -> Any:
        def run(x: Tensor, *, more: float = 1.0) -> Tensor:
            return x * by + more

        return run

    for number in range(torch._dynamo.config.recompile_limit + 4):
        made = compiling.compiled(scaled(number + 0.5), fullgraph=True, backend="eager")
        assert torch.equal(made(x), x * (number + 0.5) + 1)
