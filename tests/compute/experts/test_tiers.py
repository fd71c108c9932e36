"""Where experts lie, as the device sees it: what its table takes in, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.decode_rig import close_rigs, make_rig

N_DEVICE, N_ARENA = 4, 20


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_last_change_of_a_key_is_in_both_tables_and_a_wrong_one_changes_nothing(
    device: str,
) -> None:
    places = make_rig(device, n_slots=N_ARENA, n_device=N_DEVICE).experts.places
    try:
        n_layers, n_experts = places.table.shape
        last = N_DEVICE + N_ARENA - 1
        places.push([(1, 2, 3), (n_layers - 1, n_experts - 1, last), (1, 2, 0), (1, 3, -1)])
        wanted = places.host_table.copy()
        assert (wanted[1, 2], wanted[-1, -1], wanted[1, 3]) == (0, last, -1)
        assert np.array_equal(places.table.cpu().numpy(), wanted)
        for wrong in (
            (-1, 0, 0),
            (n_layers, 0, 0),
            (0, n_experts, 0),
            (0, 0, -2),
            (0, 0, last + 1),
        ):
            with pytest.raises(ValueError, match="update_slots: layer"):
                places.push([(0, 0, 5), wrong])
        assert np.array_equal(places.host_table, wanted)
        assert np.array_equal(places.table.cpu().numpy(), wanted)
    finally:
        close_rigs()
