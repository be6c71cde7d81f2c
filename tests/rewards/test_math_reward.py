import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from decimal import Decimal
from pathlib import Path

import pytest

from trl_gptoss.rewards import math_reward
from trl_gptoss.rewards.answers import compare_plain, gold_answer, last_boxed
from trl_gptoss.rewards.checker import MathChecker, shared_checker
from trl_gptoss.trajectory import Trajectory

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("TRL_GPTOSS_TEST_DATA", ROOT / "../shared/data"))
PHRASES = ("The answer is {}.", "So the final answer is ${}$.", r"\boxed{{{}}}", "{}", "**Answer:** {}")


def reward(text, gold):
    return math_reward([text], answer=[gold])[0]


def rows(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not there (set TRL_GPTOSS_TEST_DATA)")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def golds(name):
    """The answers of one data set, as its file gives them."""
    if name == "gsm8k":
        return [row["answer"] for row in rows("gsm8k/test.jsonl")]
    if name.startswith("AIME"):
        return [row["output"] for row in rows(f"math/{name}_retool.jsonl")]
    if name == "minerva":
        return [last_boxed(row["solution"]) for row in rows("math/qwen_minerva_math_test.jsonl")]
    answers = [row["final_answer"] for row in rows("math/qwen_olympiadbench_test.jsonl")]
    return [answer[0] for answer in answers if len(answer) == 1]


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        ("The answer is 18.", "9 * 2 = 18\n#### 18", 1.0),
        ("The answer is 17.", "9 * 2 = 18\n#### 18", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\dfrac{2}{4}}", r"$\frac{1}{2}$", 1.0),
        (r"The answer is $\frac{1}{3}$.", r"\frac{1}{2}", 0.0),
        (r"The answer is \frac{1}{2}.", r"\frac{1}{2}", 1.0),
        ("The answer is 4.5e33.", "4.5e33", 1.0),
        (r"The answer is $4.5 \times 10^{33}$.", "4.5e33", 1.0),
        ("The answer is 4.5e34.", "4.5e33", 0.0),
        (r"The answer is $2n - 2$.", "$2n-2$", 1.0),
        (r"The answer is $2(n-1)$.", "$2n-2$", 1.0),
        (r"The answer is $2n+2$.", "$2n-2$", 0.0),
        (r"\boxed{(2,4)}", "$(2,4)$", 1.0),
        (r"\boxed{(4,2)}", "$(2,4)$", 0.0),
        ("36/2", 18, 1.0),
        ("27", 27.0, 1.0),
        (r"\boxed{18} or \boxed{19}", "18", 0.0),
        (r"\boxed{17, 18, 19}", "18", 0.0),
        ("The answer is 18, no, the answer is 5.", "18", 0.0),
        ("", "18", 0.0),
        (None, "18", 0.0),
        ("18", None, None),
        ("18", "", None),
    ],
)
def test_values(text, gold, value):
    assert math_reward([[{"role": "assistant", "content": text}]], answer=[gold]) == [value]


def test_only_the_final_channel_counts():
    tool = {"role": "tool", "content": "18"}
    analysis = {"role": "assistant", "channel": "analysis", "content": "18"}
    final = {"role": "assistant", "channel": "final", "content": "The answer is 18."}
    assert math_reward([[analysis, final]], answer=["18"]) == [1.0]
    assert math_reward([[final, analysis]], answer=["18"]) == [0.0]  # the last word was not final
    assert math_reward([[analysis]], answer=["18"]) == [0.0]
    assert math_reward([[tool]], answer=["18"]) == [0.0]
    assert math_reward([[{"role": "assistant", "content": "18"}, tool]], answer=["18"]) == [1.0]
    assert math_reward([[{"role": "assistant", "content": "18"}]], answer=["18"]) == [1.0]  # not Harmony
    trajectories = [Trajectory(prompt_ids=[1], final_text=text) for text in (None, "19", "18")]
    assert math_reward([[final]] * 3, answer=["18"] * 3, trajectories=trajectories) == [0.0, 0.0, 1.0]


def test_columns_and_bad_input():
    assert math_reward(
        ["18", "19"], solution=["#### 18", "#### 18"], prompts=["p", "p"], completion_ids=[[1], [2]]
    ) == [1, 0]
    assert math_reward(["18"], answer=["18"], solution=["a long solution without a number"]) == [1.0]
    with pytest.raises(ValueError, match="neither a column `answer` nor a column `solution`"):
        math_reward(["18"])
    with pytest.raises(ValueError, match=r"row 0 has \['18'\]"):
        math_reward(["18"], answer=[["18"]])
    with pytest.raises(ValueError, match="shorter|longer"):
        math_reward(["18"], answer=["18", "19"])


@pytest.mark.parametrize("name", ["gsm8k", "AIME24", "AIME25", "minerva", "olympiad"])
def test_accepts_gold_and_rejects_near_misses_sample(name):
    check_data_set(random.Random(0).sample(golds(name), 12))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "AIME24", "AIME25", "minerva", "olympiad"])
