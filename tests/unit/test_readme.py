"""Every Python block of the README runs, and its tables are true."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

import payload
from client import PayloadStatus
from payload import Ragged, Resolver, Writer, encode_segments
from payload.testing.server import Completion, app

README = (Path(__file__).parent.parent.parent / "README.md").read_text()
ROWS = np.arange(30, dtype=np.uint8).reshape(5, 2, 3)


def block(section: str, index: int = 0) -> str:
    text = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[index]


def run(code: str, root: Path, **names: Any) -> dict[str, Any]:
    exec(compile(code.replace("/shared/payload", str(root)), "README.md", "exec"), names)
    return names


def write(root: Path) -> list[dict[str, Any]]:
    names = run(
        block("Server side"),
        root,
        routed_experts=ROWS,
        prompt_len=4,
        kept_ids=[[7], [8, 9]],
        choice={},
    )
    return names["choice"]["payload"]


def test_quick_starts_are_short() -> None:
    for section in ("Trainer side", "Server side", "Client side"):
        assert len([line for line in block(section).splitlines() if line.strip()]) <= 12


def test_the_server_side_writes_what_the_trainer_side_reads(tmp_path: Path) -> None:
    segments = write(tmp_path)
    names = run(
        block("Trainer side"),
        tmp_path,
        response={"choices": [{"payload": segments}]},
        micro_batch={"payload": segments},
    )
    np.testing.assert_array_equal(names["experts"], ROWS)
    np.testing.assert_array_equal(names["rows"], [*ROWS, np.zeros((2, 3))])
    assert [row.tolist() for row in names["mask"]] == [[], [], [], [], [7], [8, 9]]
    recipe = run(block("Trainer side", 1), tmp_path, resolver=names["resolver"], segments=segments)
    np.testing.assert_array_equal(
        recipe["window"], np.int32([*ROWS, np.zeros((2, 3))]), strict=True
    )


def test_the_packing_example_gives_both_ranks_their_rows(tmp_path: Path) -> None:
    ids = np.arange(1, 30, dtype=np.uint8).reshape(-1, 1, 1)
    writer, rollouts, at, packed = Writer(tmp_path), [], 0, []
    for lengths, cut in (((3, 4), None), ((2, 6), 5), ((4, 3), None)):
        total = sum(lengths)
        mine, at = ids[at : at + total], at + total
        segments = writer.write({"routed_experts": (0, mine[: lengths[0]])})
        segments += writer.write({"routed_experts": (lengths[0], mine[lengths[0] : total - 1])})
        rollouts.append((total, segments, cut))
        rows = [*mine[: total - 1].ravel().tolist(), 0]
        packed += rows[:cut]
    with Resolver(tmp_path) as resolver:
        names = run(block("Windows"), tmp_path, resolver=resolver, rollouts=rollouts)
    packed += [0] * (24 - len(packed))
    assert [rank.ravel().tolist() for rank in names["ranks"]] == [packed[:12], packed[12:]]
    assert names["batch"].holes == [(6, 7), (18, 24)]


def test_the_double_serves(tmp_path: Path, serve: Callable[..., str]) -> None:
    double = run(block("Trying it without an engine"), tmp_path)["double"]
    names = run(block("Client side").replace("http://127.0.0.1:8000", serve(double)), tmp_path)
    assert names["result"]["completion_ids"] == [11, 12]
    with Resolver(tmp_path) as resolver:
        views = resolver.resolve(names["result"]["payload"])
    assert views["routed_experts"][0].shape == (5, 48, 8)


def test_spill_and_sweep_do_what_they_say(tmp_path: Path) -> None:
    data = {"data": "AQIDBAUG", "shape": [1, 2, 3], "start": 1, "dtype": "uint8"}
    response = {"choices": [{"token_ids": [7], "routed_experts": data}]}
    request = {"token_ids": [1], "sampling_params": {"routed_experts_prompt_start": 0}}
    data["start"] = 0
    names = run(block("Server side", 1), tmp_path, response=response, request=request)
    [segment] = names["choice"]["payload"]
    with Resolver(tmp_path) as resolver:
        assert resolver.resolve([segment])["routed_experts"][0].tolist() == [[[1, 2, 3], [4, 5, 6]]]
    assert (
        run(block("Server side", 2), tmp_path, step=9, max_off_policy_steps=8)["report"].kept == 1
    )
    report = run(block("Server side", 2), tmp_path, step=12, max_off_policy_steps=8)["report"]
    assert report.removed == [f"{tmp_path}/v3"]


def test_the_client_side_calls_a_server(
    tmp_path: Path, serve: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    completion = Completion(token_ids=[7, 8], arrays={"routed_experts": (0, ROWS)})
    url = serve(app(lambda request: [completion], Writer(tmp_path)))
    names = run(block("Client side").replace("http://127.0.0.1:8000", url), tmp_path)
    assert names["result"]["completion_ids"] == [7, 8]
    with Resolver(tmp_path) as resolver:
        views = resolver.resolve(names["result"]["payload"])
    np.testing.assert_array_equal(views["routed_experts"][0], ROWS)
    assert "came by handle: routed_experts\n" in capsys.readouterr().out


def test_a_newcomer_needs_six_lines_for_a_call() -> None:
    lines = [line for line in block("Client side").splitlines() if line.strip()]
    assert len(lines) <= 6
    assert "httpx" not in block("Client side")


def test_the_migration_names_what_is_there() -> None:
    text = README.split("\n### Coming from renderers\n")[1]
    diff = re.search(r"```diff\n(.*?)```", text, re.DOTALL)
    assert diff
    for sign, package in (("-", "renderers"), ("+", "client")):
        lines = [line[1:] for line in diff[1].splitlines() if line[0] == sign]
        names: dict[str, Any] = {}
        exec("\n".join(lines), names)
        assert names["generate"].__module__.startswith(package)
        assert issubclass(names["OverlongPromptError"], Exception)


def test_a_mask_by_handle_takes_its_inline_logprobs(tmp_path: Path) -> None:
    mask = Ragged.from_lists([[7], [8, 9]])
    segments = Writer(tmp_path).write({"sampling_mask": (5, mask)})
    inline = {"data": "AAAAAAAAAL8AAIC/", "shape": [3], "dtype": "float32"}
    result = {"payload": encode_segments(segments), "sampling_mask_logprobs": inline}
    with Resolver(tmp_path) as resolver:
        names = run(block("Client side", 1), tmp_path, resolver=resolver, result=result)
    assert [row.tolist() for row in names["logprobs"]] == [[0.0], [-0.5, -1.0]]


def test_the_states_of_a_payload_are_in_their_table() -> None:
    table = README.split("\n## Client side\n")[1].split("\n### ")[0]
    states = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert states == list(get_args(get_type_hints(PayloadStatus)["state"]))


def test_the_error_table_names_every_error_and_what_it_also_is() -> None:
    table = README.split("\n## Errors\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", table, re.MULTILINE)
    listed = {name for name in payload.__all__ if name.endswith("Error")} - {"PayloadError"}
    assert {name for name, _ in rows} == listed
    for name, parent in rows:
        kind = getattr(payload, parent, None) or getattr(__import__("builtins"), parent)
        assert issubclass(getattr(payload, name), kind)


def test_the_keys_of_a_segment_are_in_its_table(tmp_path: Path) -> None:
    table = README.split("\n## Segments\n")[1].split("\n## ")[0]
    keys = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert keys == [*write(tmp_path)[0], "length"]
    assert keys == list(payload.Segment.__struct_fields__)
    assert encode_segments([]) == []


def test_a_server_of_its_own_attaches_to_its_own_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own:
        def create_error_response(self, message: str) -> str:
            return message

        async def serve_tokens(self, request: Any, raw_request: Any = None) -> str:
            return "generated"

        async def serve_tokens_full_generator(
            self, request: Any, result_generator: Any
        ) -> None: ...

    monkeypatch.setenv("BYHANDLE_ROOT", str(tmp_path))
    serving = Own()
    run(block("vLLM"), tmp_path, app=SimpleNamespace(state=SimpleNamespace(serving_tokens=serving)))
    params = SimpleNamespace(extra_args={"payload_dir": "/etc"})
    refusal = asyncio.run(serving.serve_tokens(SimpleNamespace(sampling_params=params)))
    assert "outside the writer's root" in refusal
