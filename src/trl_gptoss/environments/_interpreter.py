"""The program inside the sandbox: takes code on standard input, runs it, prints what it gives.

It runs as a script under `python -I -S` and imports as little as possible: every import is paid for by every call.
Nothing here protects anything. Once the code runs it owns this process; what it may do is decided outside.

Arguments: memory limit (bytes), thread limit, file size limit (bytes), working folder, folders to import from.
Standard input: frames of 16 bytes token, 1 byte "s" (stateless) or "k" (keep), 4 bytes CPU seconds, 8 bytes length, code.
File descriptor 3 (only "k"): after each frame the token and one byte, "0" for success, "1" for failure.
"""

import posix as os  # the module `os` itself costs 1 ms per call
import sys

HEADER = 16 + 1 + 4 + 8


def set_limits(memory: int, threads: int, file_size: int) -> None:
    from resource import (
        RLIMIT_AS,
        RLIMIT_CORE,
        RLIMIT_FSIZE,
        RLIMIT_MEMLOCK,
        RLIMIT_NOFILE,
        RLIMIT_NPROC,
        RLIMIT_SIGPENDING,
        setrlimit,
    )

    for limit, value in (
        (RLIMIT_CORE, 0),
        (RLIMIT_MEMLOCK, 0),
        (RLIMIT_SIGPENDING, 128),  # and with it POSIX timers, which take kernel memory
        (RLIMIT_NOFILE, 128),
        (RLIMIT_FSIZE, file_size),
        (RLIMIT_AS, memory),
    ):
        setrlimit(limit, (value, value))
    if threads:
        setrlimit(RLIMIT_NPROC, (threads, threads))


def allow_cpu(seconds: int, hard: bool) -> None:
    """Allow `seconds` of CPU time from now on (whole process, all threads); `hard`: for good."""
    from resource import RLIMIT_CPU, RUSAGE_SELF, getrusage, setrlimit

    used = getrusage(RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    setrlimit(RLIMIT_CPU, (limit, limit if hard else -1))


def read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def run(source: str, namespace: dict) -> int:
    """Run `source` like a notebook cell; returns the exit status."""
    try:
        tree = compile(source, "<python>", "exec", 0x400)  # ast.PyCF_ONLY_AST, without importing ast
        last = tree.body.pop() if tree.body and type(tree.body[-1]).__name__ == "Expr" else None
        exec(compile(tree, "<python>", "exec"), namespace)
        if last is not None:
            import _ast

            # "single" hands the value to sys.displayhook: nothing for None, otherwise its repr, kept in `_`
            exec(compile(_ast.Interactive([last]), "<python>", "single"), namespace)
        return 0
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        show(error, source)
        return 1


def show(error: BaseException, source: str) -> None:
    """Print the traceback from the code's own first line on."""
    import linecache
    import traceback
    from contextlib import suppress

    with suppress(BaseException):  # the code may have put anything in its place
        sys.stdout.flush()
    linecache.cache["<python>"] = (len(source), None, source.splitlines(True), "<python>")
    own = error.__traceback__ and error.__traceback__.tb_next
    traceback.print_exception(type(error), error, own)


def main() -> None:
    set_limits(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    os.chdir(sys.argv[4])
    sys.path += sys.argv[5:]
    sys.argv[:] = [""]
    sys.stdout.reconfigure(line_buffering=True)  # what was printed before a kill is kept, and stays in order
    own_module = sys.modules["__main__"]  # keeps the globals of these functions alive
    namespace = sys.modules["__main__"] = type(own_module)("__main__")
    commands = os.dup(0)
    reader, writer = os.pipe()
    os.close(writer)
    os.dup2(reader, 0)  # the code finds an empty standard input, not our frames
    os.close(reader)
    while True:
        header = read_exactly(commands, HEADER)
        source = read_exactly(commands, int.from_bytes(header[21:29], "little")).decode("utf-8", "replace")
        keep = header[16:17] == b"k"
        allow_cpu(int.from_bytes(header[17:21], "little"), hard=not keep)
        if not keep:
            os.close(commands)
            os.close(3)
            sys.exit(run(source, namespace.__dict__))
        status = run(source, namespace.__dict__)
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:  # the code may have put anything there
            status = 1
        os.write(3, header[:16] + (b"1" if status else b"0"))


if __name__ == "__main__":
    main()
