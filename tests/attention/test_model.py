"""A GPT-OSS on `sink_fa3` against eager attention, one sequence at a time: logits and every parameter's gradient.

On the CPU in float64. RMSNorm computes in float32 whatever the model's dtype, so equal means equal to float32's rounding. On a
GPU in bfloat16, where the yardstick is the same distance for eager in bfloat16; there every expert is used, because a
router that flips between near-equal experts would drown everything else.
"""

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig, Qwen2Config, Qwen2ForCausalLM

EXACT = 1e-5
LENGTHS = (1, 2, 45, 70, 33)


def prepare(place, models, compare, seqs, **kwargs):
    """Model on sink_fa3, oracle and tolerance."""
    device, dtypes = place
    if dtypes[0] == torch.float64:
        eager, ours = models(**kwargs)
        # on the same device: its float32 norms round otherwise than the CPU's
        return ours.to(device), compare.alone(eager.to(device), [x.to(device) for x in seqs]), EXACT
    kwargs = dict(heads=8, kv_heads=1, head_dim=64, window=128, experts_used=4) | kwargs
    eager, _ = models(**kwargs)
    oracle = compare.alone(eager, seqs)
    eager_half, ours = (model.to(device, dtypes[-1]) for model in models(**kwargs))
    half, name = compare.furthest(compare.alone(eager_half, [x.to(device) for x in seqs]), oracle)
    return ours, oracle, max(2 * half, 2e-2)


def check(compare, model, logits, oracle, tolerance):
    model.zero_grad()
    compare.loss(logits).backward()
    distance, name = compare.furthest(([x.detach() for x in logits], compare.gradients(model)), oracle)
    assert distance <= tolerance, f"{name}: {distance:.2e} > {tolerance:.1e}"
    assert any("sinks" in n and g.abs().max() > 0 for n, g in compare.gradients(model).items())


def lengths_of(place, default=LENGTHS):
    return default if place[0] == "cpu" else (1, 2, 127, 128, 129, 300)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(place, side, models, compare, sequences, padded):
    seqs = sequences(*lengths_of(place))
    model, oracle, tolerance = prepare(place, models, compare, seqs)
    ids, mask = (x.to(place[0]) for x in padded(seqs, side))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    check(compare, model, [row[keep.bool()] for row, keep in zip(logits, mask)], oracle, tolerance)


def packed_inputs(seqs, how, device):
    ids = torch.cat(seqs)[None].to(device)
    positions = torch.cat([torch.arange(len(x)) for x in seqs])[None].to(device)
    if how == "position_ids":
        return dict(input_ids=ids, position_ids=positions)
    cu = torch.tensor([0, *map(len, seqs)]).cumsum(0).to(device, torch.int32)
    longest = max(map(len, seqs))
    lengths = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu.clone())
    if how == "lengths":
        lengths |= dict(max_length_q=longest, max_length_k=longest)
    elif how == "tensors":
        lengths |= dict(max_length_q=torch.tensor(longest), max_length_k=torch.tensor(longest))
    return dict(input_ids=ids, position_ids=positions, **lengths)


@pytest.mark.parametrize("how", ["position_ids", "lengths", "tensors", "no_maxima"])
def test_packed(place, how, models, compare, sequences):
    seqs = sequences(*lengths_of(place))
    model, oracle, tolerance = prepare(place, models, compare, seqs)
    logits = model(**packed_inputs(seqs, how, place[0]), use_cache=False).logits[0]
    check(compare, model, logits.split([len(x) for x in seqs]), oracle, tolerance)


def test_packed_rows_of_a_batch(place, models, compare, sequences):
    """Two rows of 40 tokens, packed differently, told by position_ids (2, 40)."""
    seqs = sequences(15, 25, 39, 1)
    model, oracle, tolerance = prepare(place, models, compare, seqs)
    ids = torch.cat(seqs).view(2, 40).to(place[0])
    positions = torch.cat([torch.arange(len(x)) for x in seqs]).view(2, 40).to(place[0])
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits.flatten(0, 1)
    check(compare, model, logits.split([len(x) for x in seqs]), oracle, tolerance)


