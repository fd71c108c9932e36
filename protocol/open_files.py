"""How many descriptors a service may hold: each client takes one or two of them."""

from __future__ import annotations

import resource

MOST_DESCRIPTORS = 65_536  # beyond what anybody connects; the hard limit may be a thousand million


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit to the hard one, and return it.

    The usual soft limit of 1024 is for programs that use select(2). A ZeroMQ socket ends its
    process where it cannot accept for want of a descriptor: a service needs all that it may have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """Return how many descriptors this process may hold, MOST_DESCRIPTORS where more."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MOST_DESCRIPTORS)
