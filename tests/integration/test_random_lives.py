"""Random lives of a whole daemon: no wrong byte, no error, nobody waits for nothing.

Its reads take random times. A stream that waits for what nothing brings ends only at its
deadline, 30 s; what an honest one takes is far below the limits here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.files.checkpoint import open_checkpoint
from tests.support.random_clients import Life, live
from tests.support.running_daemon import smallest_arena
from tests.support.slow_daemon import slow_daemon

FLAGS = {"lfu-da": (), "lru-random": ("--policy", "lru-random", "--prefetch")}


def check(
    demo_dir: Path, runtime_dir: Path, policy: str, arena: float, read_s: float, life_s: float
) -> None:
    """arena: in smallest ones; read_s: the longest read."""
    checkpoint = open_checkpoint(demo_dir)
    # With room for the headers of the largest.
    least = smallest_arena(checkpoint, checkpoint.config.top_k) + (64 << 10)
    size, most = int(arena * least), 4 * least
    flags = ("--arena", str(size), "--arena-max", str(most), *FLAGS[policy])
    longest_s = 8 + 60 * read_s
    with slow_daemon(demo_dir, runtime_dir, read_s, *flags, seed=7) as daemon:
        life = Life(checkpoint, runtime_dir, 7, life_s, longest_s, (least, most))
        live(life)
        assert not life.wrong, (life.wrong[:3], life.counts, daemon.log.read_text()[-2000:])
    print(life.counts, life.longest)
    for what in ("miss", "stream", "fetch", "rows", "resize"):
        assert life.counts[what] > 0, what


@pytest.mark.timeout(120)
def test_a_short_life_in_the_smallest_arena(demo_dir: Path, runtime_dir: Path) -> None:
    check(demo_dir, runtime_dir, "lru-random", 1.0, read_s=0.005, life_s=6)


@pytest.mark.accept
@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", FLAGS)
@pytest.mark.parametrize("arena", [1.0, 1.4, 2.6])
@pytest.mark.parametrize("read_s", [0.005, 0.05, 0.2])
def test_long_lives(
    demo_dir: Path, runtime_dir: Path, policy: str, arena: float, read_s: float
) -> None:
    check(demo_dir, runtime_dir, policy, arena, read_s, life_s=30)