@pytest.mark.parametrize("lengths", [(1,), (2,), (127, 128, 129), (1000,)], ids=str)
def test_lengths(place, lengths, models, compare, sequences):
    seqs = sequences(*lengths)
    model, oracle, tolerance = prepare(place, models, compare, seqs, window=128, layers=2)
    logits = model(**packed_inputs(seqs, "lengths", place[0]), use_cache=False).logits[0]
    check(compare, model, logits.split(lengths), oracle, tolerance)


@pytest.mark.parametrize("control", ["sinks", "window", "packing", "padding"])
def test_the_comparison_notices(control, models, compare, sequences, padded, monkeypatch):
    """Sinks off, window off by one, packing or padding ignored: each must fail the comparison by far."""
    seqs = sequences(*LENGTHS)
    eager, model = models()
    oracle = compare.alone(eager, seqs)
    inputs = packed_inputs(seqs, "position_ids", "cpu")
    if control == "sinks":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(-torch.inf)
    elif control == "window":
        for layer in model.model.layers:
            layer.self_attn.sliding_window = layer.self_attn.sliding_window and layer.self_attn.sliding_window + 1
    elif control == "packing":
        inputs["position_ids"] = torch.arange(sum(LENGTHS))[None]
    if control == "padding":
        ids, mask = padded(seqs, "left")
        rows = model(input_ids=ids, use_cache=False).logits
        logits = [row[keep.bool()] for row, keep in zip(rows, mask)]
    else:
        logits = model(**inputs, use_cache=False).logits[0].split(LENGTHS)
    compare.loss(logits).backward()
    distance, _ = compare.furthest(([x.detach() for x in logits], compare.gradients(model)), oracle)
    assert distance > 1e-2


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(place, reentrant, models, compare, sequences):
    seqs = sequences(*lengths_of(place))
    model, oracle, tolerance = prepare(place, models, compare, seqs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    logits = model(**packed_inputs(seqs, "position_ids", place[0]), use_cache=False).logits[0]
    check(compare, model, logits.split([len(x) for x in seqs]), oracle, tolerance)


@pytest.mark.parametrize(
    "how",
    [
        "position_ids",
        "padded",
        pytest.param("lengths", marks=pytest.mark.slow),
        pytest.param("plain", marks=pytest.mark.slow),
    ],
)
def test_compile(place, how, models, compare, sequences, padded):
    """fullgraph, forward and backward. grouped_mm experts, since the eager loop cannot be captured whole."""
    torch._dynamo.reset()
    seqs = sequences(*([20, 20] if how == "plain" else LENGTHS))
    device = place[0]
    eager, ours = models(
        dtype=torch.float32, layers=2, **({} if device == "cpu" else dict(head_dim=64, experts_used=4))
    )
    oracle = compare.alone(eager, seqs)
    ours.to(device).set_experts_implementation("grouped_mm")
    model = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        if how == "padded":
            ids, mask = (x.to(device) for x in padded(seqs, "left"))
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            rows = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            logits = [row[keep.bool()] for row, keep in zip(rows, mask)]
        elif how == "plain":
            logits = list(model(input_ids=torch.stack(seqs).to(device), use_cache=False).logits)
        else:
            logits = model(**packed_inputs(seqs, how, device), use_cache=False).logits[0].split([len(x) for x in seqs])
    check(compare, ours, logits, oracle, 2e-5 if device == "cpu" else 8e-2)


@pytest.mark.slow
def test_compile_with_inductor(models, compare, sequences):
    torch._dynamo.reset()
    seqs = sequences(*LENGTHS)
    eager, ours = models(dtype=torch.float32, layers=2)
    oracle = compare.alone(eager, seqs)
    ours.set_experts_implementation("grouped_mm")
    model = torch.compile(ours, fullgraph=True)
    logits = model(**packed_inputs(seqs, "position_ids", "cpu"), use_cache=False).logits[0].split(LENGTHS)
    check(compare, ours, logits, oracle, 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["autocast", "weights"])
def test_half_precision(mode, dtype, models, compare, sequences):
    """No further from float64 than twice eager attention in the same precision is."""
    seqs = sequences(20, 40)
    settings = dict(experts_used=4, layers=2)
    oracle = compare.alone(models(**settings)[0], seqs)
    distances = []
    for model in models(dtype=torch.float32 if mode == "autocast" else dtype, **settings):
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=mode == "autocast"):
            logits = [model(input_ids=x[None], use_cache=False).logits[0] for x in seqs]
        compare.loss(logits).backward()
        distances.append(compare.furthest(([x.detach() for x in logits], compare.gradients(model)), oracle)[0])
    assert distances[1] <= 2 * distances[0] and distances[1] < 0.2


