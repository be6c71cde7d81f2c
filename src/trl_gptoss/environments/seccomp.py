"""The system calls that sandboxed code may make: an allow-list, assembled into a classic BPF program.

What the list leaves out is refused with EPERM, so that code sees an ordinary error; numbers that are newer than the list
get ENOSYS, so that a newer C library falls back to what it used before. A call of another architecture's table kills.

Of the calls on the list four are allowed for some arguments only:

    clone        a thread of this process (CLONE_THREAD), in no new namespace; hence there is only ever one process
    prctl        names of threads and of memory areas
    ioctl        questions about a terminal, close-on-exec, non-blocking; not TIOCSTI
    socketpair   AF_UNIX (asyncio needs it); `socket` itself is not on the list

`clone3` hides its flags behind a pointer that a filter cannot follow: ENOSYS, and the C library uses `clone`.
"""

import platform
import struct
from collections.abc import Sequence

EPERM, ENOSYS = 1, 38
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
RET_KILL, RET_ERRNO, RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
OFFSET_NUMBER, OFFSET_ARCH, OFFSET_ARG = 0, 4, 16  # struct seccomp_data; low words of arguments, little endian

CLONE_THREAD = 0x00010000
CLONE_NAMESPACES = 0x7E020080  # NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
PRCTLS = (15, 16, 0x53564D41)  # PR_SET_NAME PR_GET_NAME PR_SET_VMA
AF_UNIX = 1
CLONE3 = 435  # from 424 on, all architectures share the numbers
FIRST_UNKNOWN = 463  # Linux 6.10

# name, number on x86_64, number on aarch64 ("-": no such call there); from the kernel's unistd_64.h and asm-generic/unistd.h
_TABLE = """
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68; preadv 295 69; pwritev 296 70
preadv2 327 286; pwritev2 328 287; open 2 -; openat 257 56; close 3 57; close_range 436 436; lseek 8 62; stat 4 -
fstat 5 80; lstat 6 -; newfstatat 262 79; statx 332 291; statfs 137 43; fstatfs 138 44; access 21 -; faccessat 269 48
faccessat2 439 439; readlink 89 -; readlinkat 267 78; getdents 78 -; getdents64 217 61; getcwd 79 17; chdir 80 49
fchdir 81 50; mkdir 83 -; mkdirat 258 34; rmdir 84 -; unlink 87 -; unlinkat 263 35; rename 82 -; renameat 264 38
renameat2 316 276; link 86 -; linkat 265 37; symlink 88 -; symlinkat 266 36; truncate 76 45; ftruncate 77 46
fallocate 285 47; chmod 90 -; fchmod 91 52; fchmodat 268 53; umask 95 166; utime 132 -; utimes 235 -; futimesat 261 -
utimensat 280 88; fsync 74 82; fdatasync 75 83; copy_file_range 326 285; sendfile 40 71; fadvise64 221 223
flock 73 32; dup 32 23; dup2 33 -; dup3 292 24; pipe 22 -; pipe2 293 59; fcntl 72 25; poll 7 -; ppoll 271 73
select 23 -; pselect6 270 72; epoll_create 213 -; epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -
epoll_pwait 281 22; epoll_pwait2 441 441; eventfd 284 -; eventfd2 290 19; mmap 9 222; mprotect 10 226; munmap 11 215
mremap 25 216; madvise 28 233; msync 26 227; mincore 27 232; brk 12 214; rt_sigaction 13 134; rt_sigprocmask 14 135
rt_sigreturn 15 139; rt_sigpending 127 136; rt_sigtimedwait 128 137; rt_sigsuspend 130 133; sigaltstack 131 132
kill 62 129; tkill 200 130; tgkill 234 131; pause 34 -; alarm 37 -; restart_syscall 219 128; exit 60 93
exit_group 231 94; wait4 61 260; waitid 247 95; execve 59 221; futex 202 98; set_robust_list 273 99
get_robust_list 274 100; set_tid_address 218 96; rseq 334 293; membarrier 324 283; sched_yield 24 124
sched_getaffinity 204 123; sched_getparam 143 121; sched_getscheduler 145 120; sched_get_priority_max 146 125
sched_get_priority_min 147 126; sched_rr_get_interval 148 127; getpriority 140 141; getcpu 309 168; arch_prctl 158 -
getpid 39 172; gettid 186 178; getppid 110 173; getpgid 121 155; getpgrp 111 -; setpgid 109 154; getsid 124 156
setsid 112 157; getuid 102 174; geteuid 107 175; getgid 104 176; getegid 108 177; getresuid 118 148
getresgid 120 150; getgroups 115 158; getrlimit 97 163; setrlimit 160 164; prlimit64 302 261; getrusage 98 165
times 100 153; time 201 -; gettimeofday 96 169; clock_gettime 228 113; clock_getres 229 114; clock_nanosleep 230 115
nanosleep 35 101; getitimer 36 102; setitimer 38 103; timer_create 222 107; timer_settime 223 110
timer_gettime 224 108; timer_getoverrun 225 109; timer_delete 226 111; timerfd_create 283 85; timerfd_settime 286 86
timerfd_gettime 287 87; uname 63 160; sysinfo 99 179; getrandom 318 278; socketpair 53 199; sendto 44 206
recvfrom 45 207; sendmsg 46 211; recvmsg 47 212; shutdown 48 210; getsockopt 55 209; setsockopt 54 208
getsockname 51 204; getpeername 52 205; clone 56 220; prctl 157 167; ioctl 16 29
"""


