import base64
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client import MalformedGenerateResponseError, _response, parse_generate_response
from client._response import sampled
from payload import InlineError, SegmentError, decode_routed_experts, decode_segments

LONG = base64.b64encode(bytes(range(256)) * 300).decode()  # long enough to be cut out
SHORT = "AAEC"
PACKED = {"data": LONG, "shape": [76800, 1, 1], "start": 0, "dtype": "uint8"}
ENTRIES = [{"token": f"token_id:{token}", "logprob": -0.5} for token in (5, 6)]
GOOD = {"token_ids": [5, 6], "finish_reason": "stop", "logprobs": {"content": ENTRIES}}


def plain(value: Any) -> Any:
    """The decoded body with text in place of views."""
    if isinstance(value, memoryview):
        return bytes(value).decode()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def body(*experts: Any, spaced: bool = False) -> bytes:
    choices = [GOOD | {"routed_experts": value} for value in experts]
    return json.dumps({"choices": choices}, separators=None if spaced else (",", ":")).encode()


ORDERS = [
    ("data", "shape", "start", "dtype"),
    ("shape", "start", "dtype", "data"),
    ("dtype", "data", "shape", "start"),
]


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
@pytest.mark.parametrize("choices", [1, 2, 3])
def test_every_choice_has_its_own_experts_in_every_order_of_keys(
    choices: int, order: tuple[str, ...], spaced: bool
) -> None:
    experts = [
        {key: PACKED[key] for key in order} | {"data": f"{'AB' * (i + 1)}{LONG}"}
        for i in range(choices)
    ]
    raw = body(*experts, spaced=spaced)
    data = parse_generate_response(raw)
    assert plain(data) == json.loads(raw)
    view = order[0] == "data" and not spaced
    for choice in data["choices"]:
        text = choice["routed_experts"]["data"]
        assert type(text) is (memoryview if view else str)
        if view:
            assert text.obj is raw  # not a copy


@pytest.mark.parametrize(
    "experts",
    [
        [LONG, PACKED, None, SHORT],
        [PACKED | {"data": SHORT}, LONG],
        [PACKED | {"data": LONG[:-4] + "\\/=="}],
        [PACKED | {"data": LONG + '\\"'}],
        [PACKED | {"data": LONG + "é"}],
        [{"shape": [1], "more": {"data": LONG}, "data": LONG}],
        [{"data": ""}, {"data": 5}, {"data": None}, {}],
        [[LONG], 7, True],
        [{"start": 0}, LONG],
    ],
    ids=range(9),
)
@pytest.mark.parametrize("spaced", [False, True])
def test_what_is_cut_out_comes_back_as_json_has_it(experts: list[Any], spaced: bool) -> None:
    raw = body(*experts, spaced=spaced)
    assert plain(parse_generate_response(raw)) == json.loads(raw)


