"""Every block format is read bit for bit as the public `gguf` package reads it."""

import gguf
import numpy as np
import pytest
import torch

from kernels.formats import FORMATS

BLOCK_NAMES = [name for name in FORMATS if name not in ("F32", "F16", "BF16")]
# Where each format keeps its float16 fields.
F16_FIELDS = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "Q8_0": (0,), "IQ2_XXS": (0,), "MXFP4": (),
}  # fmt: skip


def random_blocks(name: str, n_rows: int, n_blocks: int, seed: int) -> np.ndarray:
    """Rows of random bytes whose float16 fields and scale bytes are numbers, subnormal or not."""
    generator = np.random.default_rng(seed)
    size = FORMATS[name].BLOCK_BYTES
    blocks = generator.integers(0, 256, (n_rows, n_blocks, size), dtype=np.uint8)
    for field in F16_FIELDS[name]:
        exponent = blocks[..., field + 1] & 0x7C
        blocks[..., field + 1] -= np.where(exponent == 0x7C, 4, 0).astype(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = generator.integers(0, 255, blocks.shape[:-1], dtype=np.uint8)
    return blocks.reshape(n_rows, n_blocks * size)


def reference(name: str, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # 6 * 2^127 is infinite
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])


def same_bits(ours: torch.Tensor, theirs: np.ndarray) -> None:
    assert ours.dtype == torch.float32
    assert tuple(ours.shape) == theirs.shape
    assert np.array_equal(ours.numpy().view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", BLOCK_NAMES)
def test_dequantise_has_the_bits_of_the_gguf_package(name):
    blocks = random_blocks(name, 64, 9, seed=1)
    same_bits(FORMATS[name].dequantise(torch.from_numpy(blocks)), reference(name, blocks))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_keep_their_bits_through_dequantise(name):
    pattern = np.arange(1 << 16, dtype=np.uint16)
    if name == "F32":
        stored = (pattern.astype(np.uint32) << 16 | 0x1234).view(np.uint8)
    else:
        stored = pattern.view(np.uint8)
    ours = FORMATS[name].dequantise(torch.from_numpy(stored.copy()))
    theirs = reference(name, stored)
    number = ~np.isnan(theirs)
    assert np.array_equal(ours.isnan().numpy(), ~number)
    assert np.array_equal(
        ours.numpy().view(np.uint32)[number], theirs.reshape(-1).view(np.uint32)[number]
    )


@pytest.mark.parametrize("name", list(FORMATS))
def test_sizes_are_those_of_the_gguf_package(name):
    kind = FORMATS[name]
    sizes = (kind.NAME, kind.BLOCK_VALUES, kind.BLOCK_BYTES)
    assert sizes == (name, *gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]])


@pytest.mark.parametrize("name", list(FORMATS))
def test_leading_dimensions_and_empty_rows_are_kept(name):
    kind = FORMATS[name]
    blocks = torch.zeros(2, 3, 4 * kind.BLOCK_BYTES, dtype=torch.uint8)
    assert kind.dequantise(blocks).shape == (2, 3, 4 * kind.BLOCK_VALUES)
    assert kind.dequantise(blocks[:, :0]).shape == (2, 0, 4 * kind.BLOCK_VALUES)
    assert kind.dequantise(blocks[..., :0]).shape == (2, 3, 0)


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_part_of_a_larger_tensor_is_read_as_a_copy_would_be(name):
    kind = FORMATS[name]
    if name in F16_FIELDS:
        blocks = torch.from_numpy(random_blocks(name, 5, 3, seed=2))
    else:
        blocks = torch.arange(15 * kind.BLOCK_BYTES, dtype=torch.uint8).view(5, -1)
    wide = torch.zeros(5, blocks.shape[1] + 7, dtype=torch.uint8)
    part = wide[:, 3 : 3 + blocks.shape[1]]
    part.copy_(blocks)
    assert torch.equal(kind.dequantise(part), kind.dequantise(blocks))


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_row_that_is_no_whole_number_of_blocks_is_refused(name):
    kind = FORMATS[name]
    with pytest.raises(ValueError, match="uint8"):
        kind.dequantise(torch.zeros(kind.BLOCK_BYTES))
    if kind.BLOCK_BYTES > 1:
        with pytest.raises(ValueError, match=f"multiple of {kind.BLOCK_BYTES}"):
            kind.dequantise(torch.zeros(kind.BLOCK_BYTES + 1, dtype=torch.uint8))
