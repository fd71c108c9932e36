"""Block sizes of the official checkpoint; a test holds those of `kernels/formats/` equal.

Source: model specification, sections 2.2 and 6.
"""

from __future__ import annotations

TILE = 32  # edge of an fp8 scale tile; values per scale of fp4 rows, Engram rows and activations
LATENT_GROUP = 16  # values per scale of a compressed row
FP4_PER_BYTE = 2  # low nibble first
