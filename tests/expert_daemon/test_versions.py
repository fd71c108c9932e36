"""The version log against a full history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_daemon.outcome import RequestRefused
from expert_daemon.versions import VersionLog


@given(
    changes=st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 5)), max_size=60),
    first=st.integers(0, 3),
    limit=st.integers(0, 12),
    back=st.integers(0, 70),
)
def test_changes_since_a_version_are_the_last_states_of_what_changed(changes, first, limit, back):
    log = VersionLog(5, first, limit)
    for count, (key, slot) in enumerate(changes, 1):
        assert log.record(key, slot) == first + count
    asked = max(first, log.current - back)
    table = log.since(asked)
    assert table.to_version == log.current == first + len(changes)
    assert table.from_version >= asked
    final = dict(changes[table.from_version - first :])
    assert table.changes == tuple((*divmod(key, 5), final[key]) for key in sorted(final))
    if limit >= 10:
        assert table.from_version == asked, "the log holds every key"


def test_versions_before_the_first_are_a_gap():
    assert VersionLog(5, 3, 10).since(0).from_version == 3


def test_a_version_from_the_future_is_refused():
    with pytest.raises(RequestRefused, match="version 4 was applied, the table is at 3"):
        VersionLog(5, 3, 10).since(4)
