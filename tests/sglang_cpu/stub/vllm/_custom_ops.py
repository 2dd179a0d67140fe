"""The one kernel of vLLM that SGLang wants on a CPU without AMX, in plain torch: position embeddings by rotation."""

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Turn `query` and `key`, (tokens, heads * head_size), in place: pairs are halves (neox) or neighbours.

    A row of `cos_sin_cache` is a position: cosines, then sines, one of each for every pair.
    """
    cos, sin = cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, dim=-1)
    pairs = cos.shape[-1]
    for tensor in (query, key):
        if tensor is None:
            continue
        turned = tensor.view(positions.numel(), -1, head_size)[..., : 2 * pairs]
        if is_neox:
            first, second = turned[..., :pairs], turned[..., pairs:]
        else:
            first, second = turned[..., 0::2], turned[..., 1::2]
        x, y = first * cos - second * sin, second * cos + first * sin
        first.copy_(x)
        second.copy_(y)
