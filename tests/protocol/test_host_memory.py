from __future__ import annotations

from pathlib import Path

import pytest

from expert_daemon import arena_plan, populate
from protocol.host_memory import HostMemory, host_memory

KIB = 1 << 10
MEMINFO = "MemTotal:       1000 kB\nMemFree: 10 kB\nMemAvailable:    800 kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    """A machine's files under a directory."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {
    "proc/self/cgroup": "0::/unit\n",
    "sys/fs/cgroup/unit/memory.max": str(500 * KIB),
    "sys/fs/cgroup/unit/memory.current": str(450 * KIB),
}
V1 = {
    "proc/self/cgroup": "4:memory:/unit\n",
    "sys/fs/cgroup/memory/unit/memory.limit_in_bytes": str(500 * KIB),
    "sys/fs/cgroup/memory/unit/memory.usage_in_bytes": str(450 * KIB),
}


def stat(before: str, inactive: int, active: int, shared: int) -> str:
    """A group's memory.stat; what is in shared memory is in `file`, and does not give way."""
    names = {"file": inactive + active + shared, "inactive_file": inactive, "active_file": active}
    return "".join(f"{before}{name} {n_bytes}\n" for name, n_bytes in names.items())


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (V2, 50),
        (V2 | {"sys/fs/cgroup/unit/memory.stat": stat("", 200 * KIB, 30 * KIB, 99 * KIB)}, 280),
        (V1 | {"sys/fs/cgroup/memory/unit/memory.stat": stat("total_", 7 * KIB, 3 * KIB, 0)}, 60),
        (V2 | {"sys/fs/cgroup/unit/memory.stat": stat("", 450 * KIB, 900 * KIB, 0)}, 500),
    ],
)
def test_the_page_cache_of_a_group_gives_way(
    tmp_path: Path, files: dict[str, str], available: int
) -> None:
    memory = host_memory(machine(tmp_path, files))
    assert memory.available_bytes == available * KIB
    assert memory.limit_bytes == memory.own_bytes == 500 * KIB


def test_without_a_limit_all_is_ours(tmp_path: Path) -> None:
    memory = host_memory(machine(tmp_path, {}))
    assert memory == HostMemory(1000 * KIB, 800 * KIB, None)
    assert memory.own_bytes == 1000 * KIB
    assert host_memory(tmp_path / "none") == HostMemory(0, 0, None)


def test_a_full_group_is_not_an_unknown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for memory, found in (
        (HostMemory(1000, 0, 500), 1),
        (HostMemory(1000, 300, 500), 300),
        (HostMemory(0, 0, None), 0),
    ):
        monkeypatch.setattr(populate, "host_memory", lambda memory=memory: memory)
        assert populate.available_bytes() == found


def test_an_arena_of_no_given_size_keeps_to_the_groups_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = HostMemory(1 << 40, 1 << 39, 1 << 30)
    monkeypatch.setattr(arena_plan, "host_memory", lambda: memory)
    monkeypatch.setattr(arena_plan, "available_bytes", lambda: memory.available_bytes)
    assert arena_plan._automatic_size() == 1 << 29
