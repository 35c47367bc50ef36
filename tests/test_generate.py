"""Drawing text and the generate command: seeds, streaming, no traces left, and every kind of `--load`."""

import io
import random

import pytest
import torch
from safetensors.torch import save_file
from tiny_tokenizer import make_folder
from transformers import Qwen3Config

from dataset.text_tokenizer import TextTokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import next_token_probabilities, sample_text
from model.shapes import config_from_weights
from scripts.generate import load_model, main
from training.saving.weights import write_weights

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return TextTokenizer.load(tokenizer_folder)


def build(tokenizer, **fields):
    torch.manual_seed(0)
    return MiniMindForCausalLM(MiniMindConfig(**SHAPE, vocab_size=tokenizer.vocab_size, **fields)).eval()


class OneTokenModel(torch.nn.Module):
    """A stand-in that says the given token ids one after another, whatever it reads."""

    device = torch.device("cpu")

    def __init__(self, ids, vocab_size):
        super().__init__()
        self.ids, self.vocab_size = list(ids), vocab_size

    def forward(self, input_ids, cache=None, use_cache=True):
        said = cache or 0
        logits = torch.full((1, 1, self.vocab_size), -50.0)
        logits[..., self.ids[said]] = 50.0
        return type("Output", (), {"logits": logits, "cache": said + 1})


def save_card_weights(folder, model, tokenizer, tokenizer_folder, **card):
    """A run folder as the trainer leaves it, weights and card only."""
    values = {
        "config": model.config.to_dict(),
        "tokenizer_digest": tokenizer.digest,
        "tokenizer_path": str(tokenizer_folder),
    }
    path = folder / f"{folder.name}.pth"
    write_weights(path, model.state_dict(), {"format": 1, "kind": "minimind-weights", **values, **card})
    return path


def test_the_same_seed_writes_the_same_text_and_another_seed_another(tokenizer):
    model = build(tokenizer)
    texts = [sample_text(model, tokenizer, "Once", max_new_tokens=20, temperature=2.0, seed=s) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_sampling_leaves_the_global_random_numbers_and_the_mode_as_they_were(tokenizer):
    model = build(tokenizer, dropout=0.5).train()
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    sample_text(model, tokenizer, "Once", max_new_tokens=5)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_mode_is_restored_when_sampling_fails(tokenizer):
    model = build(tokenizer).train()

    def fail(piece):
        raise OSError("broken pipe")

    with pytest.raises(OSError, match="broken pipe"):
        sample_text(model, tokenizer, "Once", max_new_tokens=50, temperature=3.0, on_text=fail)
    assert model.training


def test_text_ends_at_the_end_of_the_document_and_at_the_limit(tokenizer):
    words = tokenizer.encode_batch(["a little fox"])[0]
    model = OneTokenModel([*words, tokenizer.eos_id, *words], tokenizer.vocab_size)
    assert sample_text(model, tokenizer, "There was ", max_new_tokens=50) == "a little fox"
    assert sample_text(model, tokenizer, "There was ", max_new_tokens=1) == tokenizer.decode(words[:1])


def test_streamed_pieces_are_whole_characters_and_join_to_the_text(tokenizer):
    text = "héllo 你好 🦊 fox"
    ids = tokenizer.encode_batch([text])[0]
    assert len(ids) > len(text)  # the fox and others take several tokens
    pieces = []
    model = OneTokenModel([*ids, tokenizer.eos_id], tokenizer.vocab_size)
    assert sample_text(model, tokenizer, "", max_new_tokens=99, on_text=pieces.append) == text
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_off_by_the_limit_is_still_shown(tokenizer):
    ids = tokenizer.encode_batch(["🦊"])[0]
    pieces = []
    text = sample_text(OneTokenModel(ids, tokenizer.vocab_size), tokenizer, "", max_new_tokens=2, on_text=pieces.append)
    assert "".join(pieces) == text == "\ufffd"


def test_top_k_and_top_p_keep_the_most_probable_tokens_only():
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0]).log()
    torch.testing.assert_close(next_token_probabilities(logits), torch.tensor([1.0, 3.0, 2.0, 0.0]) / 6)
    torch.testing.assert_close(next_token_probabilities(logits, top_k=2), torch.tensor([0, 0.6, 0.4, 0]))
    torch.testing.assert_close(next_token_probabilities(logits, top_p=0.6), torch.tensor([0, 0.6, 0.4, 0]))
    torch.testing.assert_close(next_token_probabilities(logits, top_p=1e-6), torch.tensor([0, 1.0, 0, 0]))
    torch.testing.assert_close(next_token_probabilities(logits, 0.5), torch.tensor([1.0, 9.0, 4.0, 0.0]) / 14)


def test_temperature_zero_is_the_most_probable_token_and_a_tiny_one_nearly(tokenizer):
    model = build(tokenizer)
    greedy = sample_text(model, tokenizer, "Once", max_new_tokens=10, temperature=0, seed=1)
    assert greedy == sample_text(model, tokenizer, "Once", max_new_tokens=10, temperature=0, seed=2)
    assert greedy == sample_text(model, tokenizer, "Once", max_new_tokens=10, temperature=1e-4, seed=3)


