import inspect
import pickle

from transformers.utils import get_json_schema
from trl import GRPOTrainer

from trl_gptoss.environments import Environment, PythonTool, ToolOutput, not_a_tool


class Counter(Environment):
    builtin_tools = ("raw",)

    def count(self, to: int) -> str:
        """Count.

        Args:
            to: Where to stop.
        """
        self.done = to > 3
        return str(to)

    def visible(self) -> str:
        """A tool, because it is public."""
        return ""

    @not_a_tool
    def helper(self, x: int) -> int:
        """Not a tool."""
        return x + 1


def test_trl_collects_tools_as_assumed_here():
    # `not_a_tool` and the `trl_tools` fixture rely on this expression of TRL's constructor and generation step
    source = inspect.getsource(GRPOTrainer)
    assert source.count("inspect.getmembers(type(") >= 2 and "predicate=inspect.isfunction" in source
    assert '"reset"' in source and '"get_reward"' in source


def test_helpers_are_no_tools_but_work(trl_tools):
    env = Counter()
    tools, has_reset, has_reward = trl_tools(env)
    assert [t.__name__ for t in tools] == ["count", "visible"]  # control: the unmarked method is collected
    assert has_reset and not has_reward
    assert env.helper(1) == 2 and Counter.helper.__doc__ == "Not a tool."
    assert env.close() is None


def test_done_belongs_to_one_rollout():
    env = Counter()
    assert env.reset(prompt="x", anything=1) is None and not env.done
    env.count(4)
    assert env.done and not Counter.done
    env.reset()
    assert not env.done


def test_python_tool_shows_exactly_one_tool_with_a_schema(trl_tools, sandbox):
    tools, _, _ = trl_tools(PythonTool(executor=sandbox))
    assert [t.__name__ for t in tools] == ["python"] == list(PythonTool.builtin_tools)
    schema = get_json_schema(tools[0])["function"]
    assert list(schema["parameters"]["properties"]) == ["code"]


def test_tool_output_is_text_with_facts():
    output = ToolOutput("text", timed_out=True, seconds=1.5)
    assert output == "text" and isinstance(output, str)
    assert (output.failed, output.timed_out, output.seconds) == (True, True, 1.5)
    again = pickle.loads(pickle.dumps(output))
    assert (again, again.failed, again.timed_out, again.seconds) == ("text", True, True, 1.5)
    assert not ToolOutput("x").failed
