import copy
import inspect
import pickle

import pytest

import payload
from payload import errors

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.PayloadError)
]
BUILTINS = {
    "SegmentError": ValueError,
    "PathError": errors.SegmentError,
    "PayloadMissingError": FileNotFoundError,
    "PayloadTruncatedError": EOFError,
    "PayloadCorruptError": ValueError,
    "InlineError": ValueError,
    "CoverageError": LookupError,
    "PayloadWriteError": OSError,
    "ResolverClosedError": RuntimeError,
    "PayloadError": Exception,
}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_also_the_builtin_it_is_and_pickles_whole(cls: type) -> None:
    assert issubclass(cls, BUILTINS[cls.__name__])
    error = cls(
        "file '/p/a' has 23 bytes", reason="x", retryable=True, index=2, field="f", path="/p/a",
        offset=8, expected=24, actual=23,
    )  # fmt: skip
    error.add_note("seen by rank 3")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is cls
        assert str(twin) == "file '/p/a' has 23 bytes"
        assert vars(twin) == vars(error)
        assert (twin.expected, twin.actual, twin.__notes__) == (24, 23, ["seen by rank 3"])


def test_an_error_that_tells_of_others_pickles_with_them() -> None:
    first, second, third = (errors.PayloadMissingError(f"file {i}", index=i) for i in (4, 1, 7))
    told = errors.telling_of_all(first, [second, third], 9)
    assert str(told) == "file 4 - 3 of 9 segments cannot be read: 1, 4, 7"
    twin = pickle.loads(pickle.dumps(told))
    assert [one.index for one in twin.errors] == [1, 4, 7]
    assert twin.errors[1] is twin
    assert str(twin) == str(told)
    assert errors.telling_of_all(third, [], 9).errors == ()


def test_of_one_unreadable_segment_the_others_that_were_not_looked_at_are_told() -> None:
    told = errors.telling_of_all(errors.PayloadMissingError("file 0", index=0), [], 300, 44)
    want = "file 0 - 1 of 300 segments cannot be read: 0; 44 were not looked at"
    assert str(told) == want
    assert told.errors == ()


def test_of_many_others_those_that_the_message_names_are_pickled() -> None:
    """A thousand ranks may send one each to the node that reports."""
    every = [
        errors.PayloadMissingError(f"file '/shared/payload/{i}' is not there", index=i, path="/p")
        for i in range(600)
    ]
    told = errors.telling_of_all(every[300], every[:300] + every[301:], 600)
    assert len(told.errors) == 600
    data = pickle.dumps(told)
    assert len(data) < 5_000
    twin = pickle.loads(data)
    assert [one.index for one in twin.errors] == [*range(10), 300]
    assert str(twin) == str(told)
    assert "600 of 600 segments cannot be read: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..." in str(twin)


def test_an_errno_survives_pickling() -> None:
    error = payload.PayloadWriteError("file was not written", errno=28)
    assert pickle.loads(pickle.dumps(error)).errno == 28
    assert payload.PayloadMissingError("file is not there").errno == 2


def test_attributes_that_do_not_apply_are_none() -> None:
    error = payload.CoverageError("x")
    assert (error.index, error.path, error.offset, error.retryable) == (None, None, None, False)
    assert len({cls.reason for cls in CLASSES}) == len(CLASSES)
