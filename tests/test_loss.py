"""The chunked linear cross-entropy against torch's plain one, in value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from model.loss import linear_cross_entropy_sum

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
