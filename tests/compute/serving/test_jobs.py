from __future__ import annotations

import time

import pytest

from compute.sampler import Sampling
from compute.serving.jobs import Job, JobQueue
from compute.serving.wishes import Wishes, read_wishes
from protocol.errors import ConfigError
from protocol.wire.messages import Generate

WISHES = Wishes(Sampling(), None, frozenset(), False, {}, 0.0, 0.0, "", None)


def _job(number: int, session: int = 1, ends_at: float | None = None) -> Job:
    return Job(session, number, (1, 2), WISHES, ends_at)


def _taken(queue: JobQueue) -> Job:
    job = queue.take(0)
    assert job is not None
    return job


def test_jobs_run_in_the_order_of_arrival_and_know_their_places() -> None:
    queue = JobQueue(3)
    jobs = [_job(number) for number in range(4)]
    assert [queue.add(job) for job in jobs] == [True] * 4
    assert [job.position for job in jobs] == [0, 1, 2, 3]
    assert queue.moved() == []
    first = _taken(queue)
    assert first is jobs[0]
    assert queue.moved() == []
    queue.end(first)
    assert queue.moved() == [(jobs[1], 0), (jobs[2], 1), (jobs[3], 2)]
    assert _taken(queue) is jobs[1]


@pytest.mark.parametrize("max_waiting", [0, 1, 3])
def test_beside_the_running_job_only_so_many_wait(max_waiting: int) -> None:
    queue = JobQueue(max_waiting)
    assert queue.add(_job(0))
    _taken(queue)
    assert [queue.add(_job(1 + n)) for n in range(max_waiting + 1)] == [True] * max_waiting + [
        False
    ]


def test_a_waiting_job_that_is_cancelled_leaves_and_a_running_one_is_marked() -> None:
    queue = JobQueue(5)
    jobs = [_job(1), _job(2), _job(3), _job(2, session=2)]
    for job in jobs:
        queue.add(job)
    running = _taken(queue)
    assert queue.cancel(1, 2) == [jobs[1]]
    assert queue.cancel(1, 1) == []
    assert running.should_stop()
    assert queue.cancel(1, 99) == []
    assert queue.n_waiting == 2
    assert queue.cancel_session(2) == [jobs[3]]


def test_a_job_whose_deadline_has_passed_stops_or_leaves() -> None:
    queue = JobQueue(5)
    past = time.monotonic() - 1
    queue.add(_job(1, ends_at=past))
    queue.add(_job(2, ends_at=past))
    queue.add(_job(3, ends_at=past + 100))
    assert _taken(queue).should_stop()
    assert [job.id for job in queue.remove_late()] == [2]


def test_a_closed_queue_gives_back_what_waited_and_takes_nothing() -> None:
    queue = JobQueue(5)
    queue.add(_job(1))
    running = _taken(queue)
    queue.add(_job(2))
    assert [job.id for job in queue.close()] == [2]
    assert running.is_cancelled
    assert not queue.add(_job(3))
    assert queue.take(0.01) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nonsense": 1}, "'nonsense' is not known"),
        ({"temperature": "hot"}, "'temperature': 'hot' is of the wrong type"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"top_k": 1.5}, "'top_k': 1.5"),
        ({"stop_ids": (1.5,)}, "'stop_ids'"),
        ({"bias_ids": (5,), "bias": ()}, "bias_ids has 1 entries, bias 0"),
        ({"bias_ids": (50,), "bias": (1.0,)}, "50 is outside the vocabulary of 10"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(
    settings: dict[str, float], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_wishes(Generate(1, (1,), settings, 0), 10)  # type: ignore[arg-type]


def test_a_grammar_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="grammar: "):
        read_wishes(Generate(1, (1,), {}, 0, b"\xff"), 10)
