"""Laws of the loss computed in chunks: no further from float64 than the baseline's, in whatever form a script writes it.

Logits that a script uses otherwise have the baseline's bits, nothing reads logits that are out of date, and a budget changes
no bit of a run with the lever.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from harness import heap, live_now
from lowtide.base.errors import LeverError
from lowtide.runtime.levers import deferred_logits
from lowtide.runtime.run_figures import RunOutcome
from torch import nn
from torch.nn import functional as F

import lowtide

CLASSES, WIDTH, ROWS, LENGTH = 2048, 64, 4, 64
ALLOW = ("chunked-loss",)

Form = Callable[[torch.Tensor, torch.Tensor, Any, torch.Tensor], torch.Tensor]


def _weights(alike: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 2, CLASSES, dtype=alike.dtype)


FORMS: dict[str, Form] = {
    "view": lambda h, w, b, y: F.cross_entropy(F.linear(h, w, b).view(-1, CLASSES), y.view(-1)),
    "cast and sum": lambda h, w, b, y: F.cross_entropy(F.linear(h, w, b).float().flatten(0, 1), y.flatten(), reduction="sum"),
    "shifted": lambda h, w, b, y: F.cross_entropy(
        F.linear(h, w, b)[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].contiguous().view(-1)),
    "transposed": lambda h, w, b, y: F.cross_entropy(F.linear(h, w, b).transpose(1, 2), y, ignore_index=3),
    "permuted": lambda h, w, b, y: nn.CrossEntropyLoss(label_smoothing=0.1)(F.linear(h, w, b).permute(0, 2, 1), y),
    "scaled, smoothed": lambda h, w, b, y: F.cross_entropy(
        (F.linear(h, w, b) / 0.7 * 1.3).reshape(-1, CLASSES), y.reshape(-1), label_smoothing=0.1),
    "capped, weighted, ignoring": lambda h, w, b, y: F.cross_entropy(
        (torch.tanh(F.linear(h, w, b) / 3) * 3).reshape(-1, CLASSES), y.reshape(-1), weight=_weights(h), label_smoothing=0.2,
        ignore_index=5),
    "product with the transpose": lambda h, w, b, y: F.cross_entropy(
        (h @ w.t()).reshape(-1, CLASSES), y.reshape(-1), reduction="none").mean(),
    "masked": lambda h, w, b, y: F.cross_entropy(F.linear(h, w, b)[y > 100], y[y > 100]),
    "one row of each": lambda h, w, b, y: F.cross_entropy(F.linear(h, w, b)[:, -1], y[:, -1]),
    "read as well": lambda h, w, b, y: (lambda z: F.cross_entropy(z.view(-1, CLASSES), y.view(-1)) + z.logsumexp(-1).mean() / 8)(
        F.linear(h, w, b)),
    "two losses": lambda h, w, b, y: (lambda z: F.cross_entropy(z[:2].flatten(0, 1), y[:2].flatten())
                                      + F.cross_entropy(z[2:].flatten(0, 1), y[2:].flatten()))(F.linear(h, w, b)),
}


def _grads(form: Form, dtype: torch.dtype, *, bias: bool, autocast: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(1)
    h = torch.randn(ROWS, LENGTH, WIDTH).to(dtype).requires_grad_()
    w = nn.Parameter((torch.randn(CLASSES, WIDTH) * 0.2).to(dtype))
    b = nn.Parameter((torch.randn(CLASSES) * 0.1).to(dtype)) if bias else None
    y = torch.randint(0, CLASSES, (ROWS, LENGTH))
    y[0, :5], y[1, :7] = 5, 3
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = form(h, w, b, y)
    loss.backward()
    found = [loss.detach(), h.grad, w.grad, *([b.grad] if b is not None else [])]
    return [t.double() for t in found if t is not None]


def _errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [float((f - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)]


def _in_pieces(form: Form, *, bias: bool, autocast: bool = False) -> tuple[list[torch.Tensor], RunOutcome]:
    with lowtide.budget(None, allow=ALLOW) as run:
        found = _grads(form, torch.float32, bias=bias, autocast=autocast)
        return found, run.outcome


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", FORMS)
def test_chunked_loss_and_gradients_are_as_close_to_float64_as_plain(name: str, bias: bool, autocast: bool) -> None:  # noqa: FBT001
    """Their errors against float64 are at most 1.1 times those of the baseline, plus rounding, in every form of the loss."""
    form = FORMS[name]
    exact = _grads(form, torch.float64, bias=bias)
    plain = _errors(_grads(form, torch.float32, bias=bias, autocast=autocast), exact)
    found, outcome = _in_pieces(form, bias=bias, autocast=autocast)
    assert outcome.levers[0].used
    for ours, theirs in zip(_errors(found, exact), plain, strict=True):
        assert ours <= 1.1 * theirs + (2e-7 if autocast else 2**-23)


def test_logits_that_are_read_have_the_baselines_bits() -> None:
    """Whatever is asked of them, before or after the loss, also in place."""
    torch.manual_seed(0)
    layer, h = nn.Linear(WIDTH, CLASSES), torch.randn(ROWS, LENGTH, WIDTH)
    y = torch.randint(0, CLASSES, (ROWS, LENGTH))
    want = layer(h)
    with lowtide.budget(None, allow=ALLOW):
        got = layer(h)
        assert got.shape == want.shape
        assert got.dtype is want.dtype
        assert got.requires_grad
        assert isinstance(got, torch.Tensor)
        flat = got.view(-1, CLASSES)
        loss = F.cross_entropy(flat, y.view(-1))
        assert torch.equal(got.argmax(-1), want.argmax(-1))
        assert torch.equal(got.detach(), want.detach())
        assert got.grad_fn is not None
        with torch.no_grad():
            got[0] = 0
        assert not flat[:LENGTH].any(), "views made before share what is written"
        loss.backward()
        again = layer(h)
        again.mul_(2)
        assert torch.equal(again.detach(), want.detach() * 2)
        assert len(layer(h)) == ROWS
        assert torch.equal(torch.stack([layer(h), layer(h)])[1].detach(), want.detach())
    assert torch.equal(again.detach(), want.detach() * 2)


def test_custom_functions_get_plain_tensors_and_pass_gradients_back() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    torch.manual_seed(0)
    layer, h = nn.Linear(WIDTH, CLASSES), torch.randn(ROWS, LENGTH, WIDTH)
    Twice.apply(layer(h)).sum().backward()
    want = layer.weight.grad
    layer.zero_grad()
    with lowtide.budget(None, allow=ALLOW):
        Twice.apply(layer(h)).sum().backward()
    assert want is not None
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, want)


@pytest.mark.parametrize(("rows", "classes"), [(1 << 20, 65_536), (4096, 50_257), (128, 1000), (1, 1 << 20)])
def test_pieces_of_logits_are_bounded_in_bytes_and_in_number(rows: int, classes: int) -> None:
    """Law: a piece takes at most 16 MiB, except where that would be less than 64 columns, and is at most a 16th of the classes,
    except where all classes are few.
    """
    columns = deferred_logits._columns(rows, classes)
    assert columns >= 1
    assert 4 * rows * columns <= deferred_logits.PIECE_BYTES or columns <= deferred_logits.NARROWEST
    assert columns <= -(-classes // deferred_logits.PIECES) or columns <= deferred_logits.NARROWEST
    assert columns >= min(classes, deferred_logits.NARROWEST)


def test_logits_read_after_the_optimizers_step_raise() -> None:
    """The weights that they would be computed from have changed."""
    torch.manual_seed(0)
    layer, h = nn.Linear(WIDTH, CLASSES), torch.randn(ROWS * LENGTH, WIDTH)
    opt = torch.optim.SGD(layer.parameters(), lr=0.1)
    with lowtide.budget(None, allow=ALLOW):
        logits = layer(h)
        F.cross_entropy(logits, torch.randint(0, CLASSES, (len(h),))).backward()
        opt.step()
        with pytest.raises(LeverError, match="before the optimizer's step"):
            logits.argmax()


def test_a_class_out_of_bounds_raises_as_in_the_baseline() -> None:
    layer, h = nn.Linear(WIDTH, CLASSES), torch.randn(ROWS * LENGTH, WIDTH)
    with lowtide.budget(None, allow=ALLOW), pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(layer(h), torch.full((len(h),), CLASSES))


def _llama() -> nn.Module:
    import transformers as hf

    return hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))


def _gpt2() -> nn.Module:
    import transformers as hf

    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=4096, n_positions=64, n_embd=64, n_layer=2, n_head=4))  # weights are tied


def _bert() -> nn.Module:
    import transformers as hf

    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=4096, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                            intermediate_size=128, max_position_embeddings=64))


def _t5() -> nn.Module:
    import transformers as hf

    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=4096, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
                                                     decoder_start_token_id=0))


def _train(make: Callable[[], nn.Module], steps: int = 4) -> tuple[list[torch.Tensor], int]:
    """Losses and weights, and the heap's peak in the last step above the bytes live before."""
    zoo.seed(0)
    gc.collect()
    base = heap().tensor_live
    model = make().train()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        heap().tensor_peak = heap().tensor_live
        opt.zero_grad()
        ids = torch.randint(0, 4096, (8, 48))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        found.append(loss.detach().clone())
        del loss
    peak = heap().tensor_peak - base
    return [*found, *(p.detach().clone() for p in model.parameters())], peak


