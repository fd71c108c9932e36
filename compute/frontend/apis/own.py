"""What no other server has: why requests took their time, and what the page shows.

`/v1/headrace/why` is about the last requests, `/v1/headrace/state` about this moment.
"""

from __future__ import annotations

import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from compute.frontend.compute_link import ComputeLost
from compute.frontend.http.errors import ApiError
from compute.frontend.recent import MAX_REMEMBERED, together
from compute.frontend.service import Frontend
from protocol.wire.messages import StatusReport

DEFAULT_LAST = 20
TIERS = ("disk", "arena", "device")  # by the digit that an expert has in the map


async def why(request: Request, frontend: Frontend) -> Response:
    """Answer where the time of the last requests went."""
    found = frontend.recent.last(_last(request))
    return JSONResponse(
        {"together": together(found), "requests": [remembered.shown() for remembered in found]}
    )


async def state(request: Request, frontend: Frontend) -> Response:
    """Answer what compute does, where every expert is, and the last requests."""
    report: StatusReport | None = None
    problem = None
    try:
        report = await frontend.link.report(tiers=True)
    except ComputeLost as error:
        problem = str(error)
    found = frontend.recent.last(_last(request))
    return JSONResponse(
        {
            "model": frontend.name,
            "problem": problem,
            "compute": None if report is None else report.values,
            "tiers": None if report is None else tier_map(report),
            "together": together(found),
            "requests": [remembered.shown() for remembered in found],
        }
    )


def tier_map(report: StatusReport) -> dict[str, Any]:
    """Return the experts of each tier, and a row of digits a layer: 0 disk, 1 arena, 2 device."""
    digits = report.tiers.translate(_DIGITS).decode("ascii")
    n_experts = int(report.values.get("n_experts", 0)) or 1
    rows = [digits[first : first + n_experts] for first in range(0, len(digits), n_experts)]
    counts = {name: digits.count(str(tier)) for tier, name in enumerate(TIERS)}
    return {"experts": counts, "rows": rows}


_DIGITS = bytes(ord(str(min(value, len(TIERS) - 1))) for value in range(256))


def _last(request: Request) -> int:
    given = request.query_params.get("last", str(DEFAULT_LAST))
    with contextlib.suppress(ValueError):
        if given.isascii() and given.isdecimal() and 1 <= int(given) <= MAX_REMEMBERED:
            return int(given)
    raise ApiError(
        400, f"last: {given!r} is not a whole number from 1 to {MAX_REMEMBERED}", param="last"
    )
