"""Packed rows on the flash kernels' path, as far as a CPU can show it: values, shapes, compilations, host waits."""

from __future__ import annotations

import random

import pytest
import torch
from host_waits import NoHostWaits
from test_model import KINDS, build, pack, some_documents
from varlen_on_cpu import varlen_calls  # noqa: F401 - a fixture

from model.attention import segment_boundaries


def make_batch(*rows, length=256):
    """Rows holding documents of these lengths, with what a loader counts on the host."""
    packed = [pack(some_documents(lengths, seed=7 + index), length) for index, lengths in enumerate(rows)]
    batch = {key: torch.cat([row[key] for row in packed]) for key in packed[0]}
    batch["boundaries"] = segment_boundaries(batch["segment_ids"])
    batch["longest"] = int(batch["boundaries"].diff().max())
    return batch


def varlen_model(moe=False, **fields):
    model = build(moe, **fields)
    model.attention_backend = "varlen"
    return model


def random_batch(draw: random.Random) -> dict:
    return make_batch(*([draw.randint(2, 20) for _ in range(draw.randint(1, 12))] for _ in range(2)))


def test_no_more_segments_reach_the_kernel_than_there_are(varlen_calls):  # noqa: F811
    batch = make_batch([9, 40, 3], [2] * 20)
    varlen_model()(**batch)
    real = 3 + 20
    assert varlen_calls == [(real + 2, 256 - 20)] * 2  # one run of padding a row; two layers
    assert varlen_calls[0][0] < 2 * real


@pytest.mark.parametrize("counted_by", ["the loader", "the model"])
@pytest.mark.parametrize("compiled", [False, True])
def test_varlen_equals_attention_by_segment(varlen_calls, compiled, counted_by):  # noqa: F811
    model, batch = build(), make_batch([9, 140, 3], [200], [])
    if counted_by == "the model":
        del batch["boundaries"], batch["longest"]
    results = []
    for backend in ("segments", "varlen"):
        model.attention_backend = backend
        if compiled and backend == "varlen":
            torch._dynamo.reset()
            for block in model.model.layers:
                block.compile(dynamic=False, backend="aot_eager")
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert len(varlen_calls) == 2
    for by_segment, varlen in zip(*results, strict=True):
        torch.testing.assert_close(varlen, by_segment, rtol=1e-4, atol=1e-6)


@KINDS
def test_50_batches_compile_a_block_once_a_mode_and_length(varlen_calls, moe):  # noqa: F811
    torch._dynamo.reset()
    model, draw, compiled, kinds = varlen_model(moe), random.Random(1), [], set()

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    for block in model.model.layers:
        block.compile(dynamic=False, backend=count)
    for number in range(50):
        training = number % 5 > 0
        with torch.set_grad_enabled(training):
            model.train(training)(**random_batch(draw))
        kinds.add((training, varlen_calls[-1][1]))
        if number == 0:
            graphs_of_a_block = len(compiled)
    assert len({segments for segments, _ in varlen_calls}) > 10
    assert {longest for _, longest in varlen_calls} == {128, 256}
    assert len(compiled) <= graphs_of_a_block * len(kinds)  # fewer where experts break a block: only attention asks


def test_a_compiled_block_meets_at_most_three_lengths(varlen_calls):  # noqa: F811
    torch._dynamo.reset()
    model = varlen_model()
    for block in model.model.layers:
        block.compile(dynamic=False, backend="eager")
    with torch.no_grad():
        for longest in (1, 100, 128, 129, 511, 512, 513, 2000, 2048):
            ids = torch.arange(2048).unsqueeze(0) // longest
            boundaries = segment_boundaries(ids)
            model(torch.zeros_like(ids), segment_ids=ids, boundaries=boundaries, longest=longest)
    assert [longest for _, longest in varlen_calls[::2]] == [128, 128, 128, 512, 512, 512, 2048, 2048, 2048]


@pytest.mark.parametrize("checkpointing", [False, True])
@KINDS
def test_a_step_never_makes_the_host_wait(varlen_calls, monkeypatch, moe, checkpointing):  # noqa: F811
    monkeypatch.setattr("model.moe.grouped_products_run_on", lambda *_: True)  # as on Hopper
    model, batch = varlen_model(moe), make_batch([9, 40, 3], [60], [])
    model.activation_checkpointing = checkpointing
    with NoHostWaits(), torch.autocast("cpu", torch.bfloat16):
        model(**batch, target_count=torch.tensor(99.0), label_smoothing=0.1, z_loss=1e-3).loss.backward()
    assert len(varlen_calls) == 2 + 2 * checkpointing
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_counting_segments_in_the_model_makes_the_host_wait(varlen_calls):  # noqa: F811
    batch = make_batch([9, 40, 3])
    del batch["boundaries"]
    with NoHostWaits(), pytest.raises(AssertionError, match="nonzero makes the host wait"):
        varlen_model()(**batch)
