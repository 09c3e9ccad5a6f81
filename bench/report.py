"""What a run found: tables for the terminal and for report.md, report.json, and plots."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.measure import Figure
from bench.one import Phases, Timed

OURS, OURS_WIDE = "by handle", ("by handle, int32", "by handle, padded")


class Place(msgspec.Struct, frozen=True):
    """A root that was measured."""

    name: str
    directory: str
    kind: str  # file system type
    cache: str  # "warm" or "cold"


class Held(msgspec.Struct, frozen=True):
    """So many processes that read the same rollouts at once, each into its own arrays."""

    way: str
    processes: int
    ms: float  # until the last one had used its arrays
    pss: int  # growth of proportional memory, all of them
    private: int
    nbytes: int  # of the side arrays as written, once


class Report(msgspec.Struct):
    """All of one run."""

    command: str
    machine: dict[str, Any]
    places: list[Place] = []
    timed: list[Timed] = []
    sizes: list[Timed] = []
    files: list[Timed] = []
    http: list[Timed] = []
    processes: list[Held] = []
    phases: list[Phases] = []
    figures: dict[str, list[Figure]] = {}
    notes: list[str] = []
    seconds: float = 0.0

    @property
    def compared(self) -> list[Timed]:
        """All that have a rival."""
        return [*self.timed, *self.sizes, *self.files, *self.http]


# Why a way that gives the same arrays may be faster. Each is looked up when the figures say so.
REASONS = {
    "msgpack bytes": "its message lies in memory when the clock starts; what it costs to get it there is "
    "in the full path and in memory",
    "msgspec, SIMD base64": "so little to decode that opening a file costs more; its message lies in "
    "memory when the clock starts",
    "32 preads, widened": "most of its time and of ours goes into the pages of the int32 result, four times "
    "the rows. The rows as written are a view",
    "np.memmap": "it maps as we do and checks nothing: no root, no link, no size; several turns it copies "
    "out of the maps on one thread, which a file that shrinks ends with a signal",
    "np.load(mmap_mode)": "it maps as we do and checks neither root nor links; on a cold disk its read of the "
    "header sets the kernel to reading ahead, for which there is `prefetch` here",
    "safetensors safe_open": "it copies out of a map, which a file that shrinks ends with a signal; we read",
}


def total(one: Timed) -> float:
    """Median ms of getting the arrays and copying them out once."""
    return statistics.median(a + b for a, b in zip(one.get, one.use, strict=True))


def spread(one: Timed) -> float:
    """Distance of the quartiles of the same, ms."""
    sums = [a + b for a, b in zip(one.get, one.use, strict=True)]
    if len(sums) < 4:
        return max(sums) - min(sums)
    low, _, high = statistics.quantiles(sums, n=4)
    return high - low


def of_same(timed: Sequence[Timed], one: Timed) -> Timed | None:
    """Our way that gives the same arrays as `one`, in the same scenario on the same root."""
    names = OURS_WIDE if one.wide else (OURS,)
    for other in timed:
        same = (other.scenario, other.root, other.cache) == (one.scenario, one.root, one.cache)
        if same and other.way in names:
            return other
    return None


HEADS = (
    "way", "ms", "quartiles", "to arrays", "copy out", "x ours", "message", "copied", "read",
    "peak", "PSS", "private", "faults", "calls", "fds",
)  # fmt: skip


def cells(timed: Sequence[Timed], one: Timed) -> list[str]:
    """A row of the table of a scenario."""
    ours = of_same(timed, one)
    mega = [one.copied, one.read, one.peak, one.pss, one.private]
    return [
        one.way,
        f"{total(one):.3g}",
        f"{spread(one):.2g}",
        f"{statistics.median(one.get):.3g}",
        f"{statistics.median(one.use):.3g}",
        f"{total(one) / total(ours):.2f}" if ours else "-",
        f"{one.message_bytes:,}" if one.message_bytes else "-",
        *[f"{max(0, value) / 1e6:.1f}" for value in mega],
        f"{one.faults:,}",
        "-" if one.calls is None else f"{sum(one.calls.values()):,}",
        str(one.descriptors),
    ]


def table(rows: Sequence[Sequence[str]], *, markdown: bool = False) -> list[str]:
    """Rows below HEADS, first column to the left."""
    every = [HEADS, *rows]
    if markdown:
        head = "|" + "|".join(["---", *["---:"] * (len(HEADS) - 1)]) + "|"
        found = ["| " + " | ".join(row) + " |" for row in every]
        return [found[0], head, *found[1:]]
    widths = [max(len(row[at]) for row in every) for at in range(len(HEADS))]
    return [
        "  ".join(
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in every
    ]


LEGEND = (
    "ms: median of getting arrays and copying them out once, as to a device; quartiles: their distance, of "
    "three rounds the range. "
    "x ours: against the way by handle that gives the same arrays. message: bytes that travel. copied: MB "
    "of payload size the way copies, by its own count; read: MB from read calls. peak: MB resident memory "
    "grew by at most; PSS, private: MB held with the arrays, shared pages by share, and not shared. calls: "
    "system calls of one turn, by strace. fds: descriptors open while the arrays are held."
)


def groups(timed: Sequence[Timed]) -> list[tuple[tuple[str, str, str], list[Timed]]]:
    """Timed ones by scenario, root and cache, in order."""
    found: dict[tuple[str, str, str], list[Timed]] = {}
    for one in timed:
        found.setdefault((one.scenario, one.root, one.cache), []).append(one)
    return list(found.items())


def slower(timed: Sequence[Timed]) -> list[str]:
    """Rivals that gave the same arrays faster somewhere: why, and where."""
    found: dict[str, list[str]] = {}
    for one in timed:
        ours = of_same(timed, one)
        if ours is None or one.kind not in ("inline", "file") or total(one) >= total(ours):
            continue
        noise = total(ours) - total(one) < max(spread(one), spread(ours))
        found.setdefault(one.way, []).append(
            f"{one.scenario}, {one.root}, {one.cache} ({total(one):.3g} ms against {total(ours):.3g}"
            f"{', within the quartiles' if noise else ''})"
        )
    return [
        f"{way}: {REASONS.get(way, 'no reason is known')}. Where: {'; '.join(places)}"
        for way, places in found.items()
    ]


def markdown(report: Report) -> str:
    """All tables, for people."""
    machine = report.machine
    out = [
        "# What by handle costs, and what the alternatives cost",
        "",
        f"`{report.command}`, {report.seconds:.0f} s. {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, Python {machine['python']}, numpy "
        f"{machine['numpy']}; load before the run {machine['load'][0]}.",
        "",
        *[
            f"- {place.name}: `{place.directory}`, {place.kind}, cache {place.cache}"
            for place in report.places
        ],
        *[f"- {note}" for note in report.notes],
        "",
        "Every way ran in a fresh process, and its arrays were equal to those written before any time was "
        "taken.",
        "",
        "## In short",
        "",
        f"On {report.places[0].name}, cache {report.places[0].cache}: ms by handle, and what others take as a "
        "multiple of the way by handle that gives the same arrays.",
        "",
        *summary(report),
        "",
        *by_root(report),
        LEGEND,
        "",
    ]
    for (name, root, cache), timed in groups(report.timed):
        out += [f"## {name}: {timed[0].about}; {root}, {cache}", ""]
        out += [*table([cells(report.timed, one) for one in timed], markdown=True), ""]
    out += ["## Where by handle is not the fastest", ""]
    out += [f"- {one}" for one in slower(report.compared)] or ["Nowhere in this run."]
    out += ["", "## From HTTP to arrays", ""]
    out += [
        "| tokens | way | body, bytes | ms | x ours | peak, MB | private, MB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for one in report.http:
        ours = of_same(report.http, one)
        out.append(
            f"| {one.scenario.removeprefix('http ')} | {one.way} | {one.message_bytes:,} | {total(one):.3g} | "
            f"{total(one) / total(ours):.2f} | {one.peak / 1e6:.1f} | {one.private / 1e6:.1f} |"
            if ours
            else ""
        )
    out += ["", "## Several processes read the same rollouts", ""]
    out += [
        "| way | processes | ms | PSS of all, MB | private of all, MB | of side arrays, MB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for held in report.processes:
        out.append(
            f"| {held.way} | {held.processes} | {held.ms:.3g} | {held.pss / 1e6:.0f} | "
            f"{held.private / 1e6:.0f} | {held.nbytes / 1e6:.0f} |"
        )
    out += ["", "## Where time goes, ms", ""]
    out += [
        "On the main thread, by wrapping the calls that open, map, read and decode: where threads read beside "
        "it, what it waits for them is in the call it waits in. What safetensors does within is in check, copy.",
        "",
    ]
    names = list(dict.fromkeys(name for one in report.phases for name in one.ms))
    out += ["| scenario | way | " + " | ".join(names) + " |", "|---|---|" + "---:|" * len(names)]
    out += [
        f"| {one.scenario} | {one.way} | "
        + " | ".join(f"{one.ms.get(name, 0):.3g}" for name in names)
        + " |"
        for one in report.phases
    ]
    counted = [one for one in report.timed if one.calls]
    if counted:
        out += ["", "## System calls", ""]
        for one in counted:
            most = sorted((one.calls or {}).items(), key=lambda item: -item[1])[:8]
            told = ", ".join(f"{name} {count}" for name, count in most)
            out.append(f"- {one.scenario}, {one.way}: {told}")
    for name, figures in report.figures.items():
        out += ["", f"## {name}", "", *targets(figures)]
    return "\n".join(out) + "\n"


SHOWN = (
    "by handle, mode=map", "by handle, mode=copy", "by handle, int32", "by handle, padded",
    "msgpack bytes", "msgspec, SIMD base64", "json, base64", "json, lists of ids", "32 preads, widened", "pread, padded",
    "np.load(mmap_mode)", "np.memmap", "safetensors safe_open", "floor: map, np.ndarray", "floor: preadv",
)  # fmt: skip


def summary(report: Report) -> list[str]:
    """One table of all scenarios on the first root."""
    first = report.places[0]
    found = groups(report.timed)
    found = [item for item in found if item[0][1:] == (first.name, first.cache)]
    return times(report, [name for (name, _, _), _ in found], [timed for _, timed in found])


def by_root(report: Report) -> list[str]:
    """One table of the first scenario on all roots."""
    found = groups(report.timed)
    found = [item for item in found if item[0][0] == found[0][0][0]]
    if len(found) < 2:
        return []
    names = [f"{root}, {cache}" for (_, root, cache), _ in found]
    told = f"The same of *{found[0][0][0]}* on each root: which mount, and which `mode` of the resolver."
    return [told, "", *times(report, names, [timed for _, timed in found]), ""]


def times(report: Report, names: Sequence[str], found: Sequence[list[Timed]]) -> list[str]:
    """A table of ms by handle, and how many times that others take; a column each of `found`."""
    out = ["| | " + " | ".join(names) + " |"]
    out.append("|---|" + "---:|" * len(found))
    first = [next((total(one) for one in timed if one.way == OURS), 0.0) for timed in found]
    out.append("| by handle, ms | " + " | ".join(f"{ms:.3g}" for ms in first) + " |")
    for way in SHOWN:
        row, wide = [], False
        for timed in found:
            one = next((one for one in timed if one.way == way), None)
            ours = of_same(report.timed, one) if one else None
            if one is None or ours is None:
                row.append("-")
            elif one is ours:
                row.append(f"{total(one):.3g}")
            else:
                ratio = total(one) / total(ours)
                row.append(f"{ratio:.2g}x" if ratio < 99.5 else f"{ratio:.0f}x")
                wide = one.wide
        if set(row) != {"-"}:
            told = ", ms" if way in OURS_WIDE else " / int32 or padded" if wide else ""
            out.append(f"| {way}{told} | " + " | ".join(row) + " |")
    return out


def targets(figures: Sequence[Figure]) -> list[str]:
    """Figures as a table for people."""
    out = ["| | ours | rival | ratio | target |", "|---|---:|---:|---:|---:|"]
    for one in figures:
        rival = "-" if one.rival is None else f"{one.rival:.3g} {one.unit}"
        target = (one.target or "-") + ("" if one.met else ", missed")
        out.append(
            f"| {one.name} | {one.ours:.3g} {one.unit} | {rival} | {one.ratio:.3g} | {target} |"
        )
    return out


# --- plots

COLORS = {
    "by handle": "#0b5fd0",
    "by handle, int32": "#5aa0f2",
    "by handle, padded": "#5aa0f2",
    "by handle, mapped before": "#083b80",
    "json, base64": "#c0392b",
    "msgspec, SIMD base64": "#e67e22",
    "msgpack bytes": "#8e44ad",
    "32 preads, widened": "#16a085",
    "np.memmap": "#7f8c1d",
    "np.load(mmap_mode)": "#b7950b",
    "safetensors safe_open": "#d35d90",
    "floor: preadv": "#555555",
    "floor: map, np.ndarray": "#999999",
}
PHASES = {
    "decode": "#c0392b", "open": "#f1c40f", "map": "#0b5fd0", "read": "#16a085",
    "check, copy": "#8e44ad", "fault": "#e67e22", "copy out": "#bdc3c7",
}  # fmt: skip


def plots(report: Report, directory: Path) -> list[Path]:
    """Draw what the report has; nothing where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        report.notes.append("no plots: matplotlib is not installed")
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    pyplot.rcParams.update(
        {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 100}
    )
    drawn = []

    def save(figure: Any, name: str) -> None:
        figure.tight_layout()
        path = directory / f"{name}.png"
        figure.savefig(path)
        pyplot.close(figure)
        drawn.append(path)

    def curves(axes: Any, points: dict[str, list[tuple[float, float]]]) -> None:
        for way, line in points.items():
            ours, floor = way.startswith("by handle"), way.startswith("floor")
            axes.plot(
                *zip(*sorted(line), strict=True),
                color=COLORS.get(way, "#333333"),
                linewidth=2.6 if ours else 1.5,
                linestyle="--" if floor else "-",
                marker="o" if ours else ".",
                label=way,
            )

    def plain(axis: Any) -> None:
        """Label powers of ten, and 2 and 5 between them, as people write them."""
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if axis.axis_name == "x" else (1,)))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter("")

    def against(timed: list[Timed], x: Any) -> dict[str, list[tuple[float, float]]]:
        points: dict[str, list[tuple[float, float]]] = {}
        for one in timed:
            points.setdefault(one.way, []).append((x(one), total(one)))
        return points

    for name, timed, x, label, title in (
        ("size", report.sizes, lambda one: one.nbytes / 1e6, "size of the side array, MB (log)",
         "One rollout: what has arrived to arrays, copied out once"),
        ("files", report.files, lambda one: int(one.scenario.split()[-1].replace(",", "")),
         "files the window lies in (log)", "One window of the same rows in ever more files"),
    ):  # fmt: skip
        if timed:
            figure, axes = pyplot.subplots(figsize=(8, 4.6))
            curves(axes, against(timed, x))
            axes.set(xscale="log", yscale="log", xlabel=label, ylabel="ms (log)", title=title)
            plain(axes.yaxis)
            if name == "size":
                plain(axes.xaxis)
            else:
                counts = sorted({x(one) for one in timed})
                axes.set_xticks(counts, [f"{count:,}" for count in counts])
                axes.minorticks_off()
            axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))
            save(figure, name)
    if report.processes:
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.4))
        panels: list[tuple[Any, Callable[[Held], float], str, str]] = [
            (left, lambda held: held.ms, "ms until the last one is done", "Time"),
            (
                right,
                lambda held: held.pss / 1e6,
                "MB, proportional (PSS), all together",
                "Memory held",
            ),
        ]
        for axes, value, label, title in panels:
            points: dict[str, list[tuple[float, float]]] = {}
            for held in report.processes:
                points.setdefault(held.way, []).append((held.processes, value(held)))
            curves(axes, points)
            axes.set(xlabel="processes that read the same rollouts", ylabel=label, title=title)
            axes.set_ylim(bottom=0)
            axes.set_xticks(sorted({held.processes for held in report.processes}))
        left.legend(fontsize=9)
        nbytes = report.processes[0].nbytes / 1e6
        right.axhline(nbytes, color="#555555", linestyle=":")
        right.annotate(
            f"side arrays, once: {nbytes:.0f} MB",
            (max(held.processes for held in report.processes), nbytes),
            xytext=(0, 6),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
        save(figure, "processes")
    if report.http:
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.4))
        ways = list(dict.fromkeys(one.way for one in report.http))
        sizes = list(dict.fromkeys(one.scenario for one in report.http))
        colors = dict(zip(ways, ("#0b5fd0", "#8e44ad", "#e67e22", "#c0392b"), strict=True))
        for axes, amount, label, title in (
            (left, lambda one: one.message_bytes / 1e6, "MB (log)", "Body over HTTP"),
            (right, total, "ms (log)", "From request to arrays, copied out once"),
        ):
            for number, way in enumerate(ways):
                values = [
                    amount(one)
                    for size in sizes
                    for one in report.http
                    if (one.scenario, one.way) == (size, way)
                ]
                places = [at + 0.2 * number - 0.3 for at in range(len(sizes))]
                bars = axes.bar(places, values, 0.19, color=colors[way], label=way)
                axes.bar_label(
                    bars,
                    [f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in values],
                    fontsize=7,
                    padding=1,
                )
            axes.set_xticks(
                range(len(sizes)), [f"{size.removeprefix('http ')} tokens" for size in sizes]
            )
            axes.set(yscale="log", ylabel=label, title=title)
            plain(axes.yaxis)
            axes.margins(y=0.12)
        left.set_ylim(top=left.get_ylim()[1] * 8)  # room for the legend
        left.legend(fontsize=8, loc="upper left")
        save(figure, "http")
    shown = list(dict.fromkeys(one.scenario for one in report.phases))
    if shown:
        figure, every = pyplot.subplots(
            len(shown), 1, figsize=(9, 0.7 + 2.7 * len(shown)), squeeze=False
        )
        for axes, scenario in zip(every[:, 0], shown, strict=True):
            mine = [one for one in report.phases if one.scenario == scenario][::-1]
            begin = [0.0] * len(mine)
            sums = [sum(one.ms.values()) for one in mine]
            for phase, color in PHASES.items():
                # Shares, as the ways differ by two orders of magnitude.
                values = [
                    100 * one.ms.get(phase, 0.0) / whole
                    for one, whole in zip(mine, sums, strict=True)
                ]
                axes.barh([one.way for one in mine], values, left=begin, color=color, label=phase)
                begin = [a + b for a, b in zip(begin, values, strict=True)]
            for at, whole in enumerate(sums):
                axes.annotate(f" {whole:.3g} ms", (100, at), va="center", fontsize=8)
            axes.set(xlabel="% of the time at the right", title=f"Where time goes: {scenario}")
            axes.set_xlim(0, 111)
            axes.set_xticks(range(0, 101, 20))
            axes.grid(visible=False, axis="y")
        every[0, 0].legend(
            fontsize=8, ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.45, 1.1)
        )
        save(figure, "where")
    return drawn