@pytest.mark.long
@pytest.mark.parametrize("make", [_llama, _gpt2, _bert, _t5], ids=lambda m: m.__name__[1:])
def test_transformers_models_train_alike_in_less_memory(make: Callable[[], nn.Module]) -> None:
    """Losses agree within 1e-5 and the peak falls by more than 1.5 times the logits; a budget of 90 % of the new peak is held
    by a plan without changing a bit of the run with the lever.
    """
    torch.use_deterministic_algorithms(mode=True)
    plain, before = _train(make)
    with lowtide.budget(None, allow=ALLOW) as run:
        ours, after = _train(make)
        used = run.outcome.levers[0].used
    assert used
    logits = 8 * 48 * 4096 * 4
    assert before - after > 1.5 * logits
    for a, b in zip(ours[:4], plain[:4], strict=True):
        assert torch.allclose(a, b, rtol=1e-5)
    gc.collect()
    with lowtide.budget(live_now() + int(0.9 * after), allow=ALLOW) as run:
        held, peak = _train(make)
    outcome = run.outcome
    assert all(torch.equal(a, b) for a, b in zip(held, ours, strict=True))
    assert outcome.steps[-1].policy == "planned"
    assert peak <= int(0.9 * after)


def _case(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, CLASSES), torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True), torch.randint(300, CLASSES, (ROWS, LENGTH))


