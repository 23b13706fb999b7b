"""The Triton kernels of weighted attention against the formulae, spelled out in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from adaptivit.kernels import attention, launch
from adaptivit.kernels import weighted_attention as kernels
from tests.support.interpreter import DEVICE, DTYPES, ON_GPU, here, on_gpu

# relative to the largest value
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "on_cpu", True)


def make(b: int, h: int, n: int, d: int, weights: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """q, k, v as a block makes them, views of one [B, N, 3, H, d], and weights [B, N]."""
    g = torch.Generator().manual_seed(seed + 1000 * n + d)
    qkv = torch.randn(b, n, 3, h, d, generator=g).to(DEVICE, dtype)
    w = torch.rand(b, n, generator=g)
    if weights in ("mask", "sizes"):
        w = (w < 0.6) * (1.0 if weights == "mask" else 1 + (5 * w).floor())
        w[:, 0] = 1.0
    elif weights == "one":
        w = torch.nn.functional.one_hot(torch.full((b,), n // 2), n).float()
    elif weights == "none":
        w = torch.zeros(b, n)
        w[1:, 0] = 1.0  # the first image has no key, others have one
    else:
        assert weights == "fractions"
    q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
    return q, k, v, w.to(DEVICE)


def spelled_out(q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, own: bool) -> tuple[list[Tensor], bool]:
    """out, dq, dk, dv, dw by the formulae, and whether an absent key was held back."""
    q, k, v, w, g = (t.detach().double() for t in (q, k, v, w, g))
    scale, w = q.shape[-1] ** -0.5, w[:, None, None, :]
    s = scale * q @ k.mT
    excess = s - torch.logsumexp(s + w.log(), -1, keepdim=True)
    p = torch.where(w > 0, excess, excess.clamp(max=0.0)).exp()
    out = (w * p) @ v
    t = p * (g @ v.mT - (g * out).sum(-1, keepdim=True))
    dw = t if own else t * (1 - torch.eye(t.shape[-1], dtype=t.dtype, device=t.device))
    found = [out, scale * (w * t) @ k, scale * (w * t).mT @ q, (w * p).mT @ g, dw.sum((1, 2))]
    return found, bool(((w == 0) & (excess > 0)).any())


def by_autograd(q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, own: bool) -> list[Tensor]:
    """The same where no absent key is held back and every image has one: softmax with weights, differentiated."""
    inputs = [t.detach().double().requires_grad_() for t in (q, k, v, w)]
    q, k, v, w = inputs
    e, w = (q.shape[-1] ** -0.5 * q @ k.mT).exp(), w[:, None, None, :].expand(*q.shape[:3], -1)
    if not own:
        w = torch.where(torch.eye(w.shape[-1], dtype=torch.bool, device=w.device), w.detach(), w)
    out = (w * e) @ v / (w * e).sum(-1, keepdim=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, g.double())]


def by_kernels(q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, own: bool) -> list[Tensor]:
    inputs = [t.detach().requires_grad_() for t in (q, k, v, w)]
    out = kernels.attention(*inputs, own=own)
    assert out.dtype == v.dtype
    assert out.transpose(1, 2).is_contiguous()  # so that flattening the heads is free
    found = [out.detach(), *torch.autograd.grad(out, inputs, g)]
    assert [t.dtype for t in found] == [v.dtype, q.dtype, k.dtype, v.dtype, w.dtype]
    return found


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv", "dw"), found, expected, strict=True):
        assert a.shape == b.shape
        assert a.isfinite().all(), name
        error = float((a.double() - b).abs().max())
        size = float(b.abs().max()) + 0.5  # gradients may cancel: their terms are of order 1
        assert error <= tolerance * size, f"{name}: off by {error:.2e} of {size:.2e}"


def noise(like: Tensor, seed: int = 7) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)


CASES = [  # images, heads, tokens, head width, weights
    (1, 1, 1, 16, "fractions"),
    (2, 2, 5, 16, "mask"),
    (3, 2, 5, 32, "none"),
    (2, 1, 7, 48, "one"),
    (1, 2, 64, 64, "sizes"),
    (2, 1, 65, 80, "mask"),
]
if ON_GPU:
    CASES += [(n, 3, t, d, w) for n, t in ((1, 197), (3, 1025)) for d in (64, 96, 128) for w in ("mask", "sizes")]


@here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_formulae(case: tuple[int, int, int, int, str], own: bool, dtype: torch.dtype) -> None:
    inputs = make(*case, dtype)
    g = noise(inputs[0])
    expected, held = spelled_out(*inputs, g, own)
    assert_near(by_kernels(*inputs, g, own), expected, TOLERANCE[dtype])
    if not held and case[4] != "none":
        for a, b in zip(by_autograd(*inputs, g, own), expected, strict=True):
            torch.testing.assert_close(a, b)


@here
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("weights", ["mask", "none", "one", "fractions"])
def test_against_the_reference(weights: str, own: bool) -> None:
    """What a CPU runs, an image without any key included: out is zero there, and gradients are finite."""
    inputs = [t.detach().requires_grad_() for t in make(3, 2, 9, 16, weights, seed=3)]
    g = noise(inputs[0])
    reference = attention._Weighted.apply(*inputs, own)
    expected = [reference.detach(), *torch.autograd.grad(reference, inputs, g)]
    found = by_kernels(*inputs, g, own)
    assert_near(found, [t.double() for t in expected], 2e-5)
    if weights == "none":
        assert all(not t[0].any() for t in found[:4])
        assert found[4][0].any()


@here
def test_an_absent_key_with_a_huge_logit_is_held() -> None:
    q, k, v, w = make(1, 2, 6, 16, "mask", seed=5)
    w[:, 3] = 0.0
    k[:, :, 3] = 40 * q.mean(2)
    q[:, :, 1] = 40 * q[:, :, 1]
    g = noise(q)
    expected, held = spelled_out(q, k, v, w, g, True)
    assert held
    assert_near(by_kernels(q, k, v, w, g, True), expected, 2e-5)


@here
def test_everything_is_written_and_nothing_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    margins: list[Tensor] = []

    def between_margins(t: Tensor) -> Tensor:
        memory = torch.full((t.numel() + 512,), float("nan"), dtype=t.dtype, device=t.device)
        margins.extend((memory[:256], memory[-256:]))
        b, h, n, d = t.shape
        return memory[256:-256].view(b, n, h, d).transpose(1, 2)

    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(kernels, "_empty", between_margins)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan")))
    q, k, v, w = make(2, 2, 35, 24, "mask")
    out, log_z = kernels._forward(q, k, v, w, True)
    grads = kernels._backward(noise(q), q, k, v, w, out, log_z, True)
    for t in (out, log_z, *grads):
        assert t.isfinite().all()
    assert len(margins) == 8
    assert all(m.isnan().all() for m in margins)


@here
@pytest.mark.parametrize("queries", [1, 3])
def test_fewer_queries_than_keys(queries: int) -> None:
    """Masked.query asks with one row an image."""
    q, k, v, w = make(2, 2, 5, 16, "mask")
    q = q[:, :, :queries]
    g = noise(q)
    expected, _ = spelled_out(q, k, v, w, g, True)
    assert_near(by_kernels(q, k, v, w, g, True), expected, 2e-5)
    assert kernels.attention(q, k, v, w > 0).isfinite().all()


@here
def test_any_strides_and_gradients_of_any_layout() -> None:
    q, k, v, w = make(2, 2, 6, 16, "fractions")
    q, k = q.contiguous(), k.mT.contiguous().mT  # elements of k lie far apart
    w = torch.stack([w, w], -1)[..., 0]
    for g in (torch.ones((), device=DEVICE).expand_as(q), noise(q), noise(q.transpose(1, 2)).transpose(1, 2)):
        expected, _ = spelled_out(q, k, v, w, g, False)
        assert_near(by_kernels(q, k, v, w, g, False), expected, 2e-5)


@here
def test_other_dtypes_than_the_values_have() -> None:
    """Norms of q and k give float32 under autocast; weights are a policy's own."""
    q, k, v, w = make(1, 2, 5, 16, "mask", torch.float16)
    inputs = [t.detach().requires_grad_() for t in (q.float(), k.float(), v, w.double())]
    out = kernels.attention(*inputs)
    assert out.dtype == torch.float16
    grads = torch.autograd.grad(out, inputs, noise(v))
    assert [g.dtype for g in grads] == [torch.float32, torch.float32, torch.float16, torch.float64]
    expected, _ = spelled_out(q, k, v, w, noise(v), True)
    assert_near([out.detach(), *grads], expected, TOLERANCE[torch.float16])


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@here
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_graph_holds_it() -> None:
    q, k, v, w = (t.detach().requires_grad_() for t in make(2, 2, 5, 16, "mask"))

    def loss(*inputs: Tensor) -> Tensor:
        return kernels.attention(*inputs, own=False).transpose(1, 2).flatten(-2).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager", dynamic=False)
    for a, b in zip(
        (compiled(q, k, v, w), *torch.autograd.grad(compiled(q, k, v, w), (q, k, v, w))),
        (loss(q, k, v, w), *torch.autograd.grad(loss(q, k, v, w), (q, k, v, w))),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    torch.library.opcheck(kernels._op, (q, k, v, w, True))


@on_gpu
@pytest.mark.parametrize("tokens", [197, 1025])
def test_dispatch_under_autocast_keeps_no_matrix(tokens: int) -> None:
    inputs = [t.detach().requires_grad_() for t in make(4, 6, tokens, 64, "mask", torch.bfloat16)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        out = attention.weighted(*inputs)
    out.backward(noise(out))
    assert out.dtype == torch.bfloat16
    assert torch.cuda.max_memory_allocated() - before < 12 * out.numel() * out.element_size() + 2**20


def test_a_cpu_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "attention", None)
    q, k, v, w = (t.cpu() for t in make(1, 2, 5, 16, "mask"))
    assert torch.equal(attention.weighted(q, k, v, w), attention._Weighted.apply(q, k, v, w, True))
    assert not kernels.usable(q.double())


def test_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from adaptivit.kernels import attention, weighted_attention\n"
        "t = torch.randn(1, 1, 3, 8)\n"
        "assert not weighted_attention.usable(t)\n"
        "assert attention.weighted(t, t, t, torch.ones(1, 3)).shape == t.shape\n"
        "import importlib, pkgutil\n"
        "import adaptivit.kernels\n"
        "for module in pkgutil.iter_modules(adaptivit.kernels.__path__):\n"
        "    importlib.import_module(f'adaptivit.kernels.{module.name}')\n"
        "from adaptivit import policies\n"
        "for policy in policies.names():\n"
        "    if policy == 'replay':\n"
        "        continue\n"
        "    model = adaptivit.create('digits_vit', policy, img_size=32).eval()\n"
        "    with torch.inference_mode():\n"
        "        out = model(torch.randn(2, 3, 32, 32))\n"
        "    assert out.logits.isfinite().all(), policy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})
