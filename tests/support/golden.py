"""Compare the model with a folder of golden data: `python tests/support/golden.py DIR [--local]`.

DIR has the shape of `v41-tiny`: a checkpoint, tokens.safetensors and golden files. The experts and
Engram rows come from a real expert daemon; with --local they are read from the files. For each
golden file the largest differences are printed, and whether the integers are equal.

Exit status 0 only if
* unrounded against golden_noround: equal integers, logits within 1e-3; prefill of some lengths and
  then decode, and chunks, within 1e-5 of the full pass;
* wide against golden_round: equal Engram rows, logits within 1e-3, or a first jump that is a
  rounding tie: see golden_ties.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from compute.frontend.token_map import load_token_map  # noqa: E402
from compute.model.model import Model  # noqa: E402
from compute.model.precision import Precision  # noqa: E402
from compute.model.record import Record  # noqa: E402
from compute.model.sequence import Sequence  # noqa: E402
from compute.model.weights import load_weights  # noqa: E402
from protocol.errors import HeadraceError  # noqa: E402
from protocol.files.checkpoint import open_checkpoint  # noqa: E402
from tests.support.golden_files import (  # noqa: E402
    ORACLES,
    PRECISION_OF,
    Golden,
    golden_names,
    read_golden,
)
from tests.support.golden_sources import Sources, open_sources  # noqa: E402
from tests.support.golden_ties import TOLERANCE, TieSearch  # noqa: E402
from tests.support.near_ties import NearTies  # noqa: E402

PREFILLS = (1, 2, 7, 8, 9, 20, 41)
CHUNKS = (5, 8, 13)
CHUNK_TOLERANCE = 1e-5
CPU = torch.device("cpu")


class Comparison:
    """One folder against the model, file by file."""

    def __init__(self, directory: Path, sources: Sources) -> None:
        checkpoint = open_checkpoint(directory)
        self.directory = directory
        self.sources = sources
        self.config = checkpoint.config
        self.weights = load_weights(checkpoint, CPU)
        self.token_map = load_token_map(directory, self.config)

    def model(self, precision: Precision, ties: NearTies | None = None) -> Model:
        """Return the folder's model."""
        numerics = ties.numerics() if ties else None
        return Model(self.config, self.weights, self.token_map, precision, CPU, numerics=numerics)

    def forward(
        self, model: Model, sequence: Sequence, ids: list[int], record: Record | None = None
    ) -> Tensor:
        """Return the logits of every position of one pass."""
        with self.sources.step() as source:
            return model.forward(sequence, ids, source, source, logits="all", record=record)

    def check(self, name: str) -> bool:
        """Print one golden file's comparison; whether it is as it should be."""
        golden = read_golden(self.directory, name, self.config.n_layers)
        model = self.model(Precision(PRECISION_OF[name]))
        record = Record(full=True)
        logits = self.forward(model, model.new_sequence(len(golden.ids)), golden.ids, record)
        differences = (logits - golden.logits).abs().amax(1).nan_to_num(nan=float("inf"))
        equal = self._print(golden, record, differences)
        if name not in ORACLES:
            print("  informative only")
            return True
        if PRECISION_OF[name] == "unrounded":
            within = float(differences.max()) <= TOLERANCE
            return within and all(equal.values()) and self._check_chunks(model, golden, logits)
        beyond = (differences > TOLERANCE).nonzero().flatten().tolist()
        return equal["Engram rows"] and (not beyond or self._explain(golden, beyond[0]))

    def _print(self, golden: Golden, record: Record, differences: Tensor) -> dict[str, bool]:
        """Print the differences; return which kinds of integers are equal."""
        figures = {
            "logits": float(differences.max()),
            "streams": float((torch.stack(record.streams).float() - golden.streams).abs().max()),
        }
        equal = {}
        if len(golden.pre):
            figures["pre-mix"] = float((torch.stack(record.pre) - golden.pre).abs().max())
            pairs = [(record.weights[layer], w) for layer, w in golden.weights.items()]
            figures["router weights"] = max(float((a - b).abs().max()) for a, b in pairs)
            rows = [torch.from_numpy(rows) for rows in record.engram_rows]
            equal["Engram rows"] = not rows or torch.equal(torch.stack(rows, 1), golden.engram_rows)
            equal["router picks"] = all(
                torch.equal(record.picks[layer], picks) for layer, picks in golden.picks.items()
            )
            equal["selections"] = all(
                torch.equal(record.selections[layer], rows)
                for layer, rows in golden.selections.items()
            )
        print(f"{golden.name} ({PRECISION_OF[golden.name]}, {len(golden.ids)} positions)")
        print("  largest differences: " + ", ".join(f"{k} {v:.2g}" for k, v in figures.items()))
        for what, same in equal.items():
            print(f"  {what}: {'equal' if same else 'DIFFERENT'}")
        return equal

    def _check_chunks(self, model: Model, golden: Golden, full: Tensor) -> bool:
        """Compare prefill with decode, and chunks, with the full pass."""
        n = len(golden.ids)
        cuts = {f"prefill {p}": [p] + [1] * (n - p) for p in PREFILLS if p < n}
        cuts |= {f"chunks of {c}": [c] * (n // c) + [n % c] * (n % c > 0) for c in CHUNKS}
        largest = 0.0
        for name, sizes in cuts.items():
            sequence, first, logits = model.new_sequence(n), 0, []
            for size in sizes:
                logits.append(self.forward(model, sequence, golden.ids[first : first + size]))
                first += size
            difference = float((torch.cat(logits) - full).abs().max())
            largest = max(largest, difference)
            if not difference <= CHUNK_TOLERANCE:
                print(f"  {name}: differs from the full pass by {difference:.2g}")
        print(f"  prefill and chunks against the full pass: {largest:.2g}")
        return largest <= CHUNK_TOLERANCE

    def _explain(self, golden: Golden, position: int) -> bool:
        """Say whether the jump at `position` is a rounding tie."""
        print(f"  first jump at position {position}; modules with golden inputs:")
        ties = NearTies()
        search = TieSearch(self.model(Precision.WIDE, ties), ties, golden, self.sources)
        found = search.explain(position)
        for line in found.ties:
            print(f"    rounding tie: {line}")
        for line in found.wrong:
            print(f"    WRONG: {line}")
        if not found.wrong and not found.ties:
            print("    no tie and no wrong module: the jump is not explained")
        print(f"    largest difference of a module: {found.largest:.2g}")
        return bool(found.ties) and not found.wrong


def compare(directory: Path, *, local: bool) -> bool:
    """Print every golden file's comparison; whether all oracles agree."""
    names = golden_names(directory)
    if not set(names) & set(ORACLES):
        print(f"{directory}: has none of {', '.join(ORACLES)}")
        return False
    with open_sources(directory, local=local) as sources:
        comparison = Comparison(directory, sources)
        good = [comparison.check(name) for name in names]
    print("agrees" if all(good) else "DOES NOT AGREE")
    return all(good)


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return the exit status."""
    parser = argparse.ArgumentParser(description="compare the model with golden data")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--local", action="store_true", help="read the files without a daemon")
    args = parser.parse_args(arguments)
    try:
        return 0 if compare(args.directory.resolve(), local=args.local) else 1
    except (HeadraceError, OSError, KeyError) as error:
        print(f"golden: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
