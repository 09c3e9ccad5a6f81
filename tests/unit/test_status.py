from typing import Any

import pytest

from client import payload_status

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
        (result(sampling_mask=[], payload=[]), ASKED, "inline", "sampling_mask came inline"),
        (result(), ASKED, "missing",
         "no side array came with 2 tokens: start the server with --enable-return-routed-experts"),
        (result(payload=[]), ASKED, "missing", "no side array came"),
        (result(finish_reason="abort"), ASKED, "nothing", "finish_reason is 'abort' and 2 tokens"),
        (result(completion_ids=[]), ASKED, "nothing", "and 0 tokens were sampled"),
        (result(completion_ids=[5]), ASKED | {"routed_experts_prompt_start": 2}, "nothing",
         "no token from position 2 on was forwarded"),
        (result(completion_ids=[5]), ASKED | {"routed_experts_prompt_start": 1}, "missing", "1 tok"),
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
