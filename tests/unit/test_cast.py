import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from payload._cast import check_fits, common_dtype, exact_fill, known_dtype, narrow
from payload.dtypes import DTYPES

NAMES = list(DTYPES)
INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind in "iu"]


def holds(value: float, name: str) -> bool:
    """Whether `name` holds `value` exactly, in plain Python; floats may round among floats."""
    kind = DTYPES[name].kind
    if kind == "b":
        return value in (0, 1)
    if kind in "iu":
        limits = np.iinfo(name)
        return value == int(value) and limits.min <= int(value) <= limits.max
    return int(float(np.dtype(name).type(value))) == value


@given(
    st.sampled_from(INTEGERS),
    st.sampled_from(NAMES),
    st.lists(st.integers(-(2**64), 2**64), min_size=1, max_size=4),
)
def test_integers_become_another_dtype_exactly_or_not_at_all(source, target, values) -> None:
    limits = np.iinfo(source)
    array = np.array([min(max(v, int(limits.min)), int(limits.max)) for v in values], source)
    with np.errstate(over="ignore"):
        finite = np.isfinite(array.astype(target)).all()
        fits = bool(finite) and all(holds(int(v), target) for v in array.tolist())
    if fits:
        assert [int(v) for v in narrow(array, target)] == array.tolist()
    else:
        with pytest.raises(ValueError, match="value"):
            narrow(array, target)


@pytest.mark.parametrize(
    ("value", "target", "fits"),
    [
        (0.5, "int32", False), (3.0, "uint8", True), (256.0, "uint8", False), (-1.0, "uint8", False),
        (np.nan, "int32", False), (np.inf, "int64", False), (2.0**63, "int64", False),
        (-(2.0**63), "int64", True), (2.0**64, "uint64", False), (1e300, "float32", False),
        (np.inf, "float32", True), (np.nan, "float16", True), (0.1, "float32", True),
        (65520.0, "float16", False), (1.0, "bool", True), (2.0, "bool", False),
    ],
)  # fmt: skip
def test_floats_become_another_dtype_without_overflow_or_loss_of_fractions(
    value: float, target: str, fits: bool
) -> None:
    array = np.array([0.0, value])
    if fits:
        assert narrow(array, target).dtype == target
    else:
        with pytest.raises(ValueError, match="value"):
            check_fits(array, np.dtype(target))


def test_what_always_fits_is_not_looked_at() -> None:
    array = np.zeros(3, np.uint8)
    assert narrow(array, "uint8") is array
    assert narrow(array, "int16").dtype == np.int16
    check_fits(np.empty(0, np.int64), np.dtype("uint8"))


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (["uint8", "uint16"], "uint16"), (["uint8", "int8"], "int16"), (["int32", "float32"], "float64"),
        (["float16", "uint8"], "float16"), (["bool", "uint8"], "uint8"), (["uint64"], "uint64"),
    ],
)  # fmt: skip
def test_the_common_dtype_is_the_one_numpy_names(names: list[str], common: str) -> None:
    assert common_dtype(names) == common_dtype(names[::-1]) == common


def test_integers_without_a_common_integer_type_are_refused() -> None:
    with pytest.raises(ValueError, match="uint64 and int64 have no common integer type"):
        common_dtype(["uint64", "int64"])


@pytest.mark.parametrize("dtype", [">u2", "O", "S4", "complex64", "M8[ns]", "u1,u1", "longdouble"])
def test_a_dtype_outside_the_table_is_refused(dtype: str) -> None:
    with pytest.raises(TypeError, match="needs one of bool"):
        known_dtype(dtype)


@pytest.mark.parametrize(
    ("fill", "dtype", "fits"),
    [
        (-1, "uint8", False), (255, "uint8", True), (256, "uint8", False), (0, "bool", True),
        (2, "bool", False), (0.5, "int32", False), (2.0, "int32", True), (float("-inf"), "float16", True),
        (float("nan"), "int8", False), (1e300, "float32", False), (10**400, "float64", False),
        (2**64, "uint64", False), (2**63, "uint64", True), (np.uint8(7), "int8", True), (True, "int8", True),
    ],
)  # fmt: skip
def test_a_fill_fits_or_is_refused(fill, dtype: str, fits: bool) -> None:
    if fits:
        assert exact_fill(fill, np.dtype(dtype)) == fill
    else:
        with pytest.raises(ValueError, match="does not fit"):
            exact_fill(fill, np.dtype(dtype))


@pytest.mark.parametrize("fill", ["0", None, [0], 1j])
def test_a_fill_that_is_no_number_is_refused(fill) -> None:
    with pytest.raises(TypeError, match="needs a number"):
        exact_fill(fill, np.dtype("uint8"))