def test_autocast_gives_the_kernels_the_autocast_dtype(models, sequences, monkeypatch):
    """Queries and keys arrive in float32 (rotary embedding), values in bfloat16."""
    from trl_gptoss.attention import interface

    seen = []
    attend = interface.attend
    monkeypatch.setattr(
        interface,
        "attend",
        lambda q, k, v, *a, **kw: seen.append((q.dtype, k.dtype, v.dtype)) or attend(q, k, v, *a, **kw),
    )
    _, ours = models(dtype=torch.float32, layers=2)
    with torch.autocast("cpu", torch.bfloat16):
        ours(input_ids=sequences(9)[0][None])
    assert seen == [(torch.bfloat16,) * 3] * 2


def test_a_model_without_sinks(place, compare, sequences, padded):
    """Qwen2: no s_aux, rotary embedding of its own, a mask that is not a dictionary."""
    device, dtypes = place
    settings = Qwen2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=97, pad_token_id=0, eos_token_id=None, bos_token_id=None, head_dim=64, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    eager = Qwen2ForCausalLM(settings).double().eval()
    seqs = sequences(*LENGTHS)
    oracle = compare.alone(eager, seqs)
    model = Qwen2ForCausalLM(settings).to(device, dtypes[0]).eval()
    model.load_state_dict(eager.state_dict())
    tolerance = EXACT
    if dtypes[0] != torch.float64:
        half = compare.furthest(compare.alone(model, [x.to(device) for x in seqs]), oracle)[0]
        tolerance = max(2 * half, 2e-2)
    model.set_attn_implementation("sink_fa3")
    ids, mask = (x.to(device) for x in padded(seqs, "left"))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    rows = [row[keep.bool()] for row, keep in zip(logits, mask)]
    packed = model(**packed_inputs(seqs, "position_ids", device), use_cache=False).logits[0].split(LENGTHS)
    for some in (rows, packed):
        model.zero_grad()
        compare.loss(some).backward()
        distance, name = compare.furthest(([x.detach() for x in some], compare.gradients(model)), oracle)
        assert distance <= tolerance, name


@pytest.mark.slow
def test_real_width(place, models, compare, sequences):
    """Two layers of GPT-OSS's width: hidden 2880, 64 query and 8 key/value heads of 64, window 128."""
    seqs = sequences(200, 131)
    settings = dict(heads=64, kv_heads=8, head_dim=64, hidden=2880, window=128, layers=2)
    model, oracle, tolerance = prepare(place, models, compare, seqs, **settings)
    logits = model(**packed_inputs(seqs, "lengths", place[0]), use_cache=False).logits[0]
    check(compare, model, logits.split([200, 131]), oracle, tolerance)


def test_metadata_is_read_once_per_forward(models, sequences, monkeypatch):
    """position_ids are looked at once, not per layer, and not again in backward or when checkpoints are recomputed."""
    from trl_gptoss.attention import varlen

    reads = []
    read = varlen._read_positions
    monkeypatch.setattr(varlen, "_read_positions", lambda p: reads.append(1) or read(p))
    _, model = models()
    model.gradient_checkpointing_enable()
    model.train()
    for count in (1, 2):
        batch = packed_inputs(sequences(9, 12, seed=count), "position_ids", "cpu")
        model(**batch, use_cache=False).logits.sum().backward()
        assert len(reads) == count


