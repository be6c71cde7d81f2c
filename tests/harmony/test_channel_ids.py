from scripted_backend import HarmonyWriter
from tiny_policy import byte_tokenizer

from trl_gptoss.harmony.channel_ids import CHANNEL_NAMES, NO_CHANNEL, channel_ids

TOKENIZER = byte_tokenizer()
WRITE = HarmonyWriter(TOKENIZER)


def names(ids, mask):
    return ["" if c == NO_CHANNEL else CHANNEL_NAMES[c] for c in channel_ids(ids, mask, TOKENIZER)]


def test_each_token_belongs_to_the_channel_of_its_message():
    v = WRITE.vocabulary
    thought = WRITE.message("analysis", "hm", v.end)
    call = [v.start, *WRITE.text("assistant"), *WRITE.call("add", a=1)]
    observation = [*WRITE.text("a final result"), v.start, *WRITE.text("assistant")]
    answer = WRITE.final("4")
    ids = thought + call + observation + answer
    mask = [1] * len(thought + call) + [0] * len(observation) + [1] * len(answer)
    assert names(ids, mask) == (
        ["analysis"] * len(thought) + ["commentary"] * len(call) + [""] * len(observation) + ["final"] * len(answer)
    )


def test_what_names_no_channel_has_none_and_nothing_raises():
    v = WRITE.vocabulary
    assert names([], []) == []
    assert names([5, 6], [0, 0]) == ["", ""]
    broken = [v.channel, *WRITE.text("diary"), v.message, *WRITE.text("x"), v.end]
    assert set(names(broken, [1] * len(broken))) <= {"", *CHANNEL_NAMES}
    cut = WRITE.message("final", "abc", v.end)[:-2]  # truncated inside its body
    assert names(cut, [1] * len(cut)) == ["final"] * len(cut)
