"""Random interleavings against the oracle: no byte of a slot that can be named changes.

The oracle is in tests/support/cache_world.py. Hypothesis finds and shrinks; the seeded driver adds
length, with the same events.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.cache_world import World

numbers = st.integers(0, 60)
layers = st.integers(0, 1)
expert_lists = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True).map(sorted)
stream_lists = st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True).map(sorted)
key_lists = st.lists(st.tuples(layers, st.integers(0, 7)), min_size=1, max_size=3, unique=True)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        n_slots=st.sampled_from([6, 10, 14]),
        free_pool=st.integers(0, 2),
        lease_quota=st.integers(0, 6),
        history=st.sampled_from([0, 3, 100]),
        policy=st.sampled_from(["lfu-da", "lru"]),
        n_common=st.sampled_from([None, 6, 8]),
    )
    def start(self, **sizes):
        self.world = World(**sizes, n_slots_max=16)
        self.world.attach()
        self.world.deliver_to_daemon()
        self.world.serve()
        self.world.deliver_to_engine()

    @rule(layer=layers, experts=expert_lists)
    def ask(self, layer, experts):
        self.world.ask(layer, experts)
        self.world.deliver_to_daemon()

    @rule(layer=layers, experts=stream_lists, window=st.integers(1, 4), ahead=st.booleans())
    def ask_stream(self, layer, experts, window, ahead):
        keys = [(1 - layer, expert) for expert in range(8)] if ahead else []
        self.world.ask_stream(layer, experts, window, keys)
        self.world.deliver_to_daemon()

    @rule(n=numbers)
    def consume(self, n):
        self.world.consume(n)
        self.world.deliver_to_daemon()

    @rule(layer=layers, experts=expert_lists, window=st.integers(1, 4))
    def serve_a_whole_stream(self, layer, experts, window):
        world = self.world
        world.ask_stream(layer, experts, window)
        for _ in range(3 * len(experts)):
            while world.to_daemon:
                world.deliver_to_daemon()
                world.serve()
            while world.outstanding and world.cache.window_open:
                world.finish(0)
                world.serve()
            while world.to_engine:
                world.deliver_to_engine()
            world.launch([0])
            world.launch_done(0)
            world.consume(-1)

    @rule(layer=layers, experts=expert_lists, steps_on=st.integers(0, 1))
    def hint(self, layer, experts, steps_on):
        self.world.hint(layer, experts, steps_on)

    @rule(keys=key_lists)
    def touch(self, keys):
        self.world.touch(keys)

    @rule(keys=key_lists)
    def warm(self, keys):
        self.world.cache.warm(keys)

    @rule(n=numbers, more=st.booleans())
    def resize(self, n, more):
        (self.world.grow if more else self.world.shrink)(n)

    @rule()
    def undo_growth(self):
        self.world.undo_growth()

    @rule(layer=layers, experts=expert_lists)
    def serve_a_whole_request(self, layer, experts):
        world = self.world
        world.ask(layer, experts)
        for _ in range(len(world.to_daemon)):
            world.deliver_to_daemon()
            world.serve()
        while world.cache.window_open and world.outstanding:
            world.finish(0)
            world.serve()
        for _ in range(len(world.to_engine)):
            world.deliver_to_engine()

    @rule(n=numbers)
    def write(self, n):
        self.world.write(n)

    @rule(n=numbers)
    def finish(self, n):
        self.world.finish(n)

    @rule(n=numbers, written=st.booleans())
    def fail(self, n, written):
        self.world.fail(n, written=written)

    @rule(n=numbers)
    def disown(self, n):
        self.world.disown(n)

    @rule(n=numbers)
    def hedge(self, n):
        self.world.hedge(n)

    @rule(picks=st.lists(numbers, min_size=1, max_size=3))
    def launch(self, picks):
        self.world.launch(picks)

    @rule(n=numbers)
    def launch_done(self, n):
        self.world.launch_done(n)

    @rule()
    def send_ack(self):
        self.world.send_ack()

    @rule(times=st.integers(1, 4))
    def deliver_to_daemon(self, times):
        for _ in range(times):
            self.world.deliver_to_daemon()
            self.world.serve()

    @rule(times=st.integers(1, 4))
    def deliver_to_engine(self, times):
        for _ in range(times):
            self.world.deliver_to_engine()

    @rule(
        event=st.sampled_from(
            [
                *("attach", "ask_again", "cancel", "lose", "lose_patience", "lose_message"),
                "kill_engine",
            ]
        )
    )
    def trouble(self, event):
        getattr(self.world, event)()

    @rule(client=st.integers(0, 2), keys=key_lists)
    def fetch(self, client, keys):
        self.world.fetch(client, keys)

    @rule(n=numbers)
    def end_fetch(self, n):
        self.world.end_fetch(n)

    @rule(n=numbers)
    def release(self, n):
        self.world.release_wrong(n)
        self.world.release(n)

    @rule(client=st.integers(0, 2))
    def kill_client(self, client):
        self.world.kill_client(client)

    @rule(engine_lives=st.booleans())
    def restart(self, engine_lives):
        self.world.restart(engine_lives=engine_lives)

    @invariant()
    def serve(self):
        if hasattr(self, "world"):
            self.world.serve()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.run_out()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def drive(seed: int, n_events: int) -> World:
    """One world, `n_events` random events, and then everything under way ends well."""
    draw = random.Random(seed)
    world = World(
        policy=draw.choice(["lfu-da", "lru"]),
        n_slots=draw.choice([6, 10, 14]),
        free_pool=draw.choice([0, 1, 2]),
        lease_quota=draw.choice([0, 4, 6]),
        history=draw.choice([0, 3, 6, 100]),
        n_slots_max=16,
        n_common=draw.choice([None, 4, 6, 8]),
    )

    def n() -> int:
        return draw.randrange(1000)

    def keys() -> list[tuple[int, int]]:
        wanted = {(draw.randrange(2), draw.randrange(8)) for _ in range(draw.randrange(1, 4))}
        return sorted(wanted)

    def experts() -> list[int]:
        return sorted(draw.sample(range(8), draw.randrange(1, 5)))

    def most() -> list[int]:
        return sorted(draw.sample(range(8), draw.randrange(1, 9)))

    def ahead() -> list[tuple[int, int]]:
        return [(draw.randrange(2), expert) for expert in experts()]

    events: list[tuple[float, Callable[[], object]]] = [
        (8, lambda: world.finish(n())),
        (3, lambda: world.write(n())),
        (2, lambda: world.fail(n(), written=draw.random() < 0.5)),
        (1, lambda: world.disown(n())),
        (2, lambda: world.hedge(n())),
        (3, world.attach),
        (6, lambda: world.launch([n() for _ in range(draw.randrange(1, 4))])),
        (5, lambda: world.launch_done(n())),
        (8, lambda: world.ask(draw.randrange(2), experts())),
        (4, lambda: world.ask_stream(draw.randrange(2), most(), draw.randrange(1, 5), ahead())),
        (10, lambda: world.consume(n())),
        (2, lambda: world.hint(draw.randrange(2), experts(), draw.randrange(2))),
        (2, lambda: world.touch(keys())),
        (0.5, lambda: world.cache.warm(keys())),
        (0.3, lambda: world.shrink(n())),
        (0.3, lambda: world.grow(n())),
        (0.3, world.undo_growth),
        (0.3, world.lose_patience),
        (1, world.ask_again),
        (1, world.cancel),
        (0.3, world.lose),
        (4, world.send_ack),
        (0.3, world.kill_engine),
        (12, world.deliver_to_daemon),
        (12, world.deliver_to_engine),
        (0.3, world.lose_message),
        (3, lambda: world.fetch(draw.randrange(3), keys())),
        (1, lambda: world.end_fetch(n())),
        (3, lambda: world.release(n())),
        (0.5, lambda: world.release_wrong(n())),
        (0.3, lambda: world.kill_client(draw.randrange(3))),
        (0.3, lambda: world.restart(engine_lives=draw.random() < 0.7)),
    ]
    for event in draw.choices([e for _, e in events], [w for w, _ in events], k=n_events):
        event()
        world.serve()
    world.run_out()
    return world


def test_long_random_lives_keep_every_byte_and_every_slot():
    served = sum(drive(seed, 400).served for seed in range(120))
    assert served > 600, "the driver must get requests through"


@pytest.mark.accept
@pytest.mark.timeout(600)
def test_very_many_random_lives_keep_every_byte_and_every_slot():
    for seed in range(1000, 5000):
        drive(seed, 400)
