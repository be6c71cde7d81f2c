"""What a trainer's configuration says about padding and sequence parallelism, checked against model and launcher."""

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PretrainedConfig
from transformers.training_args import OptimizerNames

from ..parallelism import check_accelerator, check_sequence_parallel
from .config import GptOssGRPOConfig
from .guards import check_attention
from .loading import ATTENTION, is_gpt_oss

# These take `cu_seq_lens_q` and its companions, and let no document see another.
_KEEPS_DOCUMENTS_APART = (ATTENTION, "flash_attention_2", "flash_attention_3", "flash_attention_4")


def check_packed_attention(config: PretrainedConfig) -> None:
    """Refuse an attention through which packed sequences would see each other.

    Args:
        config ([`~transformers.PretrainedConfig`]): the model's, after its attention was set.

    Raises:
        ValueError: what was found, why it is wrong, and what to set.
    """
    check_attention(config, packed=True)
    found = config.get_text_config()._attn_implementation
    if found not in _KEEPS_DOCUMENTS_APART:
        raise ValueError(
            f"padding_free=True with attn_implementation={found!r}: it is not known to keep the packed sequences apart, so "
            f"completions could attend to other rollouts. Load the model with one of {', '.join(_KEEPS_DOCUMENTS_APART)}, "
            "or set padding_free=False."
        )


def choose_padding_free(args: GptOssGRPOConfig, model: nn.Module, accelerator: Accelerator) -> bool:
    """Whether the trainer packs its rows.

    Args:
        args ([`GptOssGRPOConfig`]): with `padding_free`, `max_tokens_per_micro_batch` and `sequence_parallel_size`.
        model (`nn.Module`): the policy, with or without PEFT.
        accelerator ([`~accelerate.Accelerator`]): the trainer's.

    Returns:
        `bool`: `padding_free`; if that is None, True for GPT-OSS with `sink_fa3` or `flash_attention_4`.

    Raises:
        ValueError: a combination that would compute another loss or another function; says what to set.
    """
    size = args.sequence_parallel_size
    check_accelerator(accelerator, size)
    base = model.get_base_model() if is_peft_model(model) else model
    needed = size > 1 or args.max_tokens_per_micro_batch is not None or args.oom_retries > 0
    packs = args.padding_free or needed
    if args.router_replay != "off" and size > 1:
        raise ValueError(
            f"router_replay={args.router_replay!r} does not know the shares of a sequence that sequence_parallel_size={size} "
            "makes. Set sequence_parallel_size=1, or router_replay='off'."
        )
    if args.padding_free is None and not needed:
        attention = base.config.get_text_config()._attn_implementation
        packs = is_gpt_oss(base.config) and attention in (ATTENTION, "flash_attention_4") and args.n_gpu <= 1
    if not packs:
        return False
    check_packed_attention(base.config)
    if size > 1:
        check_sequence_parallel(base.config, size)
    if args.n_gpu > 1:
        raise ValueError(
            f"padding_free=True with {args.n_gpu} GPUs in one process: DataParallel divides batches by rows, and a packed "
            "batch is one row. Start one process per GPU with `accelerate launch`."
        )
    if needed:
        _check_turns(args)
    if args.oom_retries and accelerator.num_processes > 1:
        raise ValueError(
            f"oom_retries={args.oom_retries} with {accelerator.num_processes} processes: one that tries again leaves the others "
            "waiting in a collective. Set oom_retries=0 and choose max_tokens_per_micro_batch with `trl-gptoss plan`."
        )
    return True


def _check_turns(args: GptOssGRPOConfig) -> None:
    """What is not a sum over parts of a micro-batch cannot be back-propagated part by part."""
    what = _what(args)
    if args.router_aux_loss_coef != 0:
        raise ValueError(
            f"{what}; the router's auxiliary loss is a product of means over all tokens and not a sum of parts. Set "
            f"router_aux_loss_coef=0 (now {args.router_aux_loss_coef})."
        )
    if args.top_entropy_quantile < 1:
        raise ValueError(
            f"{what}; top_entropy_quantile={args.top_entropy_quantile} needs the entropies of all ranks' tokens before the "
            "first of them. Set top_entropy_quantile=1.0."
        )
    entropy = args.entropy_coef != 0 or args.use_adaptive_entropy
    if entropy and _divides(args) and args.loss_type != "bnpo":
        raise ValueError(
            f"{what}; the entropy bonus is a mean of tokens and loss_type={args.loss_type!r} is not, so their parts have "
            "different weights. Set max_tokens_per_micro_batch=None and oom_retries=0, or loss_type='bnpo'."
        )
    if args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
        raise ValueError(f"{what}; {args.optim} steps inside of backward. Choose another optimizer.")


def check_corrected_parts(args: GptOssGRPOConfig) -> None:
    """Refuse a loss whose divisor the rollout correction decides, where a micro-batch is divided.

    Args:
        args ([`GptOssGRPOConfig`]): of a trainer that corrects, and does not only measure.

    Raises:
        ValueError: `loss_type="bnpo"` with `max_tokens_per_micro_batch` or `oom_retries`.
    """
    if _divides(args) and args.loss_type == "bnpo":
        raise ValueError(
            f"{_what(args)}; loss_type='bnpo' divides by the tokens that rollout correction keeps, which is known only after "
            "the last part. Set max_tokens_per_micro_batch=None and oom_retries=0, or another loss_type."
        )


def _divides(args: GptOssGRPOConfig) -> bool:
    return args.max_tokens_per_micro_batch is not None or args.oom_retries > 0


def _what(args: GptOssGRPOConfig) -> str:
    return (
        f"sequence_parallel_size={args.sequence_parallel_size} and "
        f"max_tokens_per_micro_batch={args.max_tokens_per_micro_batch} (or oom_retries={args.oom_retries}) back-propagate parts "
        "of a micro-batch one after another"
    )
