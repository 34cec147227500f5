"""Gradients of `attention` as training uses them: compiled, captured, recomputed, mapped, on streams, in a layer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import flashgen
from flashgen.check import max_error
from flashgen.errors import InputError
from flashgen.nn import FlashAttention
from flashgen.reference import plain_attention


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw(*shape: int, dtype: torch.dtype = torch.float16, device: str = "cuda") -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def draw_call(seq_q: int = 90, seq_kv: int = 130, **options: Any) -> list[Tensor]:
    """q, k, v and dO of a call with groups."""
    sizes = ((4, seq_q), (2, seq_kv), (2, seq_kv), (4, seq_q))
    return [draw(2, heads, seq, 64, **options) for heads, seq in sizes]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = flashgen.attention(q, k, v, causal=True)
    assert isinstance(o, Tensor)
    return o


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def both_ways(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k and v."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    o = function(*leaves)
    return (o.detach(), *torch.autograd.grad(o, leaves, do))


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert [bool(torch.equal(one, other)) for one, other in zip(actual, expected, strict=True)] == [True] * len(
        expected
    )


def assert_close(actual: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> None:
    """Output and gradients against float64: three times the error of plain attention in the inputs' dtype."""

    def plain(*tensors: Tensor) -> Tensor:
        return plain_attention(*tensors, causal="bottom_right")[0]

    true = both_ways(plain, q.double(), k.double(), v.double(), do.double())
    for mine, exact, other in zip(actual, true, both_ways(plain, q, k, v, do), strict=True):
        assert max_error(mine, exact) <= 3 * max_error(other, exact) + 1e-5


def test_the_output_does_not_depend_on_who_wants_gradients() -> None:
    q, k, v, _ = draw_call()
    o, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(o, Tensor) and o.grad_fn is None and lse.grad_fn is None
    for one in range(3):
        tensors = [tensor.clone().requires_grad_(place == one) for place, tensor in enumerate((q, k, v))]
        other_o, other_lse = flashgen.attention(*tensors, causal=True, return_lse=True)
        assert isinstance(other_o, Tensor) and other_o.grad_fn is not None and other_lse.grad_fn is not None
        assert_same((other_o, other_lse), (o, lse))
        with torch.no_grad():
            assert causal_attention(*tensors).grad_fn is None


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_explain_names_the_variant_of_either_op(op: Any) -> None:
    q, k, v, _ = draw_call(300, 400)
    selection = flashgen.explain(q, k, v, causal=True, op=op)
    assert (selection.variant.family.op, selection.variant.spec.op) == (op, op)
    assert selection.variant.spec.causal == "bottom_right"
    assert selection.variant.slug in str(selection) and selection.method in str(selection)


