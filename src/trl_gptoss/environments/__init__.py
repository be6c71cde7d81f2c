"""Environments: what tools a rollout has, and where the code that the policy writes is run."""

from .executor import ExecutionResult, Executor, ExecutorUnavailable, Session, get_executor, register_executor
from .openenv import OpenEnvEnvironment
from .protocol import Environment, ToolOutput, not_a_tool
from .python_tool import PythonTool

__all__ = [
    "Environment",
    "ExecutionResult",
    "Executor",
    "ExecutorUnavailable",
    "OpenEnvEnvironment",
    "PythonTool",
    "Session",
    "ToolOutput",
    "get_executor",
    "not_a_tool",
    "register_executor",
]
