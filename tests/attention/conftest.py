"""What the attention tests share: the formula as an oracle, tiny models, and the backends to run on."""

import copy
import math

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, set_seed

import trl_gptoss  # noqa: F401  registers sink_fa3
from trl_gptoss.attention import backends

BACKENDS = [
    pytest.param(("cpu", "reference"), id="cpu-reference"),
    pytest.param(("cuda", "reference"), id="cuda-reference", marks=pytest.mark.gpu),
    pytest.param(("cuda", "fa2"), id="fa2", marks=pytest.mark.gpu),
    pytest.param(("cuda", "fa4"), id="fa4", marks=pytest.mark.hopper),
    pytest.param(("cuda", "hopper"), id="hopper", marks=pytest.mark.hopper),
]


@pytest.fixture(params=BACKENDS)
def place(request, monkeypatch):
    """Device and the dtypes that the forced backend computes in there."""
    device, name = request.param
    if device == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")
        why = backends.reasons(torch.device("cuda", 0))[name]
        if why:
            pytest.skip(why)
    monkeypatch.setenv(backends.ENV, name)
    return device, [torch.float64, torch.float32, torch.bfloat16] if name == "reference" else [
        torch.bfloat16,
        torch.float16,
    ]


def formula(q, k, v, sinks, cu_q, cu_k, *, causal=True, window=None, scale=None):
    """Attention with sinks, sequence by sequence and head by head, straight from the definition. Differentiable.

    Returns out (total_q, H, D) and lse (H, total_q).
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    outs, lses = [], []
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        out_heads, lse_heads = [], []
        for h in range(heads):
            scores = q[q0:q1, h] @ k[k0:k1, h // group].T * scale
            hidden = torch.zeros(scores.shape, dtype=torch.bool, device=q.device)
            for i in range(q1 - q0):
                own = i + (k1 - k0) - (q1 - q0)
                if causal:
                    hidden[i, max(own + 1, 0) :] = True
                if window:
                    hidden[i, : max(own - window + 1, 0)] = True
            scores = scores.masked_fill(hidden, -math.inf)
            column = q.new_full((q1 - q0, 1), -math.inf) if sinks is None else sinks[h].expand(q1 - q0, 1)
            scores = torch.cat((scores, column), 1)
            empty = (scores == -math.inf).all(1, keepdim=True)
            full = scores[:, -1:] == math.inf
            lse_heads.append(scores.logsumexp(1))
            probs = scores.masked_fill(empty | full, 0).softmax(1).masked_fill(empty | full, 0)[:, :-1]
            out_heads.append(probs @ v[k0:k1, h // group])
        outs.append(torch.stack(out_heads, 1))
        lses.append(torch.stack(lse_heads))
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.fixture(name="formula")
def formula_fixture():
    return formula


def config(heads=4, kv_heads=2, head_dim=32, hidden=64, window=32, layers=4, experts_used=2, **kwargs):
    return GptOssConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=experts_used,
        vocab_size=97,
        sliding_window=window,
        initializer_range=0.15,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
        **kwargs,
    )


def build(seed=0, dtype=torch.float64, **kwargs):
    """A GPT-OSS on eager attention and experts, and the same model on sink_fa3. Sinks of visible size."""
    set_seed(seed)
    settings = config(**kwargs)
    settings._attn_implementation, settings._experts_implementation = "eager", "eager"
    eager = GptOssForCausalLM(settings)
    with torch.no_grad():
        for layer in eager.model.layers:
            layer.self_attn.sinks.normal_(0.5, 1.5)
            for bias in (layer.self_attn.q_proj.bias, layer.self_attn.k_proj.bias, layer.self_attn.v_proj.bias):
                bias.normal_(0, 0.3)
    eager = eager.to(dtype).eval()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("sink_fa3")
    return eager, ours


@pytest.fixture
def models():
    return build


def alone(model, sequences, weights=None):
    """The oracle: every sequence by itself. Returns logits per sequence and the parameters' gradients of a weighted sum."""
    model.zero_grad()
    logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]
    loss(logits).backward()
    return [x.detach() for x in logits], gradients(model)


def loss(logits):
    """A loss whose gradient differs from token to token."""
    total = 0
    for x in logits:
        weight = torch.linspace(0.5, 1.5, x.shape[0] * x.shape[1], device=x.device, dtype=torch.float64)
        total = total + (x.double().square() * weight.view_as(x)).sum()
    return total / sum(len(x) for x in logits)


def gradients(model):
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(a, b):
    """Relative distance in the Euclidean norm."""
    return float((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm().clamp_min(1e-300))


def furthest(ours, oracle):
    """The largest relative distance of logits and of gradients, and the parameter it belongs to."""
    (logits, grads), (logits_0, grads_0) = ours, oracle
    assert grads.keys() == grads_0.keys()
    by_name = {name: distance(grads[name], grads_0[name]) for name in grads}
    name = max(by_name, key=by_name.get)
    return max(distance(torch.cat(logits), torch.cat(logits_0)), by_name[name]), name


@pytest.fixture
def compare():
    """`alone`, `loss`, `gradients`, `distance` and `furthest` in one namespace."""

    class Compare:
        pass

    for function in (alone, loss, gradients, distance, furthest):
        setattr(Compare, function.__name__, staticmethod(function))
    return Compare


@pytest.fixture
def sequences():
    """Token sequences of the given lengths; id 0 is padding."""

    def make(*lengths, seed=1):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(1, 97, (length,), generator=generator) for length in lengths]

    return make


@pytest.fixture
def padded():
    """input_ids and attention_mask (rows, longest)."""

    def make(sequences, side):
        longest = max(map(len, sequences))
        ids = torch.zeros(len(sequences), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, seq in enumerate(sequences):
            place = slice(longest - len(seq), longest) if side == "left" else slice(0, len(seq))
            ids[row, place], mask[row, place] = seq, 1
        return ids, mask

    return make