def _alike(form: Callable[[nn.Linear, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Assert that loss and gradients are close with and without the lever, NaNs included."""
    found = []
    for how in (contextlib.nullcontext(), lowtide.budget(None, allow=ALLOW)):
        layer, h, y = _case()
        with how:
            loss = form(layer, h, y)
            loss.backward()
        found.append([loss.detach(), h.grad, layer.weight.grad, layer.bias.grad])
    for a, b in zip(*found, strict=True):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


def _ce(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z.view(-1, CLASSES), y.view(-1))


def test_gradients_are_the_baselines_where_every_target_is_ignored() -> None:
    """With and without label smoothing; the loss is NaN."""
    _alike(lambda m, h, y: F.cross_entropy(m(h).view(-1, CLASSES), torch.full((ROWS * LENGTH,), -100)))
    _alike(lambda m, h, y: F.cross_entropy(m(h).view(-1, CLASSES), torch.full((ROWS * LENGTH,), -100), label_smoothing=0.1))


def test_classes_with_an_infinite_negative_bias_give_the_baselines_loss() -> None:
    def form(m: nn.Linear, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            m.bias[:256] = -torch.inf
        return _ce(m(h), y)

    _alike(form)


def test_reads_of_deferred_logits_keep_the_graph() -> None:
    """Logits read under inference_mode before their loss, and losses that go through other operators (scaling, log_softmax,
    gather), have the baseline's gradients.
    """
    def form(m: nn.Linear, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(h)
        with torch.inference_mode():
            z.argmax(-1)
        return _ce(z, y) + h.square().mean()

    _alike(form)
    _alike(lambda m, h, y: -F.log_softmax(m(h).float().view(-1, CLASSES) * 2, -1).gather(1, y.view(-1, 1)).mean())
    _alike(lambda m, h, y: F.log_softmax(m(h)[:, :-1].contiguous().view(-1, CLASSES), -1).square().mean())


def test_an_index_that_picks_a_class_before_an_ellipsis_is_not_deferred() -> None:
    """``logits[:, :, 5, ...]`` picks from the class dimension, so it is not an index of rows."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(512, 16))
    h, y = torch.randn(4, 512, 16), torch.randint(0, 512, (4,))
    want = F.cross_entropy(F.linear(h, w)[:, :, 5, ...], y)
    with lowtide.budget(None, allow=ALLOW):
        assert torch.allclose(F.cross_entropy(F.linear(h, w)[:, :, 5, ...], y), want)


def test_a_mask_overwritten_later_picks_what_it_picked() -> None:
    layer, h, y = _case()
    mask = y > 1000
    want = layer(h)[mask].detach()
    with lowtide.budget(None, allow=ALLOW):
        picked = layer(h)[mask]
        mask.fill_(False)
        assert torch.equal(picked.detach(), want)


def test_uses_of_deferred_logits_that_cannot_be_exact_raise() -> None:
    """Gradients of the logits after their loss, a function bound before the lever, graphs of gradients, and writes that no
    version counter shows.
    """

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * torch.full((ROWS, LENGTH, CLASSES), 2.0)

    bound = Twice.apply
    layer, h, y = _case()
    with lowtide.budget(None, allow=ALLOW):
        z = layer(h)
        loss = _ce(z, y)
        with pytest.raises(LeverError, match="gradient of the logits"):
            z.register_hook(lambda g: g)
        with pytest.raises(LeverError, match="gradient of the logits"):
            z.grad_fn.register_hook(lambda *g: None)
        with pytest.raises(LeverError, match="gradient of the logits"):
            torch.autograd.grad(loss, [z, h], allow_unused=True)
        with pytest.raises(LeverError, match="create_graph"):
            torch.autograd.grad(_ce(layer(h), y), h, create_graph=True)
        with pytest.raises(LeverError, match="would be lost"):
            bound(layer(h)).backward()
        late = layer(h)
        layer.weight.data.mul_(3)
        with pytest.raises(LeverError, match="changed"):
            late.argmax()


@pytest.mark.parametrize("what", ["weight", "inputs", "storage"])
def test_unseen_writes_to_weights_or_inputs_before_backward_raise(what: str) -> None:
    """The backward recomputes the outputs from them, and used to return the gradients of other outputs silently."""
    layer, h, y = _case()
    with lowtide.budget(None, allow=ALLOW):
        loss = _ce(layer(h), y)
        if what == "weight":
            layer.weight.data[7, 3].add_(1e-3)
        elif what == "inputs":
            h.data.mul_(1.5)
        else:
            layer.weight.data = layer.weight.data.sign()
        with pytest.raises(LeverError, match="between forward and backward"):
            loss.backward()


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_large_logits_are_as_close_to_float64_as_the_baselines(offset: float, smoothing: float) -> None:
    """For a confident model, one number per row, rounded at the size of the outputs, used to be ten to fifty times further
    off.
    """
    def form(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
        assert b is not None
        pull = F.one_hot(y.flatten(), CLASSES).to(h.dtype) @ w * 60
        z = F.linear(h.flatten(0, 1) * 0.01 + pull.detach(), w, b + offset)
        return F.cross_entropy(z, y.flatten(), label_smoothing=smoothing)

    exact = _grads(form, torch.float64, bias=True)
    plain = _errors(_grads(form, torch.float32, bias=True), exact)
    found, outcome = _in_pieces(form, bias=True)
    assert outcome.levers[0].used
    for ours, theirs in zip(_errors(found, exact), plain, strict=True):
        assert ours <= 1.3 * theirs + 2e-7


def test_a_checkpointed_head_with_a_computed_weight_is_deferred_again() -> None:
    """The forward that runs again defers its logits as before, although the weight is another tensor."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    head = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, CLASSES))
    h, y = torch.randn(ROWS * LENGTH, WIDTH, requires_grad=True), torch.randint(0, CLASSES, (ROWS * LENGTH,))

    def train() -> list[torch.Tensor]:
        head.zero_grad()
        loss = checkpoint(lambda t: F.cross_entropy(head(t), y), h, use_reentrant=False)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in head.parameters() if p.grad is not None)]

    plain = train()
    with lowtide.budget(None, allow=ALLOW) as run:
        for _ in range(3):
            pieces = train()
        assert run.outcome.levers[0].used
    for a, b in zip(pieces, plain, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_function_kept_by_the_script_does_not_defer_after_the_block() -> None:
    layer, h, _ = _case()
    with lowtide.budget(None, allow=ALLOW):
        kept = F.linear
        assert type(kept(h, layer.weight)) is not torch.Tensor
    assert type(kept(h, layer.weight)) is torch.Tensor


def test_keyword_calls_and_checkpointed_heads_match_the_baseline() -> None:
    """Also a checkpointed head whose logits have no loss."""
    from torch.utils.checkpoint import checkpoint

    _alike(lambda m, h, y: _ce(F.linear(input=h, weight=m.weight, bias=m.bias), y))
    _alike(lambda m, h, y: checkpoint(lambda x: _ce(m(x), y), h, use_reentrant=False))

    def form(m: nn.Linear, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        m(h).sum()
        return checkpoint(lambda x: (m(x).sum(-1, keepdim=True) * x.exp()).sum(), h, use_reentrant=False)

    _alike(form)
