"""Hit rates where there is no trace: what made-up traces of the released model's shape give.

Means of the kinds skewed, topics and drift of `headrace simulate --synthetic`, 1,200 tokens of
which the later half counts as warm and the first 64, from an empty arena, as cold; policy lfu-da.
The kinds lie within 2.5 points of the mean. A trace of one's own text is worth more.
"""

from __future__ import annotations

import numpy as np

from .rates import Hits

# Share of all experts that are resident -> misses a pick, layers that miss: warm, then cold.
_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_WARM_MISS = (1.0, 0.672, 0.453, 0.356, 0.258, 0.200, 0.156, 0.121, 0.091, 0.065, 0.041, 0.020, 0.0)
_WARM_BURST = (1.0, 0.999, 0.978, 0.934, 0.838, 0.740, 0.641, 0.540, 0.439, 0.331, 0.222, 0.112, 0)
_COLD_MISS = (1.0, 0.665, 0.452, 0.388, 0.331) + (0.314,) * 8
_COLD_BURST = (1.0, 0.999, 0.978, 0.949, 0.904) + (0.880,) * 8


def curve_hits(resident: float, device: float, *, is_cold: bool) -> Hits:
    """Return the hits of caches that hold shares of all experts.

    resident   in memory of any kind
    device     in the device's own
    """
    miss = float(np.interp(resident, _SHARES, _COLD_MISS if is_cold else _WARM_MISS))
    burst = float(np.interp(resident, _SHARES, _COLD_BURST if is_cold else _WARM_BURST))
    absent = float(np.interp(device, _SHARES, _COLD_MISS if is_cold else _WARM_MISS))
    return Hits(device=1 - absent if device else 0.0, miss=miss, burst=burst)
