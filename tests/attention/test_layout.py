"""Row ranges and cumulative lengths, token by token."""

import pytest
import torch

from trl_gptoss.attention import varlen
from trl_gptoss.attention.mask import row_ranges, sink_mask


def bools(*rows):
    return torch.tensor([[c == "1" for c in row] for row in rows])


def ranges(*rows):
    return torch.tensor(rows, dtype=torch.int32).view(-1, 1, 1, 4)


CASES = {
    # name: (mask rows, queries, written keys, ranges)
    "left": (["00111", "11111"], 5, 5, [(2, 5, 2, 5), (0, 5, 0, 5)]),
    "right": (["11100", "11111"], 5, 5, [(0, 3, 0, 3), (0, 5, 0, 5)]),
    "both sides": (["01110"], 5, 5, [(1, 4, 1, 4)]),
    "nothing": (["000"], 3, 3, [(0, 0, 0, 0)]),
    "one step later": (["001111"], 1, 6, [(0, 1, 2, 6)]),
    "padding enters a chunk": (["000011"], 3, 6, [(1, 3, 4, 6)]),
    "a chunk of padding": (["00001111"[:4], "1111"], 2, 4, [(0, 0, 0, 0), (0, 2, 0, 4)]),
    "right-padded prompt, later chunk": (["110000"], 2, 6, [(0, 0, 0, 2)]),
    "mask beyond what is written": (["0111111111"], 1, 4, [(0, 1, 1, 4)]),
    "no mask": (None, 2, 6, [(0, 2, 0, 6)]),
}


@pytest.mark.parametrize("case", CASES)
def test_row_ranges(case):
    rows, queries, written, expected = CASES[case]
    mask = None if rows is None else bools(*rows)
    for number in (written, torch.tensor(written)):  # static caches count in a tensor
        assert torch.equal(row_ranges(mask, len(expected), queries, number, torch.device("cpu")), ranges(*expected))


def test_mask_is_none_without_padding():
    assert sink_mask(2, 5, 5) is None
    assert sink_mask(2, 5, 5, attention_mask=bools("11111", "11111")) is None
    assert sink_mask(1, 1, 128, q_offset=500, kv_offset=373) is None  # a sliding cache that is full


def test_static_buffer_has_an_end():
    assert torch.equal(sink_mask(2, 3, 16), ranges((0, 3, 0, 3), (0, 3, 0, 3)))
    assert torch.equal(sink_mask(1, 1, 16, q_offset=torch.tensor(7)), ranges((0, 1, 0, 8)))
    assert torch.equal(sink_mask(1, 1, 16, q_offset=7, attention_mask=bools("00111111")), ranges((0, 1, 2, 8)))


def test_sliding_cache_cuts_the_mask():
    # window 4: the buffer holds the last 3 keys and the new one; the row's padding has left it, the other's has not
    mask = bools("0000011111", "0000000011")
    assert torch.equal(
        sink_mask(2, 1, 4, q_offset=9, kv_offset=6, attention_mask=mask), ranges((0, 1, 0, 4), (0, 1, 2, 4))
    )


def test_mask_refuses():
    with pytest.raises(ValueError, match="mask function of its own"):
        sink_mask(1, 3, 3, use_vmap=True)
    with pytest.raises(ValueError, match="row 1 masks tokens between"):
        sink_mask(2, 4, 4, attention_mask=bools("0111", "1011"))
    with pytest.raises(ValueError, match="covers 3 tokens but 5 are attended"):
        sink_mask(1, 3, 5, q_offset=2, attention_mask=bools("111"))


def sequences(lengths):
    """(query tokens, key tokens) of every sequence that has queries or keys."""
    q, k = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
    pairs = [(list(range(a, b)), list(range(c, d))) for a, b, c, d in zip(q, q[1:], k, k[1:])]
    return [pair for pair in pairs if pair != ([], [])]