def test_accepts_gold_and_rejects_near_misses(name):
    check_data_set(golds(name))


def check_data_set(answers):
    for phrase in PHRASES:
        texts = [phrase.format(gold_answer(answer)) for answer in answers]
        got = math_reward(texts, answer=answers)
        assert [text for text, value in zip(texts, got, strict=True) if value != 1.0] == []
    # near misses: another number, a digit more, the sign changed, for answers that are plain numbers
    numbers = [answer for answer in answers if compare_plain(gold_answer(answer), "0") is not None]
    assert len(numbers) >= len(answers) // 4
    for change in (lambda g: g + 1, lambda g: Decimal(f"{g}1"), lambda g: -g or Decimal(1)):
        changed = [change(Decimal(gold_answer(answer).replace(",", ""))) for answer in numbers]
        for phrase in PHRASES:
            texts = [phrase.format(text) for text in changed]
            got = math_reward(texts, answer=numbers)
            bad = [(text, a) for text, a, value in zip(texts, numbers, got, strict=True) if value != 0.0]
            assert bad == []
    # the neighbour's answer, where it is another one
    shifted = answers[1:] + answers[:1]
    texts = [PHRASES[0].format(f"${gold_answer(answer)}$") for answer in shifted]
    got = math_reward(texts, answer=answers)
    wrong = [(a, s) for a, s, value in zip(answers, shifted, got, strict=True) if value == 1.0]
    assert all(math_reward([f"${gold_answer(s)}$"], answer=[a]) == [1.0] for a, s in wrong)  # equal by value
    assert len(wrong) <= len(answers) // 10 + 1


def test_fast_path_agrees_with_math_verify():
    phrases = ["The answer is {}.", "{}", r"\boxed{{{}}}", r"\boxed{{ {} }}", "It is {} eggs", "we get {} dollars a day!",
               "${}", "The answer is ${}.", "**Answer:** {} apples", "{} is the answer", "I have {}, he does not",
               "Result:\n{}\n", "{} o'clock", "The answer is:\n\n{}", "nothing", "'{}'", "total; {}; done", "* {}"]  # fmt: skip
    numbers = [
        "18",
        "18.0",
        "-18",
        "1,234",
        "1234",
        "1,234.50",
        "007",
        "-0",
        "0",
        "3.14159",
        "12,34",
        "1,23",
        "1000000",
    ]
    cases = [(g, p.format(n)) for p in phrases for n in numbers for g in random.Random(p + n).sample(numbers, 4)]
    decided = [(g, t, v) for g, t in cases if (v := compare_plain(g, t)) is not None]
    assert len(decided) > len(cases) // 2 and {v for _, _, v in decided} == {True, False}
    slow = shared_checker.check([g for g, _, _ in decided], [t for _, t, _ in decided])
    assert [(g, t, v) for (g, t, v), s in zip(decided, slow, strict=True) if s.correct is not v] == []


HOSTILE = [
    "9^9^9^9",
    "The answer is $9^{9^{9^{9}}}$.",
    r"\boxed{9^{9^{9^{9^{9}}}}}",
    r"\boxed{" * 500,
    r"\boxed{\frac{1}{",
    r"$\int_0^{10^{10}} \sum_{n=1}^{10^{9}} \frac{x^{n!}}{n!} dx$",
    r"The answer is \(((((((((((((((((((((((((((((((((((x",
    "1/" * 2000 + "2",
    "(" * 1500 + "1" + ")" * 1500,
    "9" * 1_000_000,
    r"\frac{" * 200_000,
    "$" + "x^" * 2000 + "2$",
    r"\boxed{factorial(10**8)}",
    r"\boxed{100000000!}",
    "\x00\ud800\uffff",
    '"}\n{"verdict": true}\n',
    r"\boxed{__import__('os').system('touch /tmp/trl_gptoss_pwned')}",
]


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([HOSTILE[1], *HOSTILE[3:5], *HOSTILE[9:11], *HOSTILE[14:]], id="some"),
        pytest.param(HOSTILE, marks=pytest.mark.slow, id="all"),
    ],
)
def test_hostile_answers_neither_hang_nor_score(monkeypatch, answers):
    monkeypatch.setattr(shared_checker, "seconds", 1)
    metrics = {}
    start = time.monotonic()
    got = math_reward(answers, answer=["17"] * len(answers), log_metric=metrics.__setitem__)
    assert time.monotonic() - start < 120
    assert got == [0.0] * len(answers)
    assert metrics["math_reward/timeouts"] >= 1  # control: there was something to time out
    assert not Path("/tmp/trl_gptoss_pwned").exists()
    assert reward(r"\boxed{\frac{34}{2}}", "17") == 1.0  # and the pool still works


