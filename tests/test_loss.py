"""The chunked linear cross-entropy against torch's plain one, in value and gradient."""

import pytest
import torch
import torch.nn.functional as F
from host_waits import NoHostWaits
from torch.utils._python_dispatch import TorchDispatchMode

from model.loss import fitting_rows, linear_cross_entropy_sum

ROWS, HIDDEN, VOCAB = 37, 24, 101


def make_case(dtype=torch.float64, ignored=5):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    targets[:ignored] = -100
    return hidden, weight, targets


def plain_sum(hidden, weight, targets, label_smoothing=0.0, z_loss=0.0):
    logits = hidden @ weight.t()
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)
    valid = targets != -100
    return loss + z_loss * (logits.logsumexp(dim=1).square() * valid).sum()


def value_and_gradients(function, hidden, weight, scale=1.0):
    value = function(hidden, weight)
    gradients = torch.autograd.grad(value * scale, (hidden, weight))
    return value.detach(), *gradients


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 0.2, "z_loss": 0.1}]
)
@pytest.mark.parametrize("chunk_rows", [1, 10, ROWS, None])
def test_loss_and_gradients_equal_plain_cross_entropy(dtype, tolerance, options, chunk_rows):
    hidden, weight, targets = make_case(dtype)
    ours = value_and_gradients(
        lambda h, w: linear_cross_entropy_sum(h, w, targets, chunk_rows, **options)[0], hidden, weight, scale=0.37
    )
    plain = value_and_gradients(lambda h, w: plain_sum(h, w, targets, **options), hidden, weight, scale=0.37)
    for got, expected in zip(ours, plain, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_the_size_of_the_softmax_blocks_does_not_matter(monkeypatch):
    hidden, weight, targets = make_case()
    results = []
    for rows in (1, 8, ROWS):
        monkeypatch.setattr("model.loss.CPU_BLOCK_BYTES", rows * VOCAB * 8)
        results.append(
            value_and_gradients(lambda h, w: linear_cross_entropy_sum(h, w, targets, 20, 0.1, 0.1)[0], hidden, weight)
        )
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_cross_entropy_part_leaves_out_smoothing_and_z_loss():
    hidden, weight, targets = make_case()
    total, cross_entropy = linear_cross_entropy_sum(hidden, weight, targets, label_smoothing=0.1, z_loss=0.01)
    torch.testing.assert_close(cross_entropy, plain_sum(hidden, weight, targets))
    torch.testing.assert_close(total, plain_sum(hidden, weight, targets, 0.1, 0.01))
    assert not cross_entropy.requires_grad


def test_all_targets_ignored_gives_zero_loss_and_zero_gradients():
    hidden, weight, targets = make_case(ignored=ROWS)
    total, cross_entropy = linear_cross_entropy_sum(hidden, weight, targets, 8, label_smoothing=0.1, z_loss=0.1)
    total.backward()
    assert total.item() == 0.0 == cross_entropy.item()
    assert not hidden.grad.any() and not weight.grad.any()


def test_no_gradients_are_made_without_need():
    hidden, weight, targets = make_case()
    with torch.no_grad():
        total, _ = linear_cross_entropy_sum(hidden, weight, targets)
    assert not total.requires_grad
    torch.testing.assert_close(total, plain_sum(hidden, weight, targets).detach())


def test_autocast_bfloat16_sum_is_a_float32_close_to_the_exact_one():
    hidden, weight, targets = make_case(torch.float32)
    exact = value_and_gradients(lambda h, w: plain_sum(h, w, targets), hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        ours = value_and_gradients(lambda h, w: linear_cross_entropy_sum(h, w, targets, 10)[0], hidden, weight)
    assert [x.dtype for x in ours] == [torch.float32] * 3
    assert abs(ours[0] - exact[0]) / exact[0] < 1e-3
    for got, expected in zip(ours[1:], exact[1:], strict=True):
        assert (got - expected).norm() / expected.norm() < 1e-2


def test_a_large_loss_scale_does_not_overflow_half_precision():
    hidden, weight, targets = make_case(torch.float32)
    exact = value_and_gradients(lambda h, w: plain_sum(h, w, targets), hidden, weight)
    with torch.autocast("cpu", torch.float16):
        total, _ = linear_cross_entropy_sum(hidden, weight, targets)
    grads = torch.autograd.grad(total * 2.0**20, (hidden, weight))
    for got, expected in zip(grads, exact[1:], strict=True):
        assert (got / 2.0**20 - expected).norm() / expected.norm() < 1e-2


def test_gradients_can_be_taken_twice_from_one_forward():
    hidden, weight, targets = make_case()
    total, _ = linear_cross_entropy_sum(hidden, weight, targets)
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("value", "share"), [(16, 0.05), (16, 1.0), (64, 0.2), (200, 0.1)])
def test_a_float16_weight_gradient_is_finite_and_right(value, share):
    """8,192 rows with one large hidden channel and a common target: sums of up to 131,072 before any scale acts."""
    rows, generator = 8192, torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, HIDDEN, generator=generator)
    hidden[:, 0] = value
    weight = (0.02 * torch.randn(VOCAB, HIDDEN, generator=generator)).requires_grad_()
    targets = torch.randint(1, VOCAB, (rows,), generator=generator)
    targets[: int(share * rows)] = 0
    exact_hidden, exact_weight = hidden.double(), weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(plain_sum(exact_hidden, exact_weight, targets), exact_weight)
    with torch.autocast("cpu", torch.float16):
        total, _ = linear_cross_entropy_sum(hidden.half(), weight, targets)
    (found,) = torch.autograd.grad(total * 2.0**-10, weight)
    assert found.isfinite().all()
    assert (found * 2.0**10 - expected).norm() / expected.norm() < 2e-3


