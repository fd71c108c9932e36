"""Attention over ring and selected rows: the kernels against their reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attend_sparse import attend_sparse
from kernels.attend_sparse_shapes import scratch_values
from kernels.reference import attend_sparse as reference
from tests.support.row_cases import row_cases

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = [torch.bfloat16, torch.float32]
# heads, channels, turned channels, window, selected rows (None = a layer without)
SIZES = [(8, 64, 16, 64, 96), (4, 64, 16, 8, 8), (3, 96, 32, 40, 33), (8, 32, 32, 24, None)]
BLOCKS = (2, 32, 8, 130, 90)  # five blocks of 32 of the ring, three of selected rows
RELEASED = [(64, 512, 64, 128, 512), (64, 512, 64, 128, None)]


def made(
    sizes: tuple[int, int, int, int, int | None],
    n_tokens: int,
    first: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> dict[str, Any]:
    """Arguments of the operator; slots and rows that no query may see are not numbers."""
    heads, k, turned, window, n_selected = sizes
    generator = torch.Generator().manual_seed(heads * k + n_tokens + first)
    q = torch.randn(n_tokens, heads * k, generator=generator) * 1.5
    angles = torch.outer(
        torch.arange(first + n_tokens), torch.rand(turned // 2, generator=generator)
    )
    turns = torch.stack([angles.cos(), angles.sin()], -1)
    ring = torch.full((window + n_tokens - 1, k), torch.nan)
    seen = torch.arange(max(0, first - window + 1), first + n_tokens)
    ring[seen % len(ring)] = torch.randn(len(seen), k, generator=generator)
    rows = selection = None
    if n_selected is not None:
        n_rows = 2 * n_selected
        rows = torch.randn(n_rows + 1, k, generator=generator)
        rows[n_rows] = torch.nan
        picks = [torch.randperm(n_rows, generator=generator) for _ in range(n_tokens)]
        selection = torch.stack(picks)[:, :n_selected].sort(1).values.int()
        selection[:, n_selected // 3] = -1
    sink = torch.randn(heads, generator=generator)

    def there(tensor: Tensor | None, kind: torch.dtype | None = None) -> Tensor | None:
        return None if tensor is None else tensor.to(device=device, dtype=kind or tensor.dtype)

    return {
        "q": there(q), "first": torch.tensor([first], device=device), "turns": there(turns),
        "ring": there(ring, dtype), "window": window, "rows": there(rows, dtype),
        "selection": there(selection), "sink": there(sink), "dtype": dtype,
    }  # fmt: skip


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert not found.isnan().any()
    if dtype == torch.bfloat16:
        assert torch.equal(found, found.bfloat16().float())
    limit = 2e-3 if dtype == torch.bfloat16 else 1e-5
    apart = (found.cpu() - wanted).norm(dim=1)
    assert (apart <= limit * wanted.norm(dim=1)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("n_tokens", "first"), [(1, 0), (1, 131), (2, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_equal_the_reference(
    device: str, sizes: Any, n_tokens: int, first: int, dtype: torch.dtype
) -> None:
    check(device, sizes, n_tokens, first, dtype)


@pytest.mark.parametrize(("device", "n_tokens"), row_cases())
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_any_number_of_rows_equal_the_reference(
    device: str, n_tokens: int, dtype: torch.dtype
) -> None:
    check(device, (3, 32, 16, 12, 9), n_tokens, 25, dtype)


def check(device: str, sizes: Any, n_tokens: int, first: int, dtype: torch.dtype) -> None:
    wanted = reference.attend_sparse(**made(sizes, n_tokens, first, dtype))
    given = made(sizes, n_tokens, first, dtype, device)
    out = torch.full_like(given["q"], torch.nan)
    found = attend_sparse(**given, out=out)
    assert found.data_ptr() == out.data_ptr()
    assert_near(found, wanted, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*SIZES, *RELEASED])
@pytest.mark.parametrize("n_tokens", [1, 2, 8, 9, 33])
@pytest.mark.parametrize("first", [0, 700])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 8])
def test_values_equal_the_reference_at_all_sizes(
    sizes: Any, n_tokens: int, first: int, dtype: torch.dtype, splits: int
) -> None:
    wanted = reference.attend_sparse(**made(sizes, n_tokens, first, dtype))
    given = made(sizes, n_tokens, first, dtype, "cuda")
    for plain in (False, True):
        found = attend_sparse(**given, splits=splits, plain=plain)
        assert_near(found, wanted, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_splits_gives_the_same_bytes(device: str, dtype: torch.dtype) -> None:
    sizes = BLOCKS if device == "cpu" else RELEASED[0]
    given = made(sizes, 1, 270, dtype, device)
    heads, k, _, window, n_selected = sizes
    scratch = torch.full((scratch_values(1, heads, k, window, n_selected or 0),), torch.nan)
    wanted = attend_sparse(**given, splits=1)
    for splits in range(2, 9 if device == "cpu" else 17):
        found = attend_sparse(**given, splits=splits, scratch=scratch.to(device))
        assert torch.equal(found, wanted), splits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
def test_padding_with_absent_rows_gives_the_same_bytes(
    device: str, dtype: torch.dtype, splits: int
) -> None:
    given = made((4, 64, 16, 8, 33), 2, 9, dtype, device)
    short = given["selection"][:, :21].contiguous()
    wanted = attend_sparse(**{**given, "selection": short}, splits=splits)
    for n_selected in (22, 64, 130):
        padded = torch.full((2, n_selected), -1, dtype=torch.int32, device=device)
        padded[:, :21] = short
        found = attend_sparse(**{**given, "selection": padded}, splits=splits)
        assert torch.equal(found, wanted), n_selected
    absent = torch.full((2, 64), -1, dtype=torch.int32, device=device)
    alone = attend_sparse(**{**given, "rows": None, "selection": None}, splits=splits)
    assert torch.equal(attend_sparse(**{**given, "selection": absent}, splits=splits), alone)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bytes_alone_and_among_others(device: str, dtype: torch.dtype) -> None:
    sizes, n_tokens = (SIZES[1], 4) if device == "cpu" else (RELEASED[0], 33)
    window, first = sizes[3], 100
    given = made(sizes, n_tokens, first, dtype, device)
    together = attend_sparse(**given)
    for row in range(n_tokens):
        seen = torch.arange(first + row - window + 1, first + row + 1, device=device)
        ring = torch.empty_like(given["ring"][:window])
        ring[seen % window] = given["ring"][seen % len(given["ring"])]
        part = slice(row, row + 1)
        alone: dict[str, Any] = {
            **given, "q": given["q"][part], "selection": given["selection"][part],
            "first": given["first"] + row, "ring": ring,
        }  # fmt: skip
        for splits in (1, 8):
            assert torch.equal(attend_sparse(**alone, splits=splits)[0], together[row])


@pytest.mark.parametrize("device", DEVICES)
def test_extreme_scores_and_sinks_stay_finite(device: str) -> None:
    given = made(SIZES[1], 1, 20, torch.float32, device)
    given["q"] *= 300.0
    given["sink"].copy_(torch.tensor([-torch.inf, 90.0, -300.0, 5000.0], device=device))
    found = attend_sparse(**given, splits=2)
    host: dict[str, Any] = {
        name: v.cpu() if isinstance(v, Tensor) else v for name, v in given.items()
    }
    assert found.isfinite().all()
    wanted = reference.attend_sparse(**host)
    assert (found.cpu() - wanted).norm() <= 1e-4 * wanted.norm()  # scores of 1000 in f32


@pytest.mark.parametrize("device", DEVICES)
def test_scratch_that_is_too_small_is_refused(device: str) -> None:
    given = made(SIZES[1], 1, 5, torch.float32, device)
    with pytest.raises(ValueError, match="scratch is"):
        attend_sparse(**given, splits=2, scratch=torch.zeros(9, device=device))


@pytest.mark.gpu
def test_a_number_that_is_none_is_not_hidden() -> None:
    given = made(RELEASED[0], 1, 300, torch.bfloat16, "cuda")
    given["q"][0, 512 * 7 + 3] = torch.nan
    for splits in (1, 8):
        found = attend_sparse(**given, splits=splits).view(64, 512).isnan()
        assert found[7].all()
        assert not found[8].any()


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 10])
def test_a_replayed_graph_gives_the_same_bytes(splits: int) -> None:
    given = made(RELEASED[0], 1, 900, torch.bfloat16, "cuda")
    out = torch.empty_like(given["q"])
    attend_sparse(**given, splits=splits, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_sparse(**given, splits=splits, out=out)
    for position in (0, 63, 64, 900):
        given["first"].fill_(position)
        given["ring"].normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, attend_sparse(**given, splits=splits))


def test_without_a_kernel_the_reference_runs() -> None:
    given = made(SIZES[2], 2, 5, torch.bfloat16)
    assert_near(attend_sparse(**given), reference.attend_sparse(**given), torch.bfloat16)


def test_what_does_not_fit_is_refused() -> None:
    given = made(SIZES[0], 2, 5, torch.float32)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"q": torch.zeros(2, 8)}, "q is"),
        ({"ring": torch.zeros(64, 64)}, "ring of"),
        ({"ring": torch.zeros(65, 64, dtype=torch.bfloat16)}, "the ring is"),
        ({"rows": None}, "together"),
        ({"rows": torch.zeros(4, 32)}, "rows are"),
        ({"selection": torch.zeros(2, 4, dtype=torch.int64)}, "selection is"),
        ({"first": torch.zeros(1)}, "first"),
        ({"turns": torch.zeros(9, 40, 2)}, "turns"),
        ({"sink": given["sink"].double()}, "sink"),
        ({"out": torch.zeros(1)}, "out is"),
        ({"splits": 17}, "splits"),
    ]
    for change, word in changes:
        with pytest.raises(ValueError, match=word):
            attend_sparse(**{**given, **change})
