from typing import Any

import pytest

from client import payload_status
from payload import Segment

SEGMENT = {"field": "routed_experts", "file": "/p/v3/a", "offset": 0}
ASKED = {"extra_args": {"payload_dir": "/p/v3"}}


def result(**more: Any) -> dict[str, Any]:
    known = {"prompt_ids": [1, 2], "completion_ids": [5, 6], "finish_reason": "stop"}
    return known | dict.fromkeys(("payload", "routed_experts", "sampling_mask")) | more


@pytest.mark.parametrize(
    ("given", "params", "state", "said"),
    [
        (result(payload=[SEGMENT]), ASKED, "by_handle", "came by handle: routed_experts"),
        (result(payload=[SEGMENT]), None, "by_handle", "came by handle"),  # older servers
        (result(payload=[SEGMENT], sampling_mask=[[1]]), ASKED, "by_handle",
         "came by handle: routed_experts; sampling_mask came inline beside it"),
        (result(routed_experts="AAAA"), ASKED, "inline",
         "asked for in '/p/v3', routed_experts came inline"),
        (result(sampling_mask=[[]], payload=[]), ASKED, "inline", "sampling_mask came inline"),
        (result(completion_ids=[], sampling_mask=[]), ASKED, "nothing", "0 tokens were sampled"),
        (result(completion_ids=[], sampling_mask={"ids": {"shape": [0]}}), ASKED, "nothing", "0 t"),
        (result(completion_ids=[], routed_experts={"shape": [0, 2, 3]}), ASKED, "nothing", "0 tok"),
        (result(completion_ids=[], routed_experts={"shape": [1, 2, 3]}), ASKED, "inline", "experts"),
        (result(payload=[["sampling_mask", "/p/v3/a"]]), ASKED, "by_handle", ": sampling_mask"),
        (result(payload=[Segment("weights", "/p", 0, 0, 1, "uint8", (1,))]), ASKED, "by_handle",
         "by handle: weights"),
        (result(payload=5), ASKED, "by_handle", "a int and no list"),
        (result(payload=[None, []]), ASKED, "by_handle", "by handle: None"),
        (result(), {"extra_args": [1]}, "not_asked", "was not asked for"),
        (result(), ASKED, "missing",
         "no side array came with 2 tokens: start the server with --enable-return-routed-experts"),
        (result(payload=[]), ASKED, "missing", "no side array came"),
        (result(finish_reason="abort"), ASKED, "nothing",
         "none is owed: 2 tokens were sampled, finish_reason is 'abort'"),
        (result(completion_ids=[]), ASKED, "nothing", "0 tokens were sampled"),
        (result(finish_reason="abort", payload=[SEGMENT]), ASKED, "by_handle", "by handle"),
        (result(), None, "not_asked", "no side array came: sampling_params.extra_args.payload_dir"),
        (result(), {"extra_args": {"payload_dir": None}}, "not_asked", "was not asked for"),
        (result(), {"extra_args": None}, "not_asked", "was not asked for"),
        (result(routed_experts={}), {}, "not_asked", "routed_experts came inline"),
    ],
)  # fmt: skip
def test_what_became_of_a_request_is_told_apart(
    given: dict[str, Any], params: Any, state: str, said: str
) -> None:
    status = payload_status(given, params)
    assert status.state == state
    assert said in status.message


def test_a_choice_of_a_response_is_judged_like_a_result() -> None:
    choice = {"token_ids": [], "finish_reason": "abort"}
    assert payload_status(choice, ASKED).state == "nothing"


@pytest.mark.parametrize("other", [{}, {"choices": []}, None, [1]])
def test_what_is_no_result_is_refused(other: Any) -> None:
    with pytest.raises(TypeError, match="needs what generate returned, or a choice"):
        payload_status(other, ASKED)
