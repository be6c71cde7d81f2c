"""Which scheduler is made, and which requests it lists, with a few lines in the place of vLLM. tests/vllm has the real ones."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from trl_gptoss.rollouts.vllm.engine import REPLAY_SCHEDULER
from trl_gptoss.rollouts.vllm.scheduler import replay_scheduler
from trl_gptoss.rollouts.vllm.versions import SCHEDULERS, scheduler_is_known


class Scheduler:
    """As vLLM's: lists the blocks of everything that is scheduled if it is to return experts."""

    def __init__(self, vllm_config, more=None):
        self.enable_return_routed_experts = vllm_config.model_config.enable_return_routed_experts
        self.routed_experts_mgr = SimpleNamespace(attn_gid=1)
        self.kv_cache_manager = self
        self.requests, self._re_block_ids, self.fails, self.more = {}, {}, False, more

    def get_blocks(self, name):
        return SimpleNamespace(get_block_ids=lambda: ([], [name]))

    def _update_after_schedule(self, scheduler_output):
        if self.fails:
            raise RuntimeError("planted")
        if self.enable_return_routed_experts:
            self._re_block_ids.update({name: [name] for name in scheduler_output.num_scheduled_tokens})


class AsyncScheduler(Scheduler):
    pass


class Config:
    """As vLLM's `SchedulerConfig`."""

    def __init__(self, asynchronous):
        self.scheduler_cls, self.asynchronous = REPLAY_SCHEDULER, asynchronous

    def get_scheduler_cls(self):
        assert self.scheduler_cls is None
        return AsyncScheduler if self.asynchronous else Scheduler


def config(asynchronous=True, experts=True, speculative=None, connector=None, stages=1):
    return SimpleNamespace(
        scheduler_config=Config(asynchronous),
        model_config=SimpleNamespace(enable_return_routed_experts=experts),
        speculative_config=speculative,
        kv_transfer_config=connector,
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    module = ModuleType("vllm")
    module.__version__ = SCHEDULERS[-1]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


def test_releases_that_were_read():
    assert scheduler_is_known("0.26.0") and scheduler_is_known("0.26.0+cu130") and scheduler_is_known("0.30.0")
    assert not any(map(scheduler_is_known, ("0.25.0", "0.26.1", "0.30.1", "0.31.0")))


@pytest.mark.parametrize("asynchronous, own", [(True, AsyncScheduler), (False, Scheduler)])
def test_it_is_the_scheduler_that_vllm_would_take(asynchronous, own):
    given = config(asynchronous)
    made = replay_scheduler(vllm_config=given, more=3)
    assert type(made) is not own and type(made).__mro__[2] is own and made.more == 3
    assert given.scheduler_config.scheduler_cls == REPLAY_SCHEDULER  # untouched


@pytest.mark.parametrize("change", [{"experts": False}, {"speculative": 1}, {"connector": 1}, {"stages": 2}])
def test_vllms_own_is_left_alone_where_nobody_has_looked(change):
    assert type(replay_scheduler(vllm_config=config(**change))) is AsyncScheduler


def test_vllms_own_is_used_with_a_warning_in_another_release(vllm):
    vllm.__version__ = "0.31.0"
    with pytest.warns(UserWarning, match="0.26.0, 0.30.0, this is 0.31.0"):
        assert type(replay_scheduler(vllm_config=config())) is AsyncScheduler


def test_blocks_are_listed_when_a_prefill_ends():
    made = replay_scheduler(vllm_config=config())
    made.requests = {
        name: SimpleNamespace(is_prefill_chunk=chunk, num_output_tokens=tokens, resumable=resumable)
        for name, chunk, tokens, resumable in [
            ("chunk", True, 0, False),
            ("ends", False, 0, False),
            ("decodes", False, 3, False),
            ("again", True, 3, False),  # preempted behind its first token
            ("session", False, 3, True),
        ]
    }
    made._update_after_schedule(SimpleNamespace(num_scheduled_tokens=dict.fromkeys(made.requests, 1)))
    assert made._re_block_ids == {"ends": ["ends"], "session": ["session"]}
    assert made.enable_return_routed_experts


def test_the_switch_is_back_after_an_error():
    made = replay_scheduler(vllm_config=config())
    made.fails = True
    with pytest.raises(RuntimeError, match="planted"):
        made._update_after_schedule(SimpleNamespace(num_scheduled_tokens={}))
    assert made.enable_return_routed_experts