@pytest.mark.parametrize("fields", [{}, {"use_moe": True, "num_experts": 3}, {"tie_word_embeddings": False}])
def test_shapes_tell_the_configuration_of_weights_without_a_card(tokenizer, fields):
    model = build(tokenizer, intermediate_size=48, **fields)
    found = config_from_weights(model.state_dict())
    names = [*SHAPE, *fields, "head_dim", "vocab_size", "moe_intermediate_size", "intermediate_size"]
    assert {name: getattr(found, name) for name in names} == {name: getattr(model.config, name) for name in names}


@pytest.mark.parametrize("moe", [False, True])
def test_a_run_folder_and_its_weights_file_write_the_text_of_the_model_that_was_saved(
    moe, tokenizer, tokenizer_folder, tmp_path, capsys
):
    model = build(tokenizer, use_moe=moe, rope_theta=1e4)
    path = save_card_weights(tmp_path / "run_32", model.half().float(), tokenizer, tokenizer_folder)
    expected = "Once" + sample_text(model, tokenizer, "Once", max_new_tokens=10, temperature=2.0, seed=3)
    for load in (path.parent, path):
        words = ["--load", str(load), "--prompt", "Once", "--seed", "3", "--temperature", "2"]
        assert main([*words, "--max_new_tokens", "10", "--device", "cpu"]) == 0
        assert capsys.readouterr().out == expected + "\n"


def test_the_prompt_is_read_from_a_pipe(tokenizer, tokenizer_folder, tmp_path, capsys, monkeypatch):
    path = save_card_weights(tmp_path / "run_32", build(tokenizer), tokenizer, tokenizer_folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("从前有\n"))
    assert main(["--load", str(path), "--max_new_tokens", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("从前有")


def test_weights_with_another_tokenizer_are_refused(tokenizer, tokenizer_folder, tmp_path, capsys):
    path = save_card_weights(
        tmp_path / "run_32", build(tokenizer), tokenizer, tokenizer_folder, tokenizer_digest="0" * 64
    )
    assert main(["--load", str(path), "--prompt", "a"]) == 2
    assert "trained with tokenizer 000000000000" in capsys.readouterr().err


def test_weights_without_a_card_need_their_tokenizer_said_out_loud(tokenizer, tokenizer_folder, tmp_path, capsys):
    model = build(tokenizer)
    path = tmp_path / "pretrain_32.pth"
    torch.save({name: tensor.half() for name, tensor in model.state_dict().items()}, path)  # as MiniMind does
    assert main(["--load", str(path), "--prompt", "a"]) == 2
    assert "give that tokenizer with --tokenizer_path" in capsys.readouterr().err
    loaded, _ = load_model(str(path), str(tokenizer_folder))
    assert "rope_theta 1e+06 assumed" in capsys.readouterr().err
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.half().float()(ids).logits)


def test_hugging_face_folders_of_either_make_are_read(tokenizer, tokenizer_folder, tmp_path):
    model = build(tokenizer)
    ids = torch.tensor([[5, 6, 7]])
    ours, theirs = make_folder(tmp_path / "minimind"), make_folder(tmp_path / "qwen3")
    model.save_pretrained(ours)
    names = ("vocab_size", "intermediate_size", "head_dim", "rope_theta", "tie_word_embeddings")
    Qwen3Config(**SHAPE, **{name: getattr(model.config, name) for name in names}).save_pretrained(theirs)
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, theirs / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        for folder in (ours, theirs):
            loaded, _ = load_model(str(folder))
            torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_what_cannot_work_ends_with_one_line_and_status_2(tokenizer, tokenizer_folder, tmp_path, capsys):
    path = save_card_weights(tmp_path / "run_32", build(tokenizer), tokenizer, tokenizer_folder)
    strange = tmp_path / "strange.pth"
    torch.save({"a.weight": torch.ones(2)}, strange)
    small = MiniMindForCausalLM(MiniMindConfig(**SHAPE, vocab_size=50))
    small_path = save_card_weights(tmp_path / "small", small, tokenizer, tokenizer_folder)
    cases = [
        (["--load", str(tmp_path / "nothing")], "does not exist"),
        (["--load", str(tmp_path)], "holds neither"),
        (["--load", str(strange), "--tokenizer_path", str(tokenizer_folder)], "hold no model.embed_tokens.weight"),
        (["--load", str(path), "--tokenizer_path", str(tmp_path / "gone")], "no such folder"),
        (["--load", str(path), "--device", "cuda:77"], "--device cuda:77"),
        (["--load", str(path), "--device", "gpu"], "--device gpu"),
        (["--load", str(small_path)], f"the model knows 50 ids, its tokenizer {tokenizer.vocab_size}"),
    ]
    for words, message in cases:
        assert main([*words, "--prompt", "a"]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


@pytest.mark.parametrize(
    "words", [["--top_p", "0"], ["--temperature", "-1"], ["--max_new_tokens", "0"], ["--top_k", "-1"]]
)
def test_options_out_of_range_are_named(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--load", "x", *words])
    assert stop.value.code == 2
    assert (
        f"{words[0]} {float(words[1]) if words[0][2:] in ('top_p', 'temperature') else words[1]}"
        in capsys.readouterr().err
    )