def test_lengths_given_by_the_caller_are_never_read(models, sequences, monkeypatch):
    """With ints for the maxima nothing asks a tensor for its value before the kernel."""
    from trl_gptoss.attention import interface

    class Called(Exception):
        pass

    def attend(*args, **kwargs):
        raise Called

    def forbidden(*args, **kwargs):
        raise AssertionError("a tensor was read")

    _, model = models()
    batch = packed_inputs(sequences(9, 12), "lengths", "cpu")
    monkeypatch.setattr(interface, "attend", attend)
    for name in ("item", "tolist", "__int__", "__bool__", "nonzero", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    layer = model.model.layers[0].self_attn
    q, k, v = torch.zeros(1, 4, 21, 32), torch.zeros(1, 2, 21, 32), torch.zeros(1, 2, 21, 32)
    batch.pop("input_ids")
    with pytest.raises(Called):
        interface.sink_attention_forward(layer, q, k, v, None, **batch)


REFUSED = {
    "dropout": (dict(dropout=0.1), "attention dropout 0.1"),
    "softcap": (dict(softcap=30.0), "softcap"),
    "weights": (dict(output_attentions=True), "eager"),
    "own mask": (dict(attention_mask=torch.zeros(2, 1, 6, 6)), "4-D mask"),
    "integer mask": (dict(attention_mask=torch.ones(2, 6, dtype=torch.long)), "bool mask"),
    "half of the lengths": (dict(cu_seq_lens_q=torch.tensor([0, 6, 12])), "only one"),
    "lengths and mask": (
        dict(
            cu_seq_lens_q=torch.tensor([0, 6, 12]),
            cu_seq_lens_k=torch.tensor([0, 6, 12]),
            attention_mask=torch.ones(2, 6, dtype=torch.bool),
        ),
        "already say",
    ),
    "positions": (dict(position_ids=torch.zeros(3, 2, 6)), "position_ids of shape"),
    "window without causal": (dict(is_causal=False, sliding_window=4), "causal"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what, models):
    from trl_gptoss.attention.interface import sink_attention_forward

    kwargs, message = REFUSED[what]
    q, k = torch.zeros(2, 4, 6, 32), torch.zeros(2, 2, 6, 32)
    layer = models()[1].model.layers[0].self_attn
    with pytest.raises(ValueError, match=message):
        sink_attention_forward(layer, q, k, k, **({"attention_mask": None} | kwargs))


def test_values_of_another_width_are_refused(models):
    from trl_gptoss.attention.interface import sink_attention_forward

    layer = models()[1].model.layers[0].self_attn
    with pytest.raises(ValueError, match="must be equal"):
        sink_attention_forward(
            layer, torch.zeros(1, 4, 6, 32), torch.zeros(1, 2, 6, 32), torch.zeros(1, 2, 6, 16), None
        )


def test_dropout_in_the_config_is_refused_in_training(models, sequences):
    _, model = models()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    ids = sequences(5)[0][None]
    model.eval()(input_ids=ids)
    with pytest.raises(ValueError, match="dropout"):
        model.train()(input_ids=ids)


def test_attention_in_chunks_is_refused():
    """Llama 4's masks are those of a window to `sink_fa3`, which would see other tokens."""
    config = Llama4TextConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, intermediate_size_mlp=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=2, attention_chunk_size=8, pad_token_id=0,
    )  # fmt: skip
    model = Llama4ForCausalLM._from_config(config, attn_implementation="sink_fa3")
    with pytest.raises(ValueError, match="'llama4_text' model attend in chunks of 8 tokens. Use 'eager'"):
        model(input_ids=torch.ones(1, 12, dtype=torch.long))


def test_a_mask_with_holes_is_refused(models, sequences):
    _, model = models()
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 3] = 0
    with pytest.raises(ValueError, match="row 1 masks tokens between"):
        model(input_ids=torch.stack(sequences(8, 8)), attention_mask=mask)
