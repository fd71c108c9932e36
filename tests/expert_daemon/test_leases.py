"""The lease book adds up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from expert_daemon.leases import LeaseBook

small = st.integers(0, 2)


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("promise"), st.integers(0, 3)),
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
    promised = 0
    for kind, *fields in events:
        if kind == "promise":
            fits = len(held) + promised + fields[0] <= 5
            assert book.promise(fields[0]) == fits
            promised += fields[0] if fits else 0
        elif kind == "take" and promised:
            book.take(*fields)
            held.append(tuple(fields))
            promised -= 1
        elif kind == "drop":
            assert book.drop(*fields) == (tuple(fields) in held)
            if tuple(fields) in held:
                held.remove(tuple(fields))
        elif kind == "gone":
            assert book.drop_client(fields[0]) == sum(h[0] == fields[0] for h in held)
            held = [h for h in held if h[0] != fields[0]]
        assert (book.n_held, book.n_promised) == (len(held), promised)
        assert book.pins == {slot: sum(h[1] == slot for h in held) for _, slot, _ in held}
