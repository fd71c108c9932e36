from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from expert_daemon.arena_search import arena_name, claim, find_arena
from protocol.arena.fds import create_arena
from protocol.arena.identity import Identity, write_identity
from protocol.arena.layout import ArenaLayout

MODEL = b"m" * 16
PLACE = Path("/run/somewhere")


def make_arena(place=PLACE, *, generation=1, fingerprint=MODEL):
    layout = ArenaLayout.plan(
        n_layers=1,
        n_experts=2,
        n_slots_max=2,
        slot_bytes=4096,
        row_bytes=0,
        ring_rows=0,
        piece_offsets=(0, 256, 512, 768, 1024, 1280),
        piece_bytes=(8, 8, 8, 8, 8, 8),
    )
    descriptor = create_arena(layout.n_bytes, arena_name(place))
    page = bytearray(layout.n_bytes)
    identity = Identity(
        layout=layout,
        arena_id=os.urandom(16),
        fingerprint=fingerprint,
        daemon_generation=generation,
        n_slots=2,
        engine_pid=0,
        engine_started=0,
    )
    write_identity(page, identity)
    os.pwrite(descriptor, bytes(page[:4096]), 0)
    return descriptor


@pytest.fixture
def holder():
    """Start processes that hold descriptors and do nothing."""
    made = []

    def hold(*descriptors):
        program = "import sys; print('up', flush=True); sys.stdin.read()"
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
        )
        assert child.stdout is not None
        child.stdout.readline()
        for descriptor in descriptors:
            os.close(descriptor)
        made.append(child)
        return child.pid

    yield hold
    for child in made:
        child.communicate()


def test_the_arena_of_the_directory_and_model_is_found_at_its_holder(holder):
    wanted = make_arena()
    inode = os.fstat(wanted).st_ino
    pid = holder(wanted, make_arena(Path("/run/elsewhere")), make_arena(fingerprint=b"o" * 16))
    found = find_arena(PLACE, MODEL)
    assert found is not None
    assert found[1] == pid
    assert os.fstat(found[0]).st_ino == inode
    os.close(found[0])
    assert find_arena(Path("/run/nowhere"), MODEL) is None


def test_of_several_the_one_served_last_is_found(holder):
    old, new, other = make_arena(), make_arena(generation=7), make_arena(generation=3)
    inode = os.fstat(new).st_ino
    holder(old)
    holder(new)
    holder(other)
    found = find_arena(PLACE, MODEL)
    assert found is not None
    assert os.fstat(found[0]).st_ino == inode
    os.close(found[0])


def test_an_arena_that_a_daemon_serves_cannot_be_claimed_until_it_has_gone(holder):
    arena = make_arena()
    program = (
        "import sys\n"
        "from expert_daemon.arena_search import claim\n"
        "print(claim(int(sys.argv[1])), flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(arena)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[arena],
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"True\n"
    assert not claim(arena)
    child.kill()
    child.communicate()
    assert claim(arena)  # though another process may hold the same descriptor
    os.close(arena)


def test_what_is_no_arena_is_passed_over(holder):
    nothing = os.memfd_create(arena_name(PLACE), os.MFD_CLOEXEC)
    os.write(nothing, b"x" * 8192)
    holder(nothing)
    assert find_arena(PLACE, MODEL) is None
