import time

import pytest

from trl_gptoss.rewards.answers import compare_plain, gold_answer, last_boxed, stated_answer


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"),
        ("#### 1,234", "1,234"),
        ("#### $70", "70"),
        ("18", "18"),
        (" 27.0 ", "27.0"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"$\frac{1}{2}$", r"\frac{1}{2}"),
        (r"\(x^2\)", "x^2"),
        (r"so \boxed{1.6} \mathrm{~cm}, not \boxed{3", "1.6"),
        (r"$69$,$84$", "69$,$84"),
        ("", ""),
    ],
)
def test_gold_answer(gold, answer):
    assert gold_answer(gold) == answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} and \boxed{x{y}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"}}\fbox {4}", "4"),
        (r"\boxed 5", None),
        (r"\boxed{5", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("The answer is 5. No: the answer is 18 dollars.\nBye 7", ("phrase", "18 dollars.")),
        ("**Answer:** 18", ("phrase", "18")),
        ("The final answer is:\n\n18", ("phrase", "18")),
        (r"The answer is 5, \boxed{18}", ("boxed", "18")),
        ("18 it is", ("text", "18 it is")),
    ],
)
def test_stated_answer(text, stated):
    assert stated_answer(text) == stated


@pytest.mark.parametrize(
    ("gold", "text", "verdict"),
    [
        ("18", "The answer is 18.", True),
        ("18", "18", True),
        ("18", "The answer is 19.", False),
        ("18", "The answer is 180.", False),
        ("18", "The answer is -18.", False),
        ("18", "She earns $18 every day.", True),
        ("1,234", "1234", True),
        ("1234", "The answer is 1,234 eggs.", True),
        ("0.5", "0.50", True),
        ("18", "I do not know", False),
        ("18", "", False),
        # left to math-verify
        ("18", "18 or 19", None),
        ("18", r"The answer is \frac{36}{2}", None),
        ("18", "x = 18", None),
        ("18", "18%", None),
        ("18", "18 million", None),
        ("18", "18 x", None),
        ("18", "(18)", None),
        ("18", "18!", None),
        ("18", "1e18", None),
        ("18", "12,34", None),
        ("18", "18.00000001", None),
        (r"\frac12", "0.5", None),
    ],
)
def test_compare_plain(gold, text, verdict):
    assert compare_plain(gold, text) is verdict


@pytest.mark.parametrize(
    "text",
    [r"\boxed{" * 150_000, r"\boxed" * 150_000, "}" * 10**6, "answer " * 150_000, "answer is " * 100_000, "1 " * 500_000,
     "9" * 10**6, "a " * 500_000, ",;' " * 250_000 + "1", "$" * 10**6, "answer" + " " * 10**6 + "is", "\\" * 10**6],
    ids=lambda text: text[:8],
)  # fmt: skip
def test_linear_in_a_megabyte(text):
    start = time.process_time()
    compare_plain("18", text)
    gold_answer(text)
    assert time.process_time() - start < 1.0