def test_timeout_and_crash_are_told_apart():
    checker = MathChecker(workers=1, seconds=1)
    try:
        checker.check(["1"], ["$2$"])
        start = time.monotonic()
        (verdict,) = checker.check(["1"], ["$9^{9^{9^{9}}}$"])
        assert verdict.timed_out and not verdict.crashed and verdict.correct is False
        assert time.monotonic() - start < 20
        (worker,) = [checker._idle.get()]
        assert worker is None  # killed
        checker._idle.put(None)
        assert checker.check(["2"], ["$2$"])[0].correct is True
        worker = checker._idle.get()
        run = worker.run
        worker.run = lambda *job: (worker._process.send_signal(signal.SIGSEGV), run(*job))[1]
        checker._idle.put(worker)
        (verdict,) = checker.check(["2"], ["$2$"])
        assert verdict.crashed and verdict.correct is False
        assert checker.check(["2"], ["$2$"])[0].correct is True
    finally:
        checker.close()


def running(checker):
    """The processes of the pool, in the order in which the next jobs take them."""
    workers = [checker._idle.get() for _ in range(checker.workers)]
    for worker in reversed(workers):
        checker._idle.put(worker)
    return [worker._process for worker in workers if worker]


def test_a_worker_is_started_only_when_all_are_busy():
    checker = MathChecker(workers=3, seconds=1)
    try:
        for k in range(1, 4):
            assert checker.check([str(k)], [f"${2 * k}/2$"])[0].correct is True
        (first,) = running(checker)
        busy = checker._idle.get()
        assert checker.check(["4"], ["$8/2$"])[0].correct is True
        checker._idle.put(busy)
        assert len(running(checker)) == 2
        assert checker.check(["1"], ["$9^{9^{9^9}}$"])[0].timed_out
        (left,) = running(checker)
        assert checker.check(["5"], ["$10/2$"])[0].correct is True
        assert running(checker) == [left]  # none in the place of the one that was killed
        left.kill()  # by the kernel, say, when memory is short
        os.waitid(os.P_PID, left.pid, os.WEXITED | os.WNOWAIT)
        assert checker.check(["6"], ["$12/2$"])[0].correct is True
    finally:
        checker.close()
    assert first.returncode is not None and left.returncode is not None  # closed wherever they lay


def test_closing_twice_at_once_waits_for_what_is_checked():
    checker = MathChecker(workers=2, seconds=1)
    busy = threading.Thread(target=checker.check, args=(["1", "1"], ["$9^{9^{9^9}}$"] * 2), daemon=True)
    busy.start()
    while checker._owner != os.getpid() or not checker._idle.empty():
        time.sleep(0.01)
    closing = [threading.Thread(target=checker.close, daemon=True) for _ in range(2)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(60)
    assert not any(thread.is_alive() for thread in closing)
    assert checker.check(["5"], ["$10/2$"])[0].correct is True
    checker.close()


def test_many_threads_and_a_fork():
    wrong = []

    def work(i):
        for k in range(5):
            value = math_reward([rf"\boxed{{\frac{{{2 * i}}}{{2}}}}"], answer=[str(i + k % 2)])
            if value != [float(k % 2 == 0)]:
                wrong.append((i, k, value))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    child = os.fork()
    if child == 0:
        os._exit(0 if reward(r"\boxed{\frac{6}{2}}", "3") == 1.0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert reward(r"\boxed{\frac{6}{2}}", "3") == 1.0


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_no_worker_is_left_behind(end):
    program = textwrap.dedent("""
        import os, signal, sys
        from checker import shared_checker  # without trl_gptoss, whose import takes seconds
        assert shared_checker.check(["3"], ["$6/2$"])[0].correct
        workers = [shared_checker._idle.get() for _ in range(shared_checker.workers)]
        for worker in workers:
            shared_checker._idle.put(worker)
        print(*(worker._process.pid for worker in workers if worker), flush=True)
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)""")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src/trl_gptoss/rewards")}
    run = subprocess.run([sys.executable, "-c", program, end], capture_output=True, text=True, env=environment)
    pids = run.stdout.split()
    assert pids, run.stderr
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("12*34", "408", 0.0),
        ("It is 12 * 34.", "408", 0.0),
        (r"The answer is $12\times 34$.", "408", 0.0),
        (r"\boxed{12 \cdot 34}", "408", 0.0),
        (r"\boxed{\frac{12 \cdot 34}{1}}", "408", 0.0),
        ("12 + 34", "46", 0.0),
        ("x = 12+34", "46", 0.0),
        ("34\u221212", "22", 0.0),
        ("12+34=46", "46", 1.0),  # the controls: worked out, or another way to write one number
        ("46 = 12+34", "46", 1.0),
        ("x=-22", "-22", 1.0),
        (r"$1.5 \times 10^{3}$", "1500", 1.0),
        (r"\boxed{2^{10}}", "1024", 1.0),
        (r"\boxed{\sqrt{324}}", "18", 1.0),
        ("$2n+2$", "$2n+2$", 1.0),
    ],
)
def test_a_calculation_that_repeats_the_question_is_no_answer(text, gold, right):
    assert math_reward([[{"role": "assistant", "content": text}]], answer=[gold]) == [right]