def syscall_numbers(machine: str) -> dict[str, int]:
    """Names on the allow-list -> numbers of this architecture."""
    column = 1 + list(AUDIT_ARCH).index(machine)
    rows = (entry.split() for entry in _TABLE.replace("\n", ";").split(";") if entry)
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, k)


def _only_arguments(number: int, argument: int, allowed: Sequence[int]) -> list[bytes]:
    """Allow call `number` if the low word of `argument` is one of `allowed`, refuse it otherwise."""
    body = [_instruction(LOAD, OFFSET_ARG + 8 * argument)]
    body += [_instruction(JUMP_EQUAL, value, len(allowed) - i, 0) for i, value in enumerate(allowed)]
    body += [_instruction(RETURN, RET_ERRNO | EPERM), _instruction(RETURN, RET_ALLOW)]
    return [_instruction(JUMP_EQUAL, number, 0, len(body)), *body]


def _only_threads(number: int) -> list[bytes]:
    body = [
        _instruction(LOAD, OFFSET_ARG),
        _instruction(JUMP_SET, CLONE_NAMESPACES, 1, 0),
        _instruction(JUMP_SET, CLONE_THREAD, 1, 0),
        _instruction(RETURN, RET_ERRNO | EPERM),
        _instruction(RETURN, RET_ALLOW),
    ]
    return [_instruction(JUMP_EQUAL, number, 0, len(body)), *body]


def build_filter(machine: str | None = None) -> bytes:
    """The filter as `struct sock_filter[]`, ready for `bwrap --seccomp`.

    Args:
        machine (`str`, *optional*): `x86_64` or `aarch64`; this machine if not given.

    Raises:
        `NotImplementedError`: no table for this architecture.
    """
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCH:
        raise NotImplementedError(f"No system call table for {machine!r}; there is one for {', '.join(AUDIT_ARCH)}.")
    numbers = syscall_numbers(machine)
    plain = sorted(n for name, n in numbers.items() if name not in ("clone", "prctl", "ioctl", "socketpair"))

    program = [
        _instruction(LOAD, OFFSET_ARCH),
        _instruction(JUMP_EQUAL, AUDIT_ARCH[machine], 1, 0),
        _instruction(RETURN, RET_KILL),
        _instruction(LOAD, OFFSET_NUMBER),
        _instruction(JUMP_GREATER_EQUAL, FIRST_UNKNOWN, 0, 1),  # newer calls, and x86_64's x32 calls (bit 30)
        _instruction(RETURN, RET_ERRNO | ENOSYS),
        _instruction(JUMP_EQUAL, CLONE3, 0, 1),
        _instruction(RETURN, RET_ERRNO | ENOSYS),
        *_only_threads(numbers["clone"]),
        *_only_arguments(numbers["prctl"], 0, PRCTLS),
        *_only_arguments(numbers["ioctl"], 1, IOCTLS),
        *_only_arguments(numbers["socketpair"], 0, (AF_UNIX,)),
    ]
    for number in plain:
        program += [_instruction(JUMP_EQUAL, number, 0, 1), _instruction(RETURN, RET_ALLOW)]
    program.append(_instruction(RETURN, RET_ERRNO | EPERM))
    return b"".join(program)
