"""torch's varlen_attn by its documentation, on any device: flash attention itself runs on CUDA alone."""

from itertools import pairwise

import torch


def flash_as_documented(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
    *, scale, window_size, enable_gqa, seqused_k=None, num_splits=None,
):  # fmt: skip
    """The last query of a sequence is aligned with its last key; of its keys only ``seqused_k`` are used."""
    starts, ends = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert all(cu.dtype == torch.int32 and cu.device == query.device for cu in (cu_seq_q, cu_seq_k))
    assert len(starts) == len(ends) and starts == sorted(starts) and ends == sorted(ends)
    assert starts[-1] <= len(query) and ends[-1] <= len(key) and num_splits in (None, 1)
    used = [stop - start for start, stop in pairwise(ends)] if seqused_k is None else seqused_k.tolist()
    out = []
    for n, count in enumerate(used):
        q = query[starts[n] : starts[n + 1]]
        assert count <= ends[n + 1] - ends[n]
        k, v = (x[ends[n] : ends[n] + count] for x in (key, value))
        assert len(q) <= max_q and len(k) <= max_k and enable_gqa == (q.shape[1] != k.shape[1])
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        left, right = window_size
        seen = ((distance >= -right) & ((distance <= left) | (left < 0))).to(query.device)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    rest = query.new_full((len(query) - starts[-1], query.shape[1], value.shape[2]), torch.nan)  # of no sequence
    return torch.cat([*out, rest])
