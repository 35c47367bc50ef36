import itertools
import json
import pickle
import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import TEXT, make_folder
from torch.utils.data import DataLoader

import dataset.lm_dataset as lm_dataset
from dataset.lm_dataset import Batch, PretrainDataset, choose_documents
from dataset.packing import RowOrder
from dataset.text_tokenizer import TextTokenizer
from dataset.token_cache import TokenCache, build_or_open

VOCAB = 420


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return TextTokenizer.load(make_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def make_cache(tmp_path_factory, tokenizer):
    def make(texts) -> TokenCache:
        folder = tmp_path_factory.mktemp("corpus")
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "a.jsonl").write_text("".join(lines), encoding="utf-8")
        return build_or_open(folder / "a.jsonl", tokenizer, cache_dir=folder / "cache", progress=False)

    return make


TEXTS = [(TEXT * 2)[i : i + 1 + (i * 37) % 150] or "x" for i in range(100)]
TEXTS = [text if text.strip() else "x" for text in TEXTS]


@pytest.fixture(scope="module")
def cache(make_cache):
    return make_cache(TEXTS)


def documents_of(cache):
    offsets = cache.document_offsets.tolist()
    return [cache.tokens[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def pieces_of(batch: Batch):
    """(inputs, targets) of every piece of a packed batch, after checking that padding and positions are as stated."""
    for row in range(len(batch.input_ids)):
        ids, targets = batch.input_ids[row], batch.targets[row]
        positions, documents = batch.position_ids[row], batch.segment_ids[row]
        padding = documents == -1
        assert bool((targets[padding] == -100).all()) and bool((positions[padding] == 0).all())
        count = int(documents.max()) + 1
        assert documents[~padding].tolist() == sorted(documents[~padding].tolist())
        for number in range(count):
            at = documents == number
            assert positions[at].tolist() == list(range(int(at.sum())))
            yield ids[at].tolist(), targets[at].tolist()


# --- packed batches ---


@pytest.mark.parametrize("size", [2, 7, 32, 512])
def test_the_rows_hold_exactly_the_tokenised_documents(cache, size):
    """Pieces come in row order; sorted by where they lie in the corpus and joined, they are the documents."""
    dataset = PretrainDataset(cache, size)
    assert documents_rebuilt(cache, dataset) == documents_of(cache)


def documents_rebuilt(cache, dataset):
    pieces = list(pieces_of(dataset.batch(list(range(len(dataset)))))) if len(dataset) else []
    in_corpus_order = np.argsort(dataset.plan.piece_start, kind="stable")
    documents: list[list[int]] = []
    for number in in_corpus_order.tolist():
        inputs, targets = pieces[number]
        assert inputs[1:] == targets[:-1]
        starts_document = int(dataset.plan.piece_start[number]) in set(cache.document_offsets.tolist())
        if starts_document:
            documents.append([inputs[0]])
        assert documents[-1][-1] == inputs[0]  # a further piece begins with the last token of the one before
        documents[-1] += targets
    return documents


visible_text = st.text(min_size=1, max_size=60).filter(lambda text: text.strip())


@settings(max_examples=40, deadline=None)
@given(st.lists(visible_text, min_size=1, max_size=12), st.integers(2, 40))
def test_whatever_texts_go_in_come_out_of_the_rows_with_every_target_once(make_cache, tokenizer, texts, size):
    cache = make_cache(texts)
    dataset = PretrainDataset(cache, size)
    documents = documents_rebuilt(cache, dataset)
    ids = tokenizer.encode_batch(texts)
    assert documents == [[tokenizer.bos_id, *each, tokenizer.eos_id] for each in ids]
    assert [tokenizer.decode(document[1:-1]) for document in documents] == texts
    targets = sum(len(each) + 1 for each in ids)
    assert int(dataset.row_targets.sum()) == targets == dataset.ledger["targets"]
    shutil.rmtree(cache.folder.parent.parent)


def test_row_targets_count_the_valid_targets_of_each_row(cache):
    for packing in (True, False):
        dataset = PretrainDataset(cache, 32, packing)
        batch = dataset.batch(list(range(len(dataset))))
        assert (batch.targets != -100).sum(1).tolist() == dataset.row_targets.tolist()
        batch.validate(VOCAB)


def test_missing_rows_are_empty_and_leave_the_others_alone(cache):
    for packing in (True, False):
        dataset = PretrainDataset(cache, 32, packing)
        batch, alone = dataset.batch([-1, 3, -1]), dataset[3]
        for missing in (0, 2):
            assert set(batch.input_ids[missing].tolist()) == {cache.pad_id}
            assert set(batch.targets[missing].tolist()) == {-100}
            assert set(batch.segment_ids[missing].tolist()) == {-1}
        for name in ("input_ids", "targets", "position_ids", "segment_ids"):
            assert torch.equal(getattr(batch, name)[1], alone[name]), name
        nothing = dataset.batch([-1, -1])
        nothing.validate(VOCAB)
        assert bool((nothing.targets == -100).all())


def test_rows_may_be_asked_for_in_any_order_and_more_than_once(cache):
    dataset = PretrainDataset(cache, 32)
    batch = dataset.batch([5, 0, 5])
    assert torch.equal(batch.input_ids[0], batch.input_ids[2])
    assert torch.equal(batch.input_ids[1], dataset[0]["input_ids"])
    assert torch.equal(dataset[-1]["input_ids"], dataset[len(dataset) - 1]["input_ids"])
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_without_packing_the_rows_are_minimind_rows_token_for_token(cache, tokenizer):
    size = 32
    dataset = PretrainDataset(cache, size, packing=False)
    batch = dataset.batch(list(range(len(dataset))))
    for row, text in enumerate(TEXTS):
        ids = tokenizer.encode_batch([text])[0][: size - 2]
        ids = [tokenizer.bos_id, *ids, tokenizer.eos_id]
        padded = ids + [tokenizer.pad_id] * (size - len(ids))
        assert batch.input_ids[row].tolist() == padded
        labels = [number if i < len(ids) else -100 for i, number in enumerate(padded)]
        assert batch.targets[row].tolist() == [*labels[1:], -100]
        assert batch.position_ids[row].tolist() == [*range(len(ids)), *[0] * (size - len(ids))]
        assert batch.segment_ids[row].tolist() == [0] * len(ids) + [-1] * (size - len(ids))
    long = [len(ids) for ids in tokenizer.encode_batch(TEXTS) if len(ids) + 2 > size]
    assert dataset.ledger["documents_cut"] == len(long) > 5
    assert dataset.ledger["tokens_cut"] == sum(long) - len(long) * (size - 2)


def test_the_ledger_accounts_for_every_position(cache):
    packed, single = PretrainDataset(cache, 40), PretrainDataset(cache, 40, packing=False)
    for dataset in (packed, single):
        batch = dataset.batch(list(range(len(dataset))))
        padding = float((batch.segment_ids == -1).double().mean())
        assert dataset.ledger["padding_share"] == pytest.approx(padding, abs=1e-12)
        assert dataset.ledger["positions"] == batch.input_ids.numel()
        assert dataset.ledger["targets"] == int((batch.targets != -100).sum())
    lengths = np.diff(cache.document_offsets)
    assert packed.ledger["documents_split"] == int((lengths - 1 > 40).sum()) > 5
    assert packed.ledger["documents_cut"] == packed.ledger["tokens_cut"] == 0


def test_row_bytes_add_up_to_the_bytes_of_all_documents_split_or_not(cache):
    for size in (16, 512):
        dataset = PretrainDataset(cache, size)
        assert len(dataset.row_bytes) == len(dataset)
        assert dataset.row_bytes.sum() == sum(len(text.encode("utf-8")) for text in TEXTS)


def test_row_bytes_of_a_row_are_those_of_the_documents_it_holds(cache):
    dataset = PretrainDataset(cache, 512)
    ends = [int((dataset[row]["targets"] == cache.eos_id).sum()) for row in range(len(dataset))]
    assert sum(ends) == len(TEXTS)
    single = PretrainDataset(cache, 40, packing=False)
    lengths = np.diff(cache.document_offsets)
    expected = np.where(lengths <= 40, cache.document_bytes, 0)
    assert single.row_bytes.tolist() == expected.tolist()


def test_a_subset_of_documents_makes_rows_of_those_alone(cache):
    chosen = np.array([70, 3, 11, 12])
    dataset = PretrainDataset(cache, 32, documents=chosen)
    documents = documents_of(cache)
    expected = Counter(token for number in chosen for token in documents[number][1:])
    batch = dataset.batch(list(range(len(dataset))))
    assert Counter(batch.targets[batch.targets != -100].tolist()) == expected
    assert dataset.row_bytes.sum() == sum(len(TEXTS[number].encode("utf-8")) for number in chosen)
    assert dataset.ledger["documents"] == 4


# --- plans kept on disk ---


def test_a_plan_is_made_once_and_read_afterwards(make_cache, monkeypatch):
    cache = make_cache(TEXTS[:30])
    first = PretrainDataset(cache, 32)
    PretrainDataset(cache, 32, documents=np.arange(5))

    def fail(*_):
        raise AssertionError("planned again")

    monkeypatch.setattr(lm_dataset, "plan_rows", fail)
    again = PretrainDataset(cache, 32)
    assert all(np.array_equal(getattr(first.plan, name), getattr(again.plan, name)) for name in vars(first.plan))
    assert PretrainDataset(cache, 32, documents=np.arange(5)[::-1]).ledger["documents"] == 5
    for other in ({"max_seq_len": 33}, {"packing": False}, {"documents": np.arange(6)}):
        with pytest.raises(AssertionError, match="planned again"):
            PretrainDataset(cache, **({"max_seq_len": 32} | other))


@pytest.mark.parametrize("name", ["piece_start.bin", "row_offsets.bin", "metadata.json"])
def test_a_damaged_plan_is_made_again(make_cache, name):
    cache = make_cache(TEXTS[:30])
    expected = PretrainDataset(cache, 32)[0]
    file = cache.folder / "plans" / "packed_32_all" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    assert torch.equal(PretrainDataset(cache, 32)[0]["input_ids"], expected["input_ids"])


def test_a_cache_that_cannot_be_written_to_still_serves(make_cache, monkeypatch):
    cache = make_cache(TEXTS[:30])
    expected = PretrainDataset(cache, 32)[0]
    shutil.rmtree(cache.folder / "plans")
    (cache.folder / "plans").write_text("a file where a folder should be")
    dataset = PretrainDataset(cache, 32)
    assert torch.equal(dataset[0]["input_ids"], expected["input_ids"])
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[0]["input_ids"], expected["input_ids"])


def test_a_pickled_dataset_is_small_and_gives_the_same_rows(cache):
    dataset = PretrainDataset(cache, 32, documents=np.arange(50))
    data = pickle.dumps(dataset)
    copy = pickle.loads(data)
    assert len(data) < 10_000 and len(copy) == len(dataset)
    assert torch.equal(copy[2]["targets"], dataset[2]["targets"])


@pytest.mark.parametrize("workers", [0, 1])
def test_any_data_loader_can_use_the_dataset(cache, workers):
    dataset = PretrainDataset(cache, 32)
    options = {"multiprocessing_context": "spawn"} if workers else {}
    batches = list(DataLoader(dataset, batch_size=8, num_workers=workers, **options))
    assert sum(len(batch["input_ids"]) for batch in batches) == len(dataset)
    for first, batch in zip(range(0, len(dataset), 8), batches, strict=True):
        ours = dataset.batch(list(range(first, min(first + 8, len(dataset)))))
        for name in ("input_ids", "targets", "position_ids", "segment_ids"):
            assert torch.equal(batch[name], getattr(ours, name))


@pytest.mark.slow
def test_a_batch_costs_less_than_a_millisecond_and_a_million_documents_open_within_two_seconds(make_cache):
    cache = make_cache([f"word {i}" for i in range(1_000_000)])
    documents = np.flatnonzero(np.arange(1_000_000) % 20)
    PretrainDataset(cache, 512, documents=documents)
    started = time.perf_counter()
    dataset = PretrainDataset(cache, 512, documents=documents)
    assert time.perf_counter() - started < 2
    rows = RowOrder(len(dataset), 0, 0)[:3200].reshape(-1, 32).tolist()
    started = time.perf_counter()
    for row in rows:
        dataset.batch(row)
    print(f"batch of 32 x 512: {(time.perf_counter() - started) / len(rows) * 1e3:.2f} ms")


# --- evaluation documents ---


def test_chosen_documents_fill_no_more_rows_than_asked_and_most_of_them(cache):
    for max_rows in (1, 3, 10, 40):
        chosen = choose_documents(cache, max_rows, 64)
        rows = len(PretrainDataset(cache, 64, documents=chosen))
        assert max_rows - 1 <= rows <= max_rows and sorted(set(chosen.tolist())) == chosen.tolist()


def test_chosen_documents_are_the_same_each_time_and_not_the_first_ones(cache):
    chosen = choose_documents(cache, 5, 64)
    assert np.array_equal(chosen, choose_documents(cache, 5, 64)) and chosen.tolist() != list(range(len(chosen)))


def test_all_documents_are_chosen_when_they_fit_or_none_is_asked_for(cache):
    assert choose_documents(cache, 0, 64).tolist() == list(range(100))
    assert choose_documents(cache, 10_000, 64).tolist() == list(range(100))


def test_documents_longer_than_all_rows_asked_for_are_passed_over(make_cache):
    cache = make_cache([TEXT * 20, "a", TEXT * 30])
    assert choose_documents(cache, 1, 16).tolist() == [1]
    assert choose_documents(make_cache([TEXT * 30, TEXT * 20]), 1, 16).tolist() == [1]


# --- validate ---


def batch_of(**changes):
    shape = (2, 4)
    tensors = {
        "input_ids": torch.ones(shape, dtype=torch.int64),
        "targets": torch.tensor([[1, 2, -100, -100], [1, 1, 1, 1]]),
        "position_ids": torch.arange(4).expand(shape).clone(),
        "segment_ids": torch.tensor([[0, 0, -1, -1], [0, 0, 1, 1]]),
        "boundaries": torch.tensor([0, 2, 4, 6, 8], dtype=torch.int32),
        "longest": 2,
    }
    return Batch(**(tensors | changes))


WRONG_BATCHES = {
    "shape": ({"targets": torch.ones(2, 3, dtype=torch.int64)}, "targets is"),
    "flat": ({"input_ids": torch.ones(8, dtype=torch.int64)}, "input_ids is"),
    "dtype": ({"position_ids": torch.zeros(2, 4, dtype=torch.int32)}, "position_ids is torch.int32"),
    "float": ({"segment_ids": torch.zeros(2, 4)}, "segment_ids is torch.float32"),
    "device": ({"targets": torch.ones(2, 4, dtype=torch.int64, device="meta")}, "targets is torch.int64 .* on meta"),
    "id too large": ({"input_ids": torch.full((2, 4), 10)}, "outside the vocabulary of 10"),
    "id negative": ({"input_ids": torch.full((2, 4), -1)}, "outside the vocabulary of 10"),
    "target too large": ({"targets": torch.tensor([[1, 2, -100, -100], [1, 1, 10, 1]])}, "targets hold"),
    "target negative": ({"targets": torch.tensor([[1, -1, -100, -100], [1, 1, 1, 1]])}, "targets hold"),
    "position": ({"position_ids": torch.full((2, 4), 4)}, "position_ids must"),
    "padding with a target": ({"targets": torch.ones(2, 4, dtype=torch.int64)}, "padding"),
}


@pytest.mark.parametrize("case", WRONG_BATCHES)
def test_validate_names_what_is_wrong(case):
    changes, phrase = WRONG_BATCHES[case]
    batch_of().validate(10)
    with pytest.raises(ValueError, match=phrase):
        batch_of(**changes).validate(10)


def test_validate_is_for_the_host():
    with pytest.raises(ValueError, match="on the host"):
        batch_of().to(torch.device("meta")).validate(10)


def test_boundaries_are_the_starts_of_segments_and_padding(cache):
    dataset = PretrainDataset(cache, 32)
    batch = dataset.batch([*range(min(6, len(dataset))), -1])
    flat = batch.segment_ids.flatten()
    row = torch.arange(len(flat)) // 32
    starts = [0, *(i for i in range(1, len(flat)) if flat[i] != flat[i - 1] or row[i] != row[i - 1]), len(flat)]
    assert batch.boundaries.tolist() == starts and batch.boundaries.dtype == torch.int32
    assert batch.longest == 32  # the missing row is one run of padding


def test_the_ledger_of_some_documents_counts_these_alone(cache):
    part = PretrainDataset(cache, 32, documents=np.arange(10)).ledger
    assert part["documents"] == 10
    assert part["tokens"] == int(cache.document_offsets[10])
    assert part["bytes"] == int(cache.document_bytes[:10].sum())
    assert part["bytes_per_token"] == part["bytes"] / (part["tokens"] - 20)


# --- the shared corpus ---


def test_padding_of_the_shared_corpus_is_below_one_percent_at_512(shared_data, tmp_path):
    tokenizer = TextTokenizer.load(Path(__file__).resolve().parents[1] / "model")
    cache = build_or_open(shared_data / "val.jsonl", tokenizer, cache_dir=tmp_path, progress=False)
    assert PretrainDataset(cache, 512).ledger["padding_share"] < 0.01
