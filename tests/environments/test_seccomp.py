"""The filter is checked by running it on a small interpreter of classic BPF, for both architectures."""

import itertools
import struct

import pytest

from trl_gptoss.environments.seccomp import AUDIT_ARCH, build_filter, syscall_numbers

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
CLONE_PTHREAD = 0x003D0F00  # the flags of glibc's pthread_create
FORBIDDEN = {
    "x86_64": """ptrace 101 mount 165 umount2 166 unshare 272 setns 308 bpf 321 perf_event_open 298 userfaultfd 323
        keyctl 250 add_key 248 request_key 249 socket 41 connect 42 bind 49 process_vm_readv 310 process_vm_writev 311
        kexec_load 246 init_module 175 io_uring_setup 425 io_uring_enter 426 memfd_create 319 pidfd_open 434
        pidfd_getfd 438 open_by_handle_at 304 chroot 161 pivot_root 155 fork 57 vfork 58 shmget 29 msgget 68 mq_open 240
        setuid 105 reboot 169 syslog 103 personality 135 execveat 322 kcmp 312 seccomp 317 mknod 133 mlock 149
        fsopen 430 open_tree 428 move_mount 429 setxattr 188 fanotify_init 300 inotify_init 253 iopl 172 modify_ldt 154""",
    "aarch64": """ptrace 117 mount 40 umount2 39 unshare 97 setns 268 bpf 280 perf_event_open 241 userfaultfd 282
        keyctl 219 add_key 217 request_key 218 socket 198 connect 203 bind 200 process_vm_readv 270 process_vm_writev 271
        kexec_load 104 init_module 105 io_uring_setup 425 io_uring_enter 426 memfd_create 279 pidfd_open 434
        pidfd_getfd 438 open_by_handle_at 265 chroot 51 pivot_root 41 shmget 194 msgget 186 mq_open 180 setuid 146
        reboot 142 syslog 116 personality 92 execveat 281 kcmp 272 seccomp 277 mknodat 33 mlock 228 fsopen 430
        open_tree 428 move_mount 429 setxattr 5 fanotify_init 262 inotify_init1 26""",
}


def run_filter(program: bytes, arch: int, number: int, arguments=(0,) * 6) -> int:
    data = struct.pack("=IIQ6Q", number, arch, 0, *arguments)
    instructions = list(struct.iter_unpack("=HBBI", program))
    accumulator, at = 0, 0
    for _ in range(10_000):
        code, if_true, if_false, k = instructions[at]
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, k)[0]
        elif code == 0x06:
            return k
        else:
            holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code]
            at += if_true if holds else if_false
    raise AssertionError("the filter does not end")


@pytest.fixture(params=AUDIT_ARCH)
def machine(request):
    return request.param


def verdict(machine, number, *arguments):
    return run_filter(build_filter(machine), AUDIT_ARCH[machine], number, (*arguments, *(0,) * (6 - len(arguments))))


def test_every_listed_call_is_allowed_and_nothing_else(machine):
    numbers = syscall_numbers(machine)
    assert len(set(numbers.values())) == len(numbers)
    conditional = {numbers[name] for name in ("clone", "prctl", "ioctl", "socketpair")}
    plain = set(numbers.values()) - conditional
    for number in range(463):
        expected = ALLOW if number in plain else ENOSYS if number == 435 else None if number in conditional else EPERM
        if expected is not None:
            assert verdict(machine, number) == expected, number


def test_dangerous_calls_are_refused(machine):
    words = FORBIDDEN[machine].split()
    for name, number in zip(words[::2], words[1::2]):
        assert verdict(machine, int(number)) == EPERM, name


def test_numbers_past_the_table(machine):
    for number in (463, 500, 1 << 20, 0x40000000 + 57, 0x7FFFFFFF, 0xFFFFFFFF):
        assert verdict(machine, number) == ENOSYS


def test_other_architecture_kills():
    for machine, other in itertools.permutations(AUDIT_ARCH, 2):
        assert run_filter(build_filter(machine), AUDIT_ARCH[other], 0) == KILL
        assert run_filter(build_filter(machine), 0x40000003, 0) == KILL  # 32-bit x86 through int 0x80


def test_clone_makes_threads_only(machine):
    clone = syscall_numbers(machine)["clone"]
    assert verdict(machine, clone, CLONE_PTHREAD) == ALLOW
    assert verdict(machine, clone, 17) == EPERM  # fork
    assert verdict(machine, clone, 0x4111) == EPERM  # vfork
    for bit in (0x80, 1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30):
        assert verdict(machine, clone, CLONE_PTHREAD | bit) == EPERM, hex(bit)


def test_arguments_of_ioctl_prctl_socketpair(machine):
    numbers = syscall_numbers(machine)
    assert verdict(machine, numbers["ioctl"], 0, 0x5401) == ALLOW
    assert verdict(machine, numbers["ioctl"], 0, 0x5412) == EPERM  # TIOCSTI
    assert verdict(machine, numbers["ioctl"], 0x5401, 0x541C) == EPERM  # the right argument is looked at
    assert verdict(machine, numbers["prctl"], 15) == ALLOW
    for option in (1, 4, 8, 22, 24, 35, 38, 0x59616D61):
        assert verdict(machine, numbers["prctl"], option) == EPERM
    assert verdict(machine, numbers["socketpair"], 1) == ALLOW
    for family in (0, 2, 10, 16, 17, 38, 40):
        assert verdict(machine, numbers["socketpair"], family) == EPERM


def test_unknown_machine():
    with pytest.raises(NotImplementedError, match="riscv64.*x86_64, aarch64"):
        build_filter("riscv64")
