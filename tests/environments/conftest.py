import inspect

import pytest

from trl_gptoss.environments import ExecutorUnavailable, get_executor


@pytest.fixture
def trl_tools():
    """What TRL's trainer makes of an environment: (its tools, has `reset`, owns a reward)."""

    def collect(instance):
        names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
        public = [name for name in names if not name.startswith("_") and name not in ("reset", "get_reward")]
        return [getattr(instance, name) for name in public], "reset" in names, "get_reward" in names

    return collect


@pytest.fixture(scope="session")
def sandbox():
    """The default executor; tests of it are skipped, with the reason, where the machine forbids sandboxes."""
    try:
        return get_executor("bubblewrap")
    except ExecutorUnavailable as error:
        pytest.skip(f"no sandbox on this machine: {error}")
