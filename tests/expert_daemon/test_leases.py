"""The lease book adds up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from expert_daemon.leases import LeaseBook, share_of

small = st.integers(0, 2)


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("promise"), small, st.integers(0, 3)),
            st.tuples(st.just("take"), small, small, small),
            st.tuples(st.just("drop"), small, small, small),
            st.tuples(st.just("gone"), small),
        ),
        max_size=60,
    )
)
def test_leases_and_promises_never_pass_the_quota_and_are_never_lost(events):
    book = LeaseBook(5)
    held: list[tuple[int, ...]] = []
    promised = [0, 0, 0]
    for kind, *fields in events:
        if kind == "promise":
            client, n = fields
            mine = sum(one[0] == client for one in held) + promised[client]
            fits = len(held) + sum(promised) + n <= 5 and mine + n <= 2
            assert book.promise(client, n) == fits
            promised[client] += n if fits else 0
        elif kind == "take" and promised[fields[0]]:
            book.take(*fields)
            held.append(tuple(fields))
            promised[fields[0]] -= 1
        elif kind == "drop":
            assert book.drop(*fields) == (tuple(fields) in held)
            if tuple(fields) in held:
                held.remove(tuple(fields))
        elif kind == "gone":
            assert book.drop_client(fields[0]) == sum(h[0] == fields[0] for h in held)
            held = [h for h in held if h[0] != fields[0]]
        assert (book.n_held, book.n_promised) == (len(held), sum(promised))
        assert book.pins == {slot: sum(h[1] == slot for h in held) for _, slot, _ in held}


def test_a_share_is_half_of_the_quota_and_one_where_that_is_all():
    assert [share_of(quota) for quota in (0, 1, 2, 3, 64, 128)] == [0, 1, 1, 1, 32, 64]
