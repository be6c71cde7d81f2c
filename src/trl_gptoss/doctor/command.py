"""`trl-gptoss doctor MODEL`."""

import argparse
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..harmony import is_harmony, render_prompt
from ..hub.export_command import device
from ..trainers.guards import check_model
from .diagnose import Diagnosis, diagnose
from .scoring import Reading
from .sides import ModelEngine, RecordedEngine, VllmServer

_DTYPES = ("float32", "bfloat16", "float16")
# Prose and digits, as rollouts have them: ids that a model finds impossible would hide small differences.
_TEXT = (
    "We need the sum of the first hundred odd numbers. The n-th odd number is 2n - 1, so the sum is n squared: for 100 "
    "that is 10000. Let me check it with a smaller case. 1 + 3 + 5 = 9, which is 3 squared. Good. Now the second part: how "
    "many of them are divisible by three? Every third odd number is: 3, 9, 15, and so on up to 195, and 195 = 6 * 32 + 3, "
    "so there are 33 of them. The answer is 10000 and 33. "
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="checkpoint that both sides start from (folder or Hub id)")
    own = parser.add_argument_group("the trainer's side")
    own.add_argument("--adapter", help="PEFT adapter that is being trained")
    own.add_argument("--attention", default="sink_fa3", help="attn_implementation (default: sink_fa3)")
    own.add_argument("--experts", default="gptoss_fused", help="experts_implementation (default: gptoss_fused)")
    own.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the weights (default: bfloat16)")
    own.add_argument("--temperature", type=float, default=1.0, help="of the log-probs (default: 1.0)")
    own.add_argument("--top-p", type=float, default=1.0, help="of the log-probs (default: 1.0)")
    engine = parser.add_argument_group(
        "the engine's side: other settings of the trainer, a vLLM server, or recorded log-probs"
    )
    engine.add_argument("--engine-model", help="another checkpoint (default: MODEL)")
    engine.add_argument("--engine-attention", help="default: the trainer's")
    engine.add_argument("--engine-experts", help="default: the trainer's")
    engine.add_argument("--engine-dtype", choices=_DTYPES, help="default: the trainer's")
    engine.add_argument("--engine-logps", type=Path, help='JSON lines {"ids": [...], "logps": [...]} of any engine')
    engine.add_argument("--engine-url", help="a running vLLM server, scored at temperature 1")
    probe = parser.add_argument_group("the probe")
    probe.add_argument("--text", type=Path, help="text to score (default: a built-in one)")
    probe.add_argument("--tokens", type=int, default=512, help="tokens to score (default: 512)")
    probe.add_argument("--threshold", type=float, help="largest mean |log-prob difference| (default: by dtype)")
    probe.add_argument(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda if there is one",
    )
    parser.set_defaults(parser=parser)


def run(args: argparse.Namespace) -> int:
    others = (args.engine_model, args.engine_attention, args.engine_experts, args.engine_dtype)
    chosen = [any(o is not None for o in others), args.engine_logps is not None, args.engine_url is not None]
    if sum(chosen) > 1:
        args.parser.error("--engine-logps and --engine-url go without the other --engine options")
    if not 0 < args.temperature < math.inf:
        raise ValueError(f"--temperature is {args.temperature}, it must be positive and finite.")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p is {args.top_p}, it must be above 0 and at most 1.")
    if args.threshold is not None and not 0 <= args.threshold < math.inf:
        raise ValueError(f"--threshold is {args.threshold} nats, it must be 0 or more and finite.")
    if args.engine_url is not None and not args.engine_url.startswith(("http://", "https://")):
        raise ValueError(f"--engine-url is {args.engine_url!r}, expected something like http://localhost:8000.")
    found = _diagnose(args)
    print(found.report())
    return 0 if found.healthy else 1


def _diagnose(args: argparse.Namespace) -> Diagnosis:
    base = _load(args.model, args.attention, args.experts, args.dtype, args.device)
    reference = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = base
    if args.adapter is not None:
        from peft import PeftModel

        try:
            model = PeftModel.from_pretrained(base, args.adapter)
        except RuntimeError as error:  # torch's list of every weight that does not fit
            raise ValueError(f"the adapter {args.adapter} does not fit {args.model}: {error}") from None
    reading = Reading(temperature=args.temperature, top_p=args.top_p)
    if args.engine_logps is not None:
        engine = RecordedEngine(args.engine_logps)
        size = base.get_input_embeddings().num_embeddings
        if any(not 0 <= i < size for row in engine.rows for i in row):
            raise ValueError(
                f"{args.engine_logps} has ids that {args.model} does not know: its vocabulary has {size}."
            )
        return diagnose(model, engine, engine.rows, reference=reference, reading=reading, threshold=args.threshold)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.engine_url is not None:
        rows = [_probe(tokenizer, args)]
        return diagnose(model, VllmServer(args.engine_url), rows, reference=reference, threshold=args.threshold)
    other = _load(
        args.engine_model or args.model,
        args.engine_attention or args.attention,
        args.engine_experts or args.experts,
        args.engine_dtype or args.dtype,
        args.device,
    )
    theirs = AutoTokenizer.from_pretrained(args.engine_model or args.model)
    return diagnose(
        model,
        ModelEngine(other, reading, _renderer(theirs)),
        [_probe(tokenizer, args)],
        reference=reference,
        reading=reading,
        render=_renderer(tokenizer),
        threshold=args.threshold,
    )


def _load(name: str, attention: str, experts: str, dtype: str, device: torch.device | str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, attn_implementation=attention, experts_implementation=experts
    )
    check_model(model)
    return model.to(device).eval()


def _renderer(tokenizer: PreTrainedTokenizerBase):
    """Messages to prompt ids, as the trainer makes them."""

    def render(messages: list[dict[str, str]]) -> list[int]:
        if is_harmony(tokenizer):
            return render_prompt(messages, tokenizer)
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    return render


def _probe(tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> list[int]:
    if args.tokens < 2:
        raise ValueError(f"--tokens is {args.tokens}, at least 2 are needed.")
    text = _TEXT if args.text is None else args.text.read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError(f"{args.text} has no text to score.")
    return (ids * math.ceil(args.tokens / len(ids)))[: args.tokens]