def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Something before and after, for the compiler; exact, so that it may be done in any way."""
    return causal_attention(q + 0.0, k, v * 2.0) * 0.5


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compiled_equals_eager(dynamic: bool, dtype: torch.dtype) -> None:
    compiled = torch.compile(doubled, fullgraph=True, dynamic=dynamic)
    for lengths in ((90, 130), (65, 300)):
        call = draw_call(*lengths, dtype=dtype)
        assert_same(both_ways(compiled, *call), both_ways(doubled, *call))


@pytest.mark.parametrize("dynamic", [None, True])
def test_new_lengths_hardly_compile_again(dynamic: bool | None) -> None:
    backend = CompileCounterWithBackend("inductor")
    compiled = torch.compile(doubled, fullgraph=True, dynamic=dynamic, backend=backend)
    for lengths in ((90, 130), (91, 131), (64, 64), (65, 300), (300, 65), (7, 128), (1000, 1001)):
        call = draw_call(*lengths)
        assert_same(both_ways(compiled, *call), both_ways(doubled, *call))
    assert backend.frame_count <= 2


def test_compiled_at_odd_addresses() -> None:
    compiled = torch.compile(doubled, fullgraph=True)
    call = draw_call()
    for odd in (False, True, False):
        shifted = [torch.cat([t.new_zeros(int(odd)), t.flatten()])[odd:].view(t.shape) for t in call]
        assert_close(both_ways(compiled, *shifted), *call)


@pytest.mark.parametrize("known", [True, False])
def test_cuda_graphs(known: bool) -> None:
    """Captured once, replayed on new contents; where a call was never made before, capturing must not fail either."""
    flashgen.forget()
    call, later = draw_call(77, 93), draw_call(77, 93)
    if known:
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                both_ways(causal_attention, *call)
        torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_ways(causal_attention, *call)
    for static, new in zip(call, later, strict=True):
        static.copy_(new)
    for _ in range(2):
        for each in captured:
            each.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(captured, *later)
    if known:
        assert_same(captured, both_ways(causal_attention, *later))


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointed_gradients_are_the_same(compiled: bool) -> None:
    def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = checkpoint(doubled, q, k, v, use_reentrant=False)
        assert isinstance(o, Tensor)
        return o

    call = draw_call()
    function = torch.compile(recomputed, fullgraph=True) if compiled else recomputed
    assert_same(both_ways(function, *call), both_ways(doubled, *call))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_is_that_of_sdpa(dtype: torch.dtype) -> None:
    q, k, v, do = draw_call(130, 130, dtype=torch.float32)
    with torch.autocast("cuda", dtype):
        actual = both_ways(causal_attention, q, k, v, do.to(dtype))
        theirs = both_ways(torch_attention, q, k, v, do.to(dtype))
    assert [each.dtype for each in actual] == [each.dtype for each in theirs]
    assert [each.dtype for each in actual] == [dtype, *[torch.float32] * 3]
    q, k, v, do = (each.to(dtype) for each in (q, k, v, do))
    assert_close(actual, q, k, v, do)


def test_calls_on_a_stream_wait_for_their_inputs() -> None:
    """Both the query and the output's gradient are ready only long after both calls were queued."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    big = draw(6000, 6000)
    q, k, v, do = draw_call()
    expected = both_ways(causal_attention, torch.ones_like(q), k, v, torch.ones_like(do))

    def late_ones(like: Tensor) -> Tensor:
        for _ in range(20):
            late = big @ big
        return (late[: like.shape[2], :64] * 0 + 1).expand(like.shape).contiguous()

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        leaves = [each.detach().requires_grad_() for each in (late_ones(q), k, v)]
        o = causal_attention(*leaves)
        gradients = torch.autograd.grad(o, leaves, late_ones(do))
    stream.synchronize()
    assert_same((o.detach(), *gradients), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_other_device() -> None:
    """Autograd runs the backward in a thread of its own."""
    torch.cuda.set_device(0)
    call = draw_call(device="cuda:1")
    actual = both_ways(causal_attention, *call)
    assert {each.device for each in actual} == {torch.device("cuda:1")} and torch.cuda.current_device() == 0
    assert_close(actual, *call)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_operators_pass_opcheck(layout: str) -> None:
    q, k, v, do = draw_call(12, 17)
    v, do = v[..., :40], do[..., :40]
    if layout == "bshd":
        q, k, v, do = (each.transpose(1, 2) for each in (q, k, v, do))
    options = ("bottom_right", None, layout)
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]
    outcome = torch.library.opcheck(torch.ops.flashgen.forward, (*leaves, *options, True, None))
    assert set(outcome.values()) == {"SUCCESS"} and len(outcome) == 4
    o, lse = torch.ops.flashgen.forward(q, k, v, *options, True, None)
    for dlse in (None, torch.randn_like(lse)):
        outcome = torch.library.opcheck(torch.ops.flashgen.backward, (q, k, v, o, lse, do, dlse, *options))
        assert set(outcome.values()) == {"SUCCESS"} and len(outcome) == 4


def interleaved_heads(seq: int, heads: int, odd: int = 0) -> Tensor:
    """[2, heads, seq, 64] of a projection whose last dimension holds q, k and v in turn: no row is contiguous."""
    return draw(2, seq, heads, 64, 3 + odd)[..., odd].transpose(1, 2)


@pytest.mark.parametrize("odd", [0, 1])
def test_results_are_laid_out_as_fake_tensors_say(odd: int) -> None:
    """Also where rows are strided, thus copied first: two layouts with the same copy, one after the other."""
    for q, k in (
        (interleaved_heads(33, 4, odd), interleaved_heads(47, 2)),
        (interleaved_heads(33, 4, odd).contiguous().mT.contiguous().mT, interleaved_heads(47, 2).contiguous()),
    ):
        do = draw(*q.shape)
        real = both_ways(causal_attention, q, k, k, do)
        with FakeTensorMode() as mode:
            fake = both_ways(causal_attention, *(mode.from_tensor(each) for each in (q, k, k, do)))
        assert [each.stride() for each in real] == [each.stride() for each in fake]
        assert_close(real, q, k, k, do)