@pytest.mark.parametrize(
    "text",
    [
        '{"choices":[{"routed_experts":"%(long)s","routed_experts":"short"}]}',
        '{"choices":[{"routed_experts":"short","routed_experts":{"data":"%(long)s"}}]}',
        '{"choices":[{"routed_experts":{"data":"%(long)s","data":"x"}}]}',
        '{"usage":{"routed_experts":{"data":"%(long)s"}},"choices":[{}]}',
        '{"choices":[{"payload":[{"field":"routed_experts","routed_experts":"%(long)s"}]}]}',
        '{"choices":[{"payload":"\\"routed_experts\\":{\\"data\\":\\"%(long)s"}]}',
        '{"choices":[{"x\\"routed_experts":{"data":"%(long)s"}}]}',
        '{"routed_experts":"%(long)s","choices":[{"routed_experts":"%(long)s"}]}',
        '{"choices":[{"logprobs":[NaN],"routed_experts":{"data":"%(long)s"}}]}',
        '{"choices":[{"routed_experts" :\n{ "shape" :[ 1,2 ],"data" :\t"%(long)s"}}]}',
    ],
    ids=range(10),
)
def test_a_key_of_that_name_elsewhere_or_twice_means_what_json_says(text: str) -> None:
    raw = (text % {"long": LONG}).encode()
    assert repr(plain(parse_generate_response(raw))) == repr(json.loads(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"choices":[{"routed_experts":{"data":"' + LONG.encode(),
        b'{"choices":[{"routed_experts":{"data":"' + LONG.encode() + b'"}]}',
        b'{"choices":[{"routed_experts":"' + LONG.encode() + b'\xff"}]}',
        b'data: {"choices":[{"routed_experts":{"data":"' + LONG.encode() + b'"}}]}\n\n',
    ],
    ids=["cut off", "unbalanced", "not UTF-8", "a stream"],
)
def test_a_body_cut_off_in_its_experts_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedGenerateResponseError, match=r" - at \$"):
        parse_generate_response(raw)


def test_text_that_is_no_base64_is_refused_where_it_is_decoded() -> None:
    raw = body(PACKED).replace(LONG.encode(), LONG.encode()[:-2] + b"\xff\xff")
    data = parse_generate_response(raw)
    with pytest.raises(InlineError, match="base64"):
        decode_routed_experts(data["choices"][0]["routed_experts"])


def test_experts_handed_over_are_what_the_decoder_takes() -> None:
    for experts in (PACKED, {key: PACKED[key] for key in ORDERS[1]}):
        data = parse_generate_response(body(experts, experts))
        for choice in data["choices"]:
            rows = decode_routed_experts(choice["routed_experts"])
            assert rows.tobytes() == bytes(range(256)) * 300


def test_the_text_of_the_experts_is_not_copied() -> None:
    raw = body(PACKED | {"data": "A" * 8_000_000})
    tracemalloc.start()
    data = parse_generate_response(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert data["choices"][0]["routed_experts"]["data"].nbytes == 8_000_000
    assert peak < 100_000


def test_a_flood_of_segments_costs_memory_in_proportion_and_is_refused_by_the_reader() -> None:
    segment = '{"field":"routed_experts","file":"/p/a","offset":0,"pos":0,"rows":0,"dtype":"uint8","shape":[1]}'
    raw = f'{{"choices":[{{"payload":[{",".join([segment] * 200_000)}]}}]}}'.encode()
    tracemalloc.start()
    data = parse_generate_response(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 * len(raw)
    with pytest.raises(SegmentError, match="segments"):
        decode_segments(data["choices"][0]["payload"] * 6)


json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("routed_experts"), inner),
)


@given(
    experts=st.lists(
        json_values
        | st.sampled_from([LONG, SHORT, PACKED])
        | st.permutations(list(PACKED)).map(lambda keys: {key: PACKED[key] for key in keys}),
        min_size=1,
        max_size=3,
    ),
    more=json_values,
    spaced=st.booleans(),
    ascii_only=st.booleans(),
)
def test_any_body_is_decoded_as_json_does(
    experts: list[Any], more: Any, spaced: bool, ascii_only: bool
) -> None:
    choices = [{"payload": more, "routed_experts": value} for value in experts]
    separators = None if spaced else (",", ":")
    text = json.dumps({"choices": choices}, separators=separators, ensure_ascii=ascii_only)
    try:
        raw = text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can hold
        raw = json.dumps({"choices": choices}).encode()
    assert repr(plain(parse_generate_response(raw))) == repr(json.loads(raw))


@pytest.mark.parametrize(
    "choice",
    [
        GOOD,
        GOOD | {"logprobs": {"content": [{"token_id": t, "logprob": -1} for t in (5, 6)]}},
        GOOD | {"logprobs": {"content": [ENTRIES[0], {"token_id": 6, "logprob": -2.5}]}},
        GOOD | {"logprobs": None, "completion_logprobs": {
            "data": "AAAAvwAAgL4=", "shape": [2], "dtype": "float32"}},
        GOOD | {"token_ids": [], "logprobs": None},
        GOOD | {"token_ids": [], "logprobs": {"content": []}},
        GOOD | {"more": {"x": 1}, "logprobs": {"content": ENTRIES, "more": 1}},
    ],
    ids=range(7),
)  # fmt: skip
@pytest.mark.parametrize("other", [[], [GOOD], [{"token_ids": None}], [{"logprobs": 5}]])
def test_the_quick_way_and_the_careful_way_agree(choice: Any, other: list[Any]) -> None:
    raw = json.dumps({"choices": [choice, *other], "request_id": "r"}).encode()
    body, first, ids, logprobs = sampled(raw)
    assert ids == choice["token_ids"]
    entries = (choice["logprobs"] or {}).get("content", [])
    assert logprobs == [entry["logprob"] for entry in entries] or logprobs == [-0.5, -0.25]
    assert [type(value) for value in logprobs] == [float] * len(ids)
    whole = parse_generate_response(raw)
    assert body["request_id"] == whole["request_id"]
    assert first.get("finish_reason") == whole["choices"][0]["finish_reason"]


@pytest.mark.parametrize("index", [0, 1, 3, 4, 5, 6])
def test_what_engines_send_is_decoded_once(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_response, "parse_generate_response", None)
    choices = [
        GOOD,
        GOOD | {"logprobs": {"content": [{"token_id": t, "logprob": -1} for t in (5, 6)]}},
        None,
        GOOD | {"logprobs": None, "completion_logprobs": {
            "data": "AAAAvwAAgL4=", "shape": [2], "dtype": "float32"}},
        GOOD | {"token_ids": [], "logprobs": None},
        GOOD | {"routed_experts": PACKED},
        GOOD | {"payload": [{"field": "routed_experts"}]},
    ]  # fmt: skip
    raw = json.dumps({"choices": [choices[index]]}).encode()
    assert sampled(raw)[1].get("payload") == (choices[index] or {}).get("payload")


@pytest.mark.parametrize(
    "entry",
    [
        {"token": "x", "token_id": 5},
        {"token": "token_id:5", "token_id": 6},
        {"token_id": 5.0},
        {"token_id": True},
        {"token_id": "token_id:5"},
        {"token": 5},
        {},
    ],
)
def test_a_logprob_of_another_token_is_refused(entry: dict[str, Any]) -> None:
    for token in (5, 1):
        choice = {"token_ids": [token], "logprobs": {"content": [{"logprob": -1.0} | entry]}}
        raw = json.dumps({"choices": [choice]}).encode()
        with pytest.raises(MalformedGenerateResponseError, match=rf"needs token {token} - at \$"):
            sampled(raw)


def test_entries_with_both_spellings_that_agree_are_read() -> None:
    entry = {"token": "token_id:5", "token_id": 5, "logprob": -1.0}
    raw = json.dumps({"choices": [{"token_ids": [5], "logprobs": {"content": [entry]}}]}).encode()
    assert sampled(raw)[3] == [-1.0]
