"""Any order of writing, resolving, evicting, deleting and closing keeps every promise."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from payload import PayloadMissingError, Ragged, Resolver, ResolverClosedError, Segment, Writer


class Lifecycle(RuleBasedStateMachine):
    written = Bundle("written")

    @initialize(
        mode=st.sampled_from(["auto", "map", "copy"]),
        max_maps=st.integers(1, 3),
        verify=st.sampled_from(["size", "checksum"]),
    )
    def start(self, mode: str, max_maps: int, verify: str) -> None:
        self.root = tempfile.mkdtemp()
        self.writer = Writer(self.root)
        self.options = {"mode": mode, "max_maps": max_maps, "verify": verify}
        self.resolver = Resolver(self.root, **self.options)
        self.views: list[tuple[np.ndarray, np.ndarray]] = []
        self.closed = False
        self.value = 0

    @rule(
        target=written,
        rows=st.integers(0, 5),
        version=st.integers(0, 2),
        dtype=st.sampled_from(["uint8", "uint16"]),
    )
    def write(self, rows: int, version: int, dtype: str):
        self.value += 7
        experts = (np.arange(rows * 6) + self.value).astype(dtype).reshape(rows, 2, 3)
        mask = [list(range(i % 3)) for i in range(rows)]
        segments = self.writer.write(
            {"routed_experts": (4, experts), "sampling_mask": (4, Ragged.from_lists(mask))},
            f"v{version}",
        )
        return multiple((segments, experts, mask))

    def check(self, segments: list[Segment], read) -> None:
        """Read, or meet exactly the error the state of the world calls for."""
        gone = not os.path.exists(segments[0].file)
        if self.closed:
            try:
                read()
            except ResolverClosedError:
                return
            raise AssertionError("a closed resolver read")
        mapped = segments[0].file in self.resolver._files.maps
        try:
            read()
        except PayloadMissingError:
            assert gone
            assert segments[0].rows
        else:
            assert not gone or mapped or not segments[0].rows

    @rule(data=written)
    def view(self, data) -> None:
        segments, experts, _ = data

        def read() -> None:
            view = self.resolver.view(segments[0])
            np.testing.assert_array_equal(view, experts, strict=True)
            self.views.append((view, experts))

        self.check(segments, read)

    @rule(data=written, lo=st.integers(0, 6), length=st.integers(0, 6))
    def window(self, data, lo: int, length: int) -> None:
        segments, experts, mask = data
        if not os.path.exists(segments[0].file) and not self.closed:
            return  # what a window reads of a deleted file depends on what it needs of it

        def read() -> None:
            want = np.zeros((length, 2, 3), experts.dtype)
            for position in range(max(lo, 4), min(lo + length, 4 + len(experts))):
                want[position - lo] = experts[position - 4]
            got = self.resolver.window(
                segments, "routed_experts", lo, lo + length, fill=0, holes="any"
            )
            np.testing.assert_array_equal(got, want, strict=True)
            rows = self.resolver.ragged(segments, "sampling_mask", 4, 4 + len(mask))
            assert [row.tolist() for row in rows] == mask

        self.check(segments, read)

    @rule(data=consumes(written))
    def unlink(self, data) -> None:
        Path(data[0][0].file).unlink(missing_ok=True)

    @rule(version=st.integers(0, 2))
    def sweep(self, version: int) -> None:
        shutil.rmtree(f"{self.root}/v{version}", ignore_errors=True)

    @rule()
    def wipe_the_root(self) -> None:
        shutil.rmtree(self.root)
        os.mkdir(self.root)

    @rule()
    def close(self) -> None:
        self.resolver.close()
        self.closed = True

    @rule()
    def open_another(self) -> None:
        self.resolver = Resolver(self.root, **self.options)
        self.closed = False

    @rule(keep=st.integers(0, 2))
    def drop_views(self, keep: int) -> None:
        del self.views[keep:]

    @invariant()
    def every_view_still_has_its_rows(self) -> None:
        for view, experts in getattr(self, "views", ()):
            np.testing.assert_array_equal(view, experts)

    @invariant()
    def maps_are_bounded(self) -> None:
        if hasattr(self, "resolver"):
            assert len(self.resolver._files.maps) <= self.options["max_maps"]

    def teardown(self) -> None:
        if hasattr(self, "resolver"):
            self.resolver.close()
            shutil.rmtree(self.root, ignore_errors=True)


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(stateful_step_count=30)
