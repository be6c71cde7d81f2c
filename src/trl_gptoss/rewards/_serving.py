"""The loop of a worker program: JSON lines in, JSON lines out, within limits that the kernel enforces."""

import json
import resource
import sys
from collections.abc import Callable
from typing import Any

MEMORY_LIMIT = 4 << 30


def allow_cpu(seconds: int) -> None:
    """Let the kernel end us (SIGXCPU) after this much more CPU time, even if nobody is left to wait for the answer."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], warm_up: Callable[[], None]) -> None:
    """Answer jobs until standard input ends.

    Args:
        answer (`Callable`): one job to its answer, both plain JSON. A job has a field `seconds`: the CPU time it may take.
        warm_up (`Callable`): what makes the first job as quick as the others; before the worker says it is ready.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    warm_up()
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        allow_cpu(job["seconds"])
        print(json.dumps(answer(job)), file=answers, flush=True)
