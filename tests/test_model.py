"""The decoder: parity with Hugging Face's Qwen3, documents kept apart, gradients everywhere, configuration errors."""

import contextlib
import math

import pytest
import torch
from torch.nn.attention import varlen

import model.moe as experts
from model.attention import (
    AttentionPattern,
    additive,
    attend,
    cached_mask,
    choose_backend,
    segment_boundaries,
    segment_mask,
)
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.moe import balance_loss_sum, route
from model.rotary import rotary_frequencies

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}
KINDS = pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])


def build(moe=False, seed=0, **fields):
    torch.manual_seed(seed)
    return MiniMindForCausalLM(MiniMindConfig(use_moe=moe, **{**SMALL, **fields}))


def tokens(batch=2, seq=24, seed=3, vocab=SMALL["vocab_size"]):
    return torch.randint(3, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def pack(documents, length):
    """Training inputs of one row holding `documents` (lists of tokens), padded to `length`."""
    row = {
        "input_ids": torch.zeros(1, length, dtype=torch.long),
        "targets": torch.full((1, length), -100),
        "position_ids": torch.zeros(1, length, dtype=torch.long),
        "segment_ids": torch.full((1, length), -1),
    }
    start = 0
    for number, document in enumerate(documents):
        size = len(document) - 1
        span = slice(start, start + size)
        row["input_ids"][0, span] = torch.tensor(document[:-1])
        row["targets"][0, span] = torch.tensor(document[1:])
        row["position_ids"][0, span] = torch.arange(size)
        row["segment_ids"][0, span] = number
        start += size
    return row


def some_documents(lengths, seed=5):
    return [tokens(1, length, seed + i)[0].tolist() for i, length in enumerate(lengths)]


def qwen3_twin(model):
    """Hugging Face's model of the same shape holding the same weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = model.config
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size rms_norm_eps"
    shape = {name: getattr(config, name) for name in names.split()}
    shape |= {
        "tie_word_embeddings": True,
        "intermediate_size": config.intermediate_size,
        "rope_theta": config.rope_theta,
    }
    state = model.state_dict()
    if not config.use_moe:
        twin = Qwen3ForCausalLM(Qwen3Config(**shape))
    else:
        routing = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        twin = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **{name: getattr(config, name) for name in routing}))
        for layer in range(config.num_hidden_layers):  # Hugging Face stacks the experts in memory (not in files)
            prefix = f"model.layers.{layer}.mlp.experts."
            each = [
                {name: state.pop(f"{prefix}{expert}.{name}_proj.weight") for name in ("gate", "up", "down")}
                for expert in range(config.num_experts)
            ]
            state[prefix + "gate_up_proj"] = torch.stack([torch.cat((e["gate"], e["up"])) for e in each])
            state[prefix + "down_proj"] = torch.stack([e["down"] for e in each])
    twin.load_state_dict(state)
    return twin.eval()


@pytest.mark.parametrize("fields", [{}, {"moe": True}, {"moe": True, "num_experts_per_tok": 2}, {"head_dim": 12}])
def test_logits_equal_hugging_face_qwen3_with_the_same_weights(fields):
    model = build(**fields).eval()
    ids = tokens()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, qwen3_twin(model)(ids).logits, rtol=1e-5, atol=1e-5)


def test_parameter_names_are_qwen3s():
    layer = (
        "input_layernorm post_attention_layernorm self_attn.q_norm self_attn.k_norm self_attn.q_proj self_attn.k_proj"
    )
    layer += " self_attn.v_proj self_attn.o_proj"
    dense = " mlp.gate_proj mlp.up_proj mlp.down_proj"
    experts = " mlp.gate" + "".join(f" mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down"))
    for moe, mlp in ((False, dense), (True, experts)):
        expected = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in (layer + mlp).split()}
        expected |= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        assert set(build(moe).state_dict()) == expected
        assert all(parameter.ndim <= 2 for parameter in build(moe).parameters())


def test_the_default_model_has_64_million_parameters_and_starts_at_the_loss_of_a_uniform_guess():
    torch.manual_seed(0)
    model = MiniMindForCausalLM()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert 63e6 < count < 65e6
    ids = tokens(4, 513, vocab=6400)
    with torch.no_grad():
        loss = model(ids[:, :-1], targets=ids[:, 1:]).loss
    assert abs(loss.item() - (math.log(6400) + 768 * 0.02**2 / 2)) < 0.03


def test_output_projections_start_smaller_by_the_root_of_twice_the_layers():
    model = build(hidden_size=128, num_hidden_layers=8)
    stds = {name: p.std().item() for name, p in model.named_parameters() if p.ndim == 2}
    for name, std in stds.items():
        expected = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        assert abs(std / expected - 1) < 0.05, name


@KINDS
def test_a_document_in_a_packed_row_has_the_loss_it_has_alone(moe):
    model = build(moe)
    documents = some_documents([9, 14, 5])
    packed = model(**pack(documents, 32))
    alone = [model(**pack([document], len(document) - 1), target_count=torch.tensor(1.0)) for document in documents]
    count = sum(len(document) - 1 for document in documents)
    assert abs(packed.logits_loss.item() - sum(out.logits_loss.item() for out in alone) / count) < 1e-5


@pytest.mark.parametrize("flash_attn", [True, False])
def test_no_gradient_flows_from_one_document_into_another(flash_attn):
    model = build(flash_attn=flash_attn)
    row = pack(some_documents([9, 14]), 24)
    row["targets"][0, :8] = -100  # only the second document is scored
    embeddings = []
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, out: embeddings.append(out))
    loss = model(**row).loss
    (gradient,) = torch.autograd.grad(loss, embeddings)
    assert not gradient[0, :8].any()
    assert gradient[0, 8:21].any(dim=1).all()


def test_the_document_mask_allows_the_past_of_the_same_document_only():
    mask = segment_mask(torch.tensor([[0, 0, 1, 1, -1]]))[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_added_mask_has_the_bits_of_the_bool_one(dtype):
    generator, mask = torch.Generator().manual_seed(2), segment_mask(torch.tensor([[0] * 9 + [1] * 6 + [-1]]))
    inputs = [torch.randn(1, 16, heads, 8, generator=generator).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    results = []
    for given in (mask, additive(mask, dtype)):
        out = attend(*inputs, AttentionPattern(mask=given))
        results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_layers_keep_the_same_mask_for_backward(dtype):
    model, row, kept = build(num_hidden_layers=4), pack(some_documents([9, 14]), 24), set()
    model.attention_backend = "sdpa"

    def note(x):
        if x.shape[-2:] == (24, 24):
            kept.add((x.untyped_storage().data_ptr(), x.dtype))
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, dtype != torch.float32),
    ):
        loss = model(**row).loss
    assert loss.requires_grad
    assert [found for _, found in kept] == [dtype]


@pytest.mark.parametrize("lengths", [[7, 1, 30], [600], [300, 200, 90]])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("keep", [0, 1024])
def test_attention_by_document_equals_the_mask_in_value_and_gradient(lengths, kv_heads, keep, monkeypatch):
    monkeypatch.setattr("model.segment_attention.KEEP", keep)
    generator = torch.Generator().manual_seed(2)
    ids = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)] + [torch.full((6,), -1)])
    ids = ids.expand(2, -1).contiguous()
    inputs = [
        torch.randn(2, ids.shape[1], heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]
    by_document = attend(*inputs, AttentionPattern(segment_ids=ids))
    by_mask = attend(*inputs, AttentionPattern(mask=segment_mask(ids))) * (ids >= 0)[:, :, None, None]
    torch.testing.assert_close(by_document, by_mask)
    weight = torch.randn(by_mask.shape, generator=generator, dtype=torch.float64)
    expected = torch.autograd.grad((by_mask * weight).sum(), inputs)
    for got, gradient in zip(torch.autograd.grad((by_document * weight).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(got, gradient)


def test_attention_by_document_keeps_float32_scores_for_bfloat16_inputs_under_autocast():
    generator = torch.Generator().manual_seed(2)
    exact = [torch.randn(1, 64, 4, 16, generator=generator, dtype=torch.bfloat16) * 3 for _ in range(3)]
    pattern = AttentionPattern(segment_ids=torch.zeros(1, 64, dtype=torch.long))
    reference = attend(*[x.double() for x in exact], pattern)
    with torch.autocast("cpu", torch.bfloat16):
        error = (attend(*exact, pattern).double() - reference).norm() / reference.norm()
    assert error < 4e-3  # bfloat16 scores would give 1e-2


def test_document_boundaries_cut_at_rows_documents_and_padding():
    ids = torch.tensor([[0, 0, 1, -1], [0, 0, 0, 0]])
    assert segment_boundaries(ids).tolist() == [0, 2, 3, 4, 8]


def test_flash_kernels_are_chosen_only_where_they_run():
    cpu = torch.device("cpu")
    assert choose_backend("auto", cpu, torch.bfloat16, 0.0) == "segments"
    assert choose_backend("auto", cpu, torch.bfloat16, 0.1) == "sdpa"
    assert choose_backend("auto", torch.device("mps"), torch.float32, 0.0) == "sdpa"
    assert choose_backend("varlen", cpu, torch.bfloat16, 0.0) == "varlen"
    with pytest.raises(ValueError, match="attention_backend='fast' is unknown"):
        choose_backend("fast", cpu, torch.bfloat16, 0.0)


@KINDS
def test_a_batch_without_targets_has_loss_zero_and_zero_gradients_everywhere(moe):
    model = build(moe)
    ids = tokens()
    out = model(ids, targets=torch.full_like(ids, -100), segment_ids=torch.full_like(ids, -1))
    out.loss.backward()
    assert out.loss.item() == 0.0 == out.logits_loss.item() + out.aux_loss.item()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("grouped", [False, True])
def test_an_expert_without_tokens_gets_zero_gradients(grouped, monkeypatch):
    monkeypatch.setattr("model.moe.grouped_products_run_on", lambda *_: grouped)
    model = build(moe=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[1:] = layer.mlp.gate.weight[:1]  # equal probabilities: all tokens take one expert
    ids = tokens()
    model(ids, targets=ids).loss.backward()
    for layer in model.model.layers:
        used = [bool(expert.down_proj.weight.grad.any()) for expert in layer.mlp.experts]
        assert used.count(True) == 1
        assert all(p.grad is not None for p in layer.mlp.parameters())


@pytest.mark.parametrize("choices", [1, 2])
def test_grouped_products_equal_the_experts_one_by_one(choices, monkeypatch):
    model = build(moe=True, num_experts_per_tok=choices)
    ids = tokens()
    results = []
    for grouped in (False, True):
        monkeypatch.setattr("model.moe.grouped_products_run_on", lambda *_, grouped=grouped: grouped)
        model.zero_grad()
        model(ids, targets=ids).loss.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    for one_by_one, together in zip(*results, strict=True):
        torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-6)


@KINDS
def test_any_split_of_the_same_rows_gives_the_same_losses_and_gradients(moe):
    model = build(moe, num_experts_per_tok=2).double()
    rows = [pack(some_documents(lengths, seed), 24) for seed, lengths in enumerate([[9, 12], [20], [5, 5, 6], [2]])]
    rows.append({**pack([], 24)})  # a missing row
    batch = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    count = (batch["targets"] != -100).sum()
    whole = model(**batch, label_smoothing=0.1, z_loss=1e-3)
    whole.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    parts = [model(**row, target_count=count, label_smoothing=0.1, z_loss=1e-3) for row in rows]
    sum(part.loss for part in parts).backward()
    for name in ("loss", "logits_loss", "aux_loss"):
        assert getattr(whole, name).dtype == torch.float64
        assert abs(getattr(whole, name) - sum(getattr(part, name) for part in parts)) < 1e-9
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float64
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-9)


def test_balance_loss_is_one_times_the_tokens_when_even_and_experts_times_when_collapsed():
    counted = torch.tensor([[True] * 4, [True, True, False, False]])
    even = route(torch.tensor([[9.0, 0], [0, 9.0]] * 4), 1, True)
    assert balance_loss_sum(even, counted).item() == pytest.approx(6.0)
    collapsed = route(torch.tensor([[50.0, 0]] * 8), 1, True)
    assert balance_loss_sum(collapsed, counted).item() == pytest.approx(12.0)


def test_loss_is_the_sum_of_its_parts_and_targets_do_not_materialise_logits():
    model = build(moe=True)
    ids = tokens()
    out = model(ids, targets=ids)
    assert out.logits is None
    assert out.loss.item() == pytest.approx(out.logits_loss.item() + out.aux_loss.item())
    assert out.aux_loss.item() > 0
    smoothed = model(ids, targets=ids, label_smoothing=0.1)
    assert smoothed.logits_loss.item() == pytest.approx(out.logits_loss.item())
    assert smoothed.loss.item() != pytest.approx(out.loss.item(), abs=1e-4)


def test_labels_are_shifted_and_targets_are_not():
    model = build()
    ids = tokens()
    by_labels = model(ids, labels=ids)
    by_targets = model(ids[:, :-1], targets=ids[:, 1:])
    assert by_labels.loss.item() == pytest.approx(by_targets.loss.item(), abs=1e-6)
    assert by_labels.logits.shape == (*ids.shape, SMALL["vocab_size"])


@KINDS
def test_generation_with_cache_equals_generation_without(moe):
    model = build(moe).eval()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = tokens(2, 7)
    with_cache = model.generate(ids, use_cache=True, **options)
    assert with_cache.shape == (2, 19)
    assert torch.equal(with_cache, model.generate(ids, use_cache=False, **options))
    assert torch.equal(with_cache, qwen3_twin(model).generate(ids, **options))


def test_left_padding_does_not_change_what_is_generated():
    model = build().eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = tokens(1, 7)
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), ids), dim=1)
    mask = (torch.arange(10) >= 3).long().unsqueeze(0)
    alone = model.generate(ids, **options)
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 3:], alone)


def test_a_prompt_in_two_pieces_gives_the_logits_of_the_whole():
    model = build().eval()
    ids = tokens(2, 10)
    with torch.no_grad():
        first = model(ids[:, :6], use_cache=True)
        second = model(ids[:, 6:], cache=first.cache)
        torch.testing.assert_close(second.logits, model(ids).logits[:, 6:], rtol=1e-5, atol=1e-5)


def test_a_padded_position_sees_itself_so_no_row_of_the_mask_is_empty():
    mask = cached_mask(torch.tensor([[0, 1, 1]]), 3, 3, torch.device("cpu"))
    assert mask[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]


@KINDS
def test_save_and_load_round_trip_through_meta_device_keeps_logits(moe, tmp_path):
    model = build(moe, inference_rope_scaling=True, dropout=0.1).eval()
    model.save_pretrained(tmp_path)
    loaded = MiniMindForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.to_diff_dict() == {**model.config.to_diff_dict(), "architectures": ["MiniMindForCausalLM"]}
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert not dict(loaded.named_buffers())  # nothing that could come back uninitialised


@KINDS
def test_hugging_face_reads_a_folder_saved_with_its_own_configuration(moe, tmp_path):
    from safetensors.torch import save_file

    model = build(moe).eval()
    twin = qwen3_twin(model)
    twin.config.save_pretrained(tmp_path)
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = type(twin).from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens()).logits, model(tokens()).logits, rtol=1e-5, atol=1e-5)


def test_yarn_equals_hugging_faces_and_leaves_fast_pairs_alone():
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = MiniMindConfig(inference_rope_scaling=True)
    scaling = config.rope_scaling
    ours = rotary_frequencies(config.head_dim, config.rope_theta, scaling, torch.device("cpu"), torch.float32)
    parameters = {**scaling, "rope_type": scaling["type"], "rope_theta": config.rope_theta}
    twin = Qwen3Config(head_dim=config.head_dim, rope_parameters=parameters)
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](twin, torch.device("cpu"))
    torch.testing.assert_close(ours, expected)
    assert factor == scaling["attention_factor"]
    plain = rotary_frequencies(config.head_dim, config.rope_theta, None, torch.device("cpu"), torch.float32)
    assert torch.equal(ours[:5], plain[:5])
    torch.testing.assert_close(ours[-5:], plain[-5:] / 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hiden_size": 64}, "no field 'hiden_size': did you mean 'hidden_size'"),
        ({"num_expert": 8}, "did you mean 'num_experts'"),
        ({"hidden_size": 100}, "hidden_size=100 is no multiple of num_attention_heads=8"),
        ({"num_key_value_heads": 3}, "num_attention_heads=8 is no multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"hidden_act": "sillu"}, "hidden_act='sillu' is unknown"),
        ({"use_moe": True, "num_experts_per_tok": 5}, "num_experts_per_tok=5 must lie between 1 and num_experts=4"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name_and_value(fields, message):
    with pytest.raises(ValueError, match=message):
        MiniMindConfig(**fields)


def test_defaults_are_minimind_s():
    config = MiniMindConfig()
    assert (config.head_dim, config.intermediate_size, config.moe_intermediate_size) == (96, 2432, 2432)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert MiniMindConfig(**config.to_dict()).to_dict() == config.to_dict()


@KINDS
def test_activation_checkpointing_changes_no_loss_and_no_gradient(moe):
    model = build(moe, dropout=0.2)
    ids = tokens()
    gradients = []
    for switch in (False, True):
        model.activation_checkpointing = switch
        model.zero_grad()
        torch.manual_seed(11)
        model(ids, targets=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_dropout_acts_in_training_and_not_in_evaluation():
    model = build(dropout=0.3)
    ids = tokens()
    assert model.train()(ids, targets=ids).loss.item() != model(ids, targets=ids).loss.item()
    assert model.eval()(ids, targets=ids).loss.item() == model(ids, targets=ids).loss.item()


@KINDS
def test_bfloat16_autocast_stays_close_and_keeps_losses_and_gradients_in_float32(moe):
    model = build(moe)
    row = pack(some_documents([9, 14]), 24)
    exact = model(**row).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**row)
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert abs(out.loss.item() - exact) < 0.01
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_norms_are_computed_in_float32_under_autocast_and_in_half_precision_models():
    norm = build().model.norm
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)) * 300  # squares overflow float16
    expected = norm(x)
    with torch.autocast("cpu", torch.float16):
        torch.testing.assert_close(norm(x.half()).float(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(norm.half()(x.half()).float(), expected, rtol=2e-3, atol=2e-3)


def test_documents_do_not_go_with_a_cache():
    model = build()
    ids = tokens()
    with pytest.raises(ValueError, match="segment_ids are for training"):
        model(ids, segment_ids=torch.zeros_like(ids), use_cache=True)


@pytest.mark.slow
@KINDS
def test_the_compiled_model_has_the_same_loss_and_gradients(moe):
    model = build(moe)
    row = pack(some_documents([9, 14]), 24)
    model(**row).loss.backward()
    eager = [p.grad.clone() for p in model.parameters()]
    expected = model(**row).loss.item()
    model.zero_grad()
    loss = torch.compile(model)(**row).loss
    loss.backward()
    assert abs(loss.item() - expected) < 1e-5
    for parameter, gradient in zip(model.parameters(), eager, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


@KINDS
def test_the_kernels_for_cuda_are_called_with_shapes_and_types_they_take_forward_and_backward(moe, monkeypatch):
    """On the meta device, where operators check their inputs and compute nothing: flash attention over documents, and
    grouped products for the experts."""
    called = []
    for module, name in ((varlen, "varlen_attn"), (torch.nn.functional, "grouped_mm")):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _k=kernel, _n=name, **o: called.append(_n) or _k(*a, **o))
    monkeypatch.setattr(experts, "grouped_products_run_on", lambda *_: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which the meta device does not know
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    with torch.device("meta"):
        model = build(moe, hidden_size=64).bfloat16()
        model.attention_backend = "varlen"
        row = torch.zeros(2, 24, dtype=torch.int64)
        boundaries = torch.zeros(9, dtype=torch.int32)
        loss = model(row, position_ids=row, segment_ids=row, boundaries=boundaries, targets=row).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    assert called == (["varlen_attn", "grouped_mm", "grouped_mm"] if moe else ["varlen_attn"]) * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_varlen_kernels_equal_the_document_mask_on_cuda(kv_heads):
    model = build(hidden_size=128, num_key_value_heads=kv_heads).cuda()
    rows = [pack(some_documents(lengths, seed), 64) for seed, lengths in enumerate([[9, 40], [65], [2, 5, 30]])]
    batch = {key: torch.cat([row[key] for row in rows]).cuda() for key in rows[0]}
    results = []
    for backend in ("sdpa", "varlen"):
        model.attention_backend = backend
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        results.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    assert abs(results[0][0] - results[1][0]) < 1e-3
    assert (results[0][1] - results[1][1]).norm() / results[0][1].norm() < 2e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@KINDS
def test_cuda_equals_cpu_in_float32(moe):
    model = build(moe, hidden_size=64, num_experts_per_tok=2)
    row = pack(some_documents([9, 14]), 24)
    model(**row).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.cuda()(**{key: value.cuda() for key, value in row.items()}).loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), gradient, rtol=1e-3, atol=1e-5)
