"""The program between the trainer and the sandboxes: starts them, keeps some warm, hands their pipes out.

It runs in an outer sandbox that holds the same few files and has no network. Having it

* makes starting a sandbox cheap (it is a small process, the trainer is a huge one with many threads),
* lets a trainer that runs as root give the sandboxes a kernel uid of their own (65534) without losing access to an
  interpreter below /root,
* ties their life to the trainer's: it ends when the trainer ends, however that happens, and its pid namespace with it.

Arguments: fd of a SOCK_SEQPACKET socket to the trainer, fd of a pidfd of the trainer. The first message is JSON:
`{"command": argv of a sandbox, "environment": {...}, "filter": hex, "warm": n}`. After it each message of one byte asks
for one sandbox; the answer carries five descriptors: the interpreter's standard input and output, its channel 3, the
status that bwrap reports, and a pidfd of bwrap.
"""

import contextlib
import fcntl
import json
import os
import select
import socket
import sys
from collections import deque

NOBODY = 65534


def spawn(command: list[str], environment: dict[str, str], descriptors: list[int]) -> int:
    """Start `command` with `descriptors[i]` as its descriptor i and no other; returns the pid."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, len(descriptors)) for fd in descriptors]
    try:
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(high)]
        return os.posix_spawn(command[0], command, environment, file_actions=actions, setsid=True)
    finally:
        for fd in high:
            os.close(fd)


def start(config: dict) -> list[int]:
    """Start one sandbox; returns our ends of its descriptors."""
    stdin, to_stdin = os.pipe()
    from_stdout, stdout = os.pipe()
    from_done, done = os.pipe()
    from_status, status = os.pipe()
    filter_end, to_filter = os.pipe()
    os.write(to_filter, config["filter"])
    os.close(to_filter)
    theirs = [stdin, stdout, stdout, done, status, filter_end]
    pid = spawn(config["command"], config["environment"], theirs)
    for fd in (stdin, stdout, done, status, filter_end):
        os.close(fd)
    return [to_stdin, from_stdout, from_done, from_status, os.pidfd_open(pid)]


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    control, trainer_alive = int(sys.argv[1]), int(sys.argv[2])
    for fd in range(3, 1024):
        if fd in (control, trainer_alive):
            os.set_inheritable(fd, False)  # a sandbox must not get at these
        else:
            with contextlib.suppress(OSError):
                os.close(fd)  # what the outer bwrap was given and passed on
    trainer = socket.socket(fileno=control)
    config = json.loads(trainer.recv(1 << 20))
    config["filter"] = bytes.fromhex(config["filter"])
    warm: deque[list[int]] = deque()
    poll = select.poll()
    poll.register(trainer, select.POLLIN)
    poll.register(trainer_alive, select.POLLIN)
    trainer.send(b"ready")
    while True:
        short = len(warm) < config["warm"]
        events = dict(poll.poll(0 if short else None))
        if trainer_alive in events:
            return
        if trainer.fileno() in events:
            if not trainer.recv(1):
                return
            descriptors = warm.popleft() if warm else start(config)
            socket.send_fds(trainer, [b"t"], descriptors)
            for fd in descriptors:
                os.close(fd)
            reap()
        elif short:
            warm.append(start(config))


if __name__ == "__main__":
    main()