def test_whoever_watches_sees_one_operator() -> None:
    """A graph recorded from a kernel launched past the recorder would return memory that nobody wrote."""
    q, k, v, _ = draw_call()
    expected = causal_attention(q, k, v)
    with torch.no_grad():
        graph = make_fx(causal_attention)(q, k, v)
    assert any("flashgen.forward" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(graph(q, k, v), expected)


def test_the_backward_operator_judges_what_it_is_given() -> None:
    q, k, v, do = draw_call()
    o, lse = flashgen.attention(q, k, v, return_lse=True)
    options = ("none", None, "bhsd")
    good = torch.ops.flashgen.backward(q, k, v, o, lse, do, None, *options)
    for bad in (
        (o, lse, do[:, :, :5], None),
        (o, lse[:, :1], do, None),
        (o.bfloat16(), lse, do, None),
        (o, lse.cpu(), do, None),
        (o, lse, do, lse.cpu()),
    ):
        with pytest.raises(InputError, match="as q and v ask for"):
            torch.ops.flashgen.backward(q, k, v, *bad, *options)
    assert_same(torch.ops.flashgen.backward(q, k, v, o, lse, do, None, *options), good)


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (0, None, None, 0), (1, 1, 1, 1)], ids=str)
def test_mapped_gradients(in_dims: tuple[int | None, ...]) -> None:
    """Per-sample gradients, as torch.func computes them."""

    def loss(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        return (causal_attention(q, k, v) * weights).sum()

    call = [torch.stack([each, each.flip(1), -each]) for each in draw_call()]
    given = [each[0] if dim is None else each.movedim(0, dim) for each, dim in zip(call, in_dims, strict=True)]
    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=in_dims)(*given)
    for sample in range(3):
        one = [each[0] if dim is None else each[sample] for each, dim in zip(call, in_dims, strict=True)]
        assert_same(tuple(each[sample] for each in mapped), both_ways(causal_attention, *one)[1:])


def test_memory_grows_with_the_length_not_its_square() -> None:
    peaks = []
    for seq in (2048, 4096, 8192):
        call = [draw(1, 8, seq, 128, dtype=torch.bfloat16) for _ in range(4)]
        both_ways(causal_attention, *call)
        # The first call compiled; errors that the compiler met and handled keep their frames, and our tensors in them.
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both_ways(causal_attention, *call)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        # The output, three gradients, a few numbers a row and, from a kernel that adds dQ up in memory, its fp32 sums.
        assert 3 * call[0].nbytes <= peaks[-1] <= 6.5 * call[0].nbytes
    assert 1.8 < peaks[2] / peaks[1] < 2.2 and 1.8 < peaks[1] / peaks[0] < 2.2


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_a_layer_trains_as_its_float64_copy(causal: bool | str) -> None:
    torch.manual_seed(0)
    layer = FlashAttention(256, 4, kv_heads=2, causal=causal, device="cuda", dtype=torch.bfloat16)
    exact = copy.deepcopy(layer).double().cpu()
    x, target = (draw(4, 100, 256, dtype=torch.bfloat16) for _ in range(2))
    losses = []
    for step in range(2):
        y = layer(x)
        loss = (y.double() - target.double()).square().mean()
        losses.append(loss.item())
        if step == 0:
            exact_y = exact(x.double().cpu())
            (exact_y - target.double().cpu()).square().mean().backward()
            loss.backward()
            assert max_error(y.cpu(), exact_y) <= 0.02 * exact_y.abs().max()
            true = {name: weight.grad for name, weight in exact.named_parameters() if weight.grad is not None}
            for name, weight in layer.named_parameters():
                # A bias of all keys moves no score; its gradient is rounding, and 0 in float64.
                allowed = 0.03 * true["k_proj.weight" if name == "k_proj.bias" else name].norm()
                assert weight.grad is not None and (weight.grad.cpu().double() - true[name]).norm() <= allowed, name
            torch.optim.SGD(layer.parameters(), lr=10.0).step()
    assert losses[1] < losses[0]


class Sdpa(FlashAttention):
    """The same layer around torch's own attention."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q, k, v = (
            projection(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y: Tensor = self.out_proj(torch_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    def __init__(self, kind: type[FlashAttention]) -> None:
        super().__init__()
        self.attention = kind(128, 4, kv_heads=2, causal=True)
        self.feed = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        self.norm = nn.LayerNorm(128)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y: Tensor = x + self.feed(x)
        return y


def train(kind: type[FlashAttention], device: str = "cuda") -> list[float]:
    """Losses of two blocks that learn fixed data by heart."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(kind), Block(kind)).to(device)
    x, target = (torch.randn(4, 150, 128).to(device) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(30):
        with torch.autocast(device, torch.bfloat16):
            loss = F.mse_loss(model(x).float(), target)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_trains_as_with_torch() -> None:
    ours, theirs = train(FlashAttention), train(Sdpa)
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours[-1] < 0.7 * ours[0]
    assert train(FlashAttention)[-1] == pytest.approx(ours[-1], rel=1e-3)
