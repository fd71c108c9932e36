"""What the header reader believes of a block is what its kernel reads, and what ggml says."""

import gguf

from kernels.formats import FORMATS, QUANTISERS
from protocol.files.block_sizes import BLOCK_TYPE_OF_NAME, BLOCK_TYPES, READABLE_TYPES


def test_block_sizes_are_those_of_the_kernels():
    for name, kind in FORMATS.items():
        block = BLOCK_TYPE_OF_NAME[name]
        assert (block.name, block.n_values, block.n_bytes) == (
            kind.NAME,
            kind.BLOCK_VALUES,
            kind.BLOCK_BYTES,
        )


def test_types_that_may_be_read_are_those_with_a_kernel():
    assert set(FORMATS) == READABLE_TYPES
    assert set(QUANTISERS) <= READABLE_TYPES


def test_block_sizes_are_those_of_the_gguf_package():
    theirs = {
        (int(kind), kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGML_QUANT_SIZES
    }
    # The package counts 8 bytes of a Q8_1 block's two float16 fields, where ggml has 4.
    ours = {tuple(block) for block in BLOCK_TYPES if block.name != "Q8_1"}
    assert ours <= theirs
    assert len({block.type_id for block in BLOCK_TYPES}) == len(BLOCK_TYPES)