def test_padding_becomes_sequences_of_its_own():
    lengths = varlen.from_ranges(row_ranges(bools("0111", "1110"), 2, 4, 4, torch.device("cpu")), 4, 4)
    assert lengths.cu_seqlens_q.tolist() == [0, 1, 1, 4, 4, 4, 7, 8, 8]
    assert lengths.cu_seqlens_k.tolist() == [0, 0, 1, 4, 4, 4, 7, 7, 8]
    assert sequences(lengths) == [
        ([0], []),
        ([], [0]),
        ([1, 2, 3], [1, 2, 3]),
        ([4, 5, 6], [4, 5, 6]),
        ([7], []),
        ([], [7]),
    ]
    assert lengths.cu_seqlens_q.dtype == torch.int32


def test_static_buffer_as_sequences():
    lengths = varlen.from_ranges(ranges((0, 1, 2, 5), (0, 1, 0, 5)), 1, 8)
    assert sequences(lengths) == [
        ([], [0, 1]),
        ([0], [2, 3, 4]),
        ([], [5, 6, 7]),
        ([1], [8, 9, 10, 11, 12]),
        ([], [13, 14, 15]),
    ]
    assert (lengths.max_seqlen_q, lengths.max_seqlen_k) == (1, 8)


def test_padding_that_attends_to_itself():
    lengths = varlen.from_ranges(row_ranges(bools("0111", "1110"), 2, 4, 4, torch.device("cpu")), 4, 4, True)
    assert lengths.cu_seqlens_q is lengths.cu_seqlens_k
    assert sequences(lengths) == [([0], [0]), ([1, 2, 3], [1, 2, 3]), ([4, 5, 6], [4, 5, 6]), ([7], [7])]


@pytest.mark.parametrize("positions", [[[0, 1, 2, 0, 1, 0, 1, 2, 3]], [[5, 6, 7, 0, 1, 0, 0, 1, 2]]])
def test_restarting_positions(positions):
    positions = torch.tensor(positions)
    eager = varlen.from_positions(positions, 1)
    expected = [0, 3, 5, 9] if positions[0, 0] == 0 else [0, 3, 5, 6, 9]
    assert eager.cu_seqlens_q.tolist() == expected and not eager.trim
    assert eager.max_seqlen_q == max(b - a for a, b in zip(expected, expected[1:]))


def test_positions_of_rows_never_join():
    rows = torch.arange(4)[None]
    assert varlen.from_positions(rows, 3).cu_seqlens_q.tolist() == [0, 4, 8, 12]


def test_a_graph_finds_the_same_sequences():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]])
    captured = torch.compile(lambda p: varlen.from_positions(p, 1).cu_seqlens_q, fullgraph=True, backend="eager")(
        positions
    )
    assert captured.shape == (10,)
    cut = varlen.trimmed(captured, captured)
    assert cut.cu_seqlens_q.tolist() == [0, 3, 5, 9] and cut.max_seqlen_q == 4


def test_memo_notices_writes_in_place():
    positions = torch.tensor([[0, 1, 2, 3]])
    assert varlen.from_positions(positions, 1).cu_seqlens_q.tolist() == [0, 4]
    positions[0, 2:] = torch.tensor([0, 1])
    assert varlen.from_positions(positions, 1).cu_seqlens_q.tolist() == [0, 2, 4]


def test_memo_forgets():
    memo, calls = varlen.TensorMemo(size=2), []
    tensors = [torch.zeros(2) for _ in range(3)]
    for tensor in (*tensors, tensors[2], tensors[0]):
        memo.get((tensor,), (), lambda: calls.append(1))
    assert len(calls) == 4 and len(memo.entries) == 2


def test_memo_leaves_inference_tensors_alone():
    with torch.inference_mode():
        positions = torch.tensor([[0, 1, 0, 1]])
        assert varlen.from_positions(positions, 1).cu_seqlens_q.tolist() == [0, 2, 4]
        positions.copy_(torch.arange(4))  # leaves no trace in a version counter
        assert varlen.from_positions(positions, 1).cu_seqlens_q.tolist() == [0, 4]


def test_different_lengths_for_the_same_tokens_are_noticed():
    with pytest.raises(RuntimeError, match="differ"):
        varlen.from_lengths(torch.tensor([0, 3, 6]), torch.tensor([0, 2, 6]), 3, 4, 6, 6, torch.device("cpu"), True)
