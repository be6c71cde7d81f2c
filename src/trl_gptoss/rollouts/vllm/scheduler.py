"""vLLM's scheduler for engines that return experts: `scheduler_cls=trl_gptoss.rollouts.vllm.scheduler.replay_scheduler`.

The experts of a prompt are looked up by the blocks that held it when its prefill was scheduled, so vLLM lists the blocks of a
request before the step runs. It lists those of every running request in every step; only the step that gives a request its
first token reads the list:

    step           1      2      3      4   ...
    prompt         chunk  last   -      -
    tokens         0      1      2      3
    vLLM lists     yes    yes    yes    yes     the longer the sequence, the longer the list
    this lists     no     yes    no     no

Under asynchronous scheduling step 3 is scheduled before the token of step 2 is known, and lists them again: vLLM does, too, and
the second list begins with the first.
"""

import copy
import functools
import warnings
from typing import Any, Protocol

from .versions import SCHEDULERS, scheduler_is_known


class _Scheduler(Protocol):
    """The part of vLLM's scheduler that is used here, private names included; pinned in tests/vllm."""

    requests: dict[str, Any]
    kv_cache_manager: Any
    routed_experts_mgr: Any
    enable_return_routed_experts: bool
    _re_block_ids: dict[str, list[int]]

    def _update_after_schedule(self, scheduler_output: Any) -> None: ...


class ListsBlocksOnce:
    """Mixed into vLLM's scheduler. Overrides one private method:

    `_update_after_schedule`: lists the blocks of those requests only whose prefill ends in this step.
    """

    def _update_after_schedule(self: _Scheduler, scheduler_output: Any) -> None:
        self.enable_return_routed_experts = False  # read nowhere else in there
        try:
            super()._update_after_schedule(scheduler_output)
        finally:
            self.enable_return_routed_experts = True
        group = self.routed_experts_mgr.attn_gid
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]
            # A session that goes on (resumable) gives its tokens up to the prompt of its next part: listed as vLLM does.
            if request.resumable or not (request.num_output_tokens or request.is_prefill_chunk):
                self._re_block_ids[name] = self.kv_cache_manager.get_blocks(name).get_block_ids()[group]


def replay_scheduler(*, vllm_config: Any, **arguments: Any) -> Any:
    """The scheduler that vLLM would make, synchronous or not; in an engine that returns experts with fewer lists.

    vLLM calls it by its qualified name where it would instantiate a class. It leaves vLLM's scheduler as it is, with a warning,
    in a release whose source has not been read; and wherever several batches are under way in other ways than were looked
    at: with speculative decoding, pipeline parallelism or a KV connector.

    Args:
        vllm_config (`vllm.config.VllmConfig`): of the engine.
        arguments (`Any`): for the scheduler.
    """
    import vllm

    config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    own = config.get_scheduler_cls()
    if not vllm_config.model_config.enable_return_routed_experts:
        return own(vllm_config=vllm_config, **arguments)
    if not scheduler_is_known(vllm.__version__):
        warnings.warn(
            f"replay_scheduler knows the schedulers of vLLM {', '.join(SCHEDULERS)}, this is {vllm.__version__}: its own "
            "scheduler is used, which makes router replay a little slower.",
            stacklevel=2,
        )
        return own(vllm_config=vllm_config, **arguments)
    plain = (
        vllm_config.speculative_config is None
        and vllm_config.kv_transfer_config is None
        and vllm_config.parallel_config.pipeline_parallel_size == 1
    )
    return (_lists_blocks_once(own) if plain else own)(vllm_config=vllm_config, **arguments)


@functools.cache
def _lists_blocks_once(own: type) -> type:
    return type(f"{own.__name__}ListsBlocksOnce", (ListsBlocksOnce, own), {})
