"""The codes of NormalFloat4 (Dettmers et al. 2023, QLoRA): a weight in 4.5 bits a number, and back.

A weight is cut into blocks of 64 numbers. Each block has a scale in float32, its largest absolute
value, and for each number the nearest of 16 values, which are dense where normally distributed
weights are (arXiv 2305.14314, section 3 and appendix E; without its double quantization). Both ways
round each number once, so every machine gets the same bits, and a weight that was decoded is
encoded to the same bits again (but where all numbers of a block are below 1e-36).

torchao 0.18 has an ``NF4Tensor``, and it does not fit: it has no memory of its own that could be
mapped, sent or saved, ``torch.func`` refuses it, its weights must be multiples of 16,384 numbers,
and it took 0.09 s to decode 2^20 of them where this file takes 0.001.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

# Appendix E of the paper.
CODEBOOK = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BLOCK = 64
STORED = torch.int32
CODE_WORDS = BLOCK // 8  # int32 for the codes of a block; its scale takes one more
# At a time: below what torch divides among threads, which would wait for each other after each
# operation. With two of them on a busy machine 2^12 blocks took 40 to 50 times as long; with one
# on a quiet machine 0.84 of the time. 2^8 blocks take 1.1 to 1.2 times as long to decode as 480.
CHUNK_BLOCKS = 480


def num_words(num_elements: int) -> int:
    """Return the int32 that a weight of so many numbers takes."""
    return -(-num_elements // BLOCK) * (CODE_WORDS + 1)


def encoded(weight: Tensor) -> Tensor:
    """Return the codes and scales of a weight, 9 int32 for each 64 numbers.

    The last block is filled up with zeros. A block of zeros has the scale 0.
    """
    flat = weight.detach().reshape(-1)
    found = torch.empty(num_words(flat.numel()), dtype=STORED)
    num_blocks = len(found) // (CODE_WORDS + 1)
    codes, scales = _parts(found)
    codes = codes.view(-1, BLOCK // 2)
    values = torch.tensor(CODEBOOK, dtype=torch.float32)
    borders = ((values[1:] + values[:-1]) / 2).tolist()
    for begin in range(0, num_blocks, CHUNK_BLOCKS):
        end = min(begin + CHUNK_BLOCKS, num_blocks)
        part = flat[begin * BLOCK : end * BLOCK].float()
        blocks = functional.pad(part, (0, (end - begin) * BLOCK - len(part))).view(-1, BLOCK)
        scale = blocks.abs().amax(1)
        scales[begin:end] = scale
        shares = blocks / torch.where(scale > 0, scale, 1.0)[:, None]
        at = torch.zeros(shares.shape, dtype=torch.uint8)
        for border in borders:  # a tenth of the time of torch.bucketize
            at += shares > border
        codes[begin:end] = at[:, 0::2] | (at[:, 1::2] << 4)
    return found


def num_decoded(shape: tuple[int, int]) -> int:
    """Return how many numbers a weight's blocks hold: the last one is filled up."""
    return -(-shape[0] * shape[1] // BLOCK) * BLOCK


def decoded(
    memory: Tensor,
    shape: tuple[int, int],
    rows: slice = slice(None),
    *,
    room: Tensor | None = None,
) -> Tensor:
    """Return the rows of a weight in float32; the inverse of ``encoded`` but for its rounding.

    They are in the memory of ``room`` if one of ``num_decoded`` values is given.
    """
    start, stop, _ = rows.indices(shape[0])
    start, stop = start * shape[1], max(stop, start) * shape[1]
    first, last = start // BLOCK, -(-stop // BLOCK)
    codes, scales = _parts(memory)
    number = (last - first) * BLOCK
    found = torch.empty(number, dtype=torch.float32) if room is None else room[:number]
    columns = (
        torch.split(codes[first * BLOCK // 2 : last * BLOCK // 2], CHUNK_BLOCKS * BLOCK // 2),
        # An element is two numbers.
        torch.split(found.view(torch.float64), CHUNK_BLOCKS * BLOCK // 2),
        torch.split(found.view(-1, BLOCK), CHUNK_BLOCKS),
        torch.split(scales[first:last, None], CHUNK_BLOCKS),
    )
    wide = torch.empty(CHUNK_BLOCKS * BLOCK // 2, dtype=torch.int32)
    for own_codes, pairs, blocks, own_scales in zip(*columns, strict=True):
        keys = wide[: len(own_codes)].copy_(own_codes)
        torch.index_select(_pairs(), 0, keys, out=pairs)
        blocks.mul_(own_scales)
    start, stop = start - first * BLOCK, stop - first * BLOCK
    return found[start:stop].view(-1, shape[1])


def _parts(memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the codes, two in a byte, and of the scales."""
    end = len(memory) // (CODE_WORDS + 1) * CODE_WORDS
    return memory[:end].view(torch.uint8), memory[end:].view(torch.float32)


@cache
def _pairs() -> Tensor:
    """Return the two numbers of each byte of codes, so that one look-up finds both.

    A table of four numbers for each 16 bits took 1.5 times the time: it fills the cache.
    """
    values = torch.tensor(CODEBOOK, dtype=torch.float32)
    keys = torch.arange(256)[:, None] >> torch.tensor([0, 4])
    return values[keys & 15].view(torch.float64).view(-1)
