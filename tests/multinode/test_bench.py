"""The benchmark harness on a real NFS mount."""

from collections.abc import Callable

import pytest

from tests.multinode.cluster import Place

pytestmark = [pytest.mark.multinode, pytest.mark.slow]


@pytest.mark.parametrize("mount", ["v4", "v3"])
def test_every_way_gives_equal_arrays_on_nfs_with_a_cold_cache(
    mount: str, on: Callable[..., Place]
) -> None:
    place = on(mount)
    found = place.trainer.start().ask("bench", root=place.seen)
    assert {"by handle", "by handle, int32", "32 preads, widened", "np.memmap"} <= set(found)
    assert found == {way: [True, 3] for way in found}
