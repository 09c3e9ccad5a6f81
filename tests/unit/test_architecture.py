"""The rooms of the package: imports go down, and only one room maps files."""

import ast
from pathlib import Path

import client
import payload

ROOT = Path(payload.__file__).parent
FLOORS = [
    {"errors", "dtypes", "_paths", "_mounts"},
    {"segment", "fields", "ragged", "_cast", "_threads", "_refusals"},
    {"_plan", "_files", "_verify", "_gather", "_rows", "_csr", "_naming", "format"},
    {"resolver", "writer", "retention"},
    {"inline", "packing", "torch"},
    {"testing", "cli", "_examine", "_doctor", "vllm", "__main__", "__init__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def imports(file: Path) -> set[str]:
    """Modules a file imports; those of its own package by their first name below it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            names = [node.module] if node.module else [name.name for name in node.names]
            found |= {f".{name.split('.')[0]}" for name in names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return found


def room(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def test_imports_never_go_up() -> None:
    edges = set()
    for file in ROOT.rglob("*.py"):
        for name in imports(file):
            if name.startswith(".") and file.parent == ROOT:
                assert FLOOR[name[1:]] <= FLOOR[room(file)], f"{room(file)} imports {name[1:]}"
                edges.add((room(file), name[1:]))
    order: list[str] = []
    while edges:  # what is left without an import that is left is not in a circle
        free = {a for a, _ in edges} | {b for _, b in edges}
        free -= {a for a, _ in edges}
        assert free, f"a circle among {sorted(edges)}"
        order += free
        edges = {(a, b) for a, b in edges if b not in free}


def test_only_the_files_room_maps_and_only_paths_and_files_and_writer_open() -> None:
    for file in ROOT.rglob("*.py"):
        text = file.read_text()
        assert "mmap" not in imports(file) or room(file) == "_files"
        if "os.open(" in text:
            assert room(file) in {"_paths", "_files", "writer"}
        assert not {"pickle", "marshal", "shelve"} & imports(file)


def test_the_two_packages_do_not_know_each_other() -> None:
    for file in ROOT.rglob("*.py"):
        assert not {name for name in imports(file) if name.split(".")[0] in ("client", "bench")}
    for file in Path(client.__file__).parent.rglob("*.py"):
        assert not {name for name in imports(file) if name.split(".")[0] in ("payload", "bench")}


def test_only_the_torch_room_needs_torch() -> None:
    needing = {
        room(file)
        for file in ROOT.rglob("*.py")
        if any(name.split(".")[0] == "torch" for name in imports(file))
    }
    assert needing == {"torch"}
    for file in ROOT.rglob("*.py"):
        assert ".torch" not in imports(file)


def test_segments_are_pure() -> None:
    for name in ("segment", "fields", "dtypes", "errors", "_plan"):
        assert not {"numpy", "os", "mmap"} & imports(ROOT / f"{name}.py")


def test_the_public_names_are_these() -> None:
    assert sorted(payload.__all__) == sorted(
        """CoverageError FIELDS Field InlineError PathError PayloadCorruptError PayloadError
        PayloadMissingError PayloadTruncatedError PayloadWriteError Ragged Resolver
        ResolverClosedError Segment SegmentError Stats Writer clip decode_segments encode_segments
        expert_dtype gaps shift MicroBatch Sample cp_window pack
        decode_array decode_routed_experts decode_sampling_mask decode_sampling_mask_logprobs spill
        Report sweep""".split()
    )
    for module in (payload, client):
        for name in module.__all__:
            assert getattr(module, name) is not None
            assert name == "FIELDS" or getattr(module, name).__doc__