def test_a_hidden_state_that_is_not_finite_stays_visible():
    hidden, weight, targets = make_case(torch.float16)
    with torch.no_grad():
        hidden[7, 3] = float("inf")
    total, _ = linear_cross_entropy_sum(hidden, weight, targets)
    (gradient,) = torch.autograd.grad(total, weight)
    assert not gradient.isfinite().all()


def test_scales_multiply_gradients_in_float32():
    """CUDA would round a 0-dim float32 factor to the half precision of the gradients; a CPU does not."""
    hidden, weight, targets = make_case(torch.bfloat16)
    total, _ = linear_cross_entropy_sum(hidden, weight, targets)
    factors = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket is torch.ops.aten.mul:
                factors.append({x.dtype for x in args if isinstance(x, torch.Tensor)})
            return func(*args, **(kwargs or {}))

    with Products():
        torch.autograd.grad(total, (hidden, weight), torch.tensor(0.37))
    assert factors == [{torch.float32}] * 2


@pytest.mark.parametrize(
    ("rows", "vocab", "device_type", "expected"),
    [
        (32768, 150_000, "cuda", 2048),  # 16 chunks, where 128 MiB would make 74 of 447 rows
        (4096, 150_000, "cuda", 1024),
        (32768, 6400, "cuda", 10485),
        (32768, 150_000, "cpu", 447),
    ],
)
def test_chunks_on_an_accelerator_are_large_and_few(rows, vocab, device_type, expected):
    assert fitting_rows(rows, vocab, torch.bfloat16, device_type) == expected


def test_a_large_vocabulary_unrolls_to_few_products(monkeypatch):
    counted = []
    monkeypatch.setattr("model.loss.compute_dtype", lambda tensor: tensor.dtype)  # autocast does not know the device

    def count(graph, inputs):
        counted.extend(node for node in graph.graph.nodes if "log_softmax" in str(node.target))
        return graph.forward

    torch._dynamo.reset()
    with torch.device("meta"):  # where as little is computed as while compiling for CUDA
        hidden, weight = torch.empty(32768, 64), torch.empty(150_000, 64)
        targets = torch.empty(32768, dtype=torch.int64)
        with torch.no_grad():
            torch.compile(linear_cross_entropy_sum, dynamic=False, backend=count)(hidden, weight, targets)
    assert len(counted) == 16


def test_the_loss_never_makes_the_host_wait():
    hidden, weight, targets = make_case(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        with NoHostWaits(), torch.autocast("cpu", dtype):
            total, _ = linear_cross_entropy_sum(hidden, weight, targets, 10, label_smoothing=0.1, z_loss=0.1)
            total.backward()
