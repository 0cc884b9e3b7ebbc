"""What `benchmarks.overload` found, as tables and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import report


def markdown(results: dict[str, Any]) -> str:
    """The tables."""
    environment, reached, setting = report.environment(), results["reached"], results["setting"]
    parts = [
        "# Overload, fairness and lost servers",
        f"{environment['date']}, {environment['cores']} cores ({environment['processor']}), Python "
        f"{environment['python']}. Two servers whose engines sleep, {setting['tokens_per_second']:g} tokens/s"
        f" each; single requests of {setting['tokens']} tokens. Load generator, gateway and servers share the"
        " cores. Written by `python -m benchmarks.overload`.",
        f"Capacity: {results['capacity_per_second']:g} requests/s. p99 of what was accepted at the high load"
        f" over that at the low one: {reached['p99_ratio']} (to reach: {reached['p99_ratio_wanted']})."
        f" p99 of a refusal: {reached['refusal_p99_ms']} ms (to reach: {reached['refusal_wanted_ms']:g} ms).",
        "## Load",
        _load_table(results["load"]),
        "## Single requests beside one of 2,000 inputs",
        _fairness_table(results["fairness"]),
        "## Lost servers, under half the load that they can take",
        _loss_table(results["losses"]),
    ]
    return "\n\n".join(parts) + "\n"


def _load_table(loads: dict[str, Any]) -> str:
    header = (
        "load", "sent", "right", "refused", "accepted p50 ms", "p99 ms", "refusal p50 ms", "p99 ms", "max ms",
        "Retry-After s", "gateway grew MiB",
    )  # fmt: skip
    rows = []
    for name, one in loads.items():
        accepted, refusal, after = one["accepted_ms"], one["refusal_ms"], one["retry_after"]
        share = f"{100 * one['refused_share']:.1f} %"
        times = [refusal.get(key, "-") for key in ("p50", "p99", "max")]
        row = [name, one["counts"]["sent"], one["counts"]["right"], share, accepted["p50"], accepted["p99"]]
        rows.append([*row, *times, ", ".join(after) or "-", one["gateway_growth_mib"]])
    return report.table(header, rows)


def _fairness_table(fairness: dict[str, Any]) -> str:
    rows = []
    for name, one in fairness.items():
        times = [one["single_ms"][key] for key in ("p50", "p99", "max")]
        large = [one["large_requests"] or "-", one["large_ms"].get("p50", "-")]
        rows.append([f"{name} a large one", one["singles"]["sent"], *times, *large])
    header = ("", "singles", "p50 ms", "p99 ms", "max ms", "large requests", "large p50 ms")
    return report.table(header, rows)


def _loss_table(losses: dict[str, Any]) -> str:
    rows = []
    for name, one in losses.items():
        counts = one["counts"]
        slowest = (max(one["eject_s"]), max(one["recover_s"]), one["slowest_ms"])
        rows.append([name, *slowest, counts["sent"], counts["right"], counts["refused"], counts["failed"]])
    header = (
        "server",
        "out of rotation s",
        "back s",
        "slowest request ms",
        "sent",
        "right",
        "refused",
        "failed",
    )
    return report.table(header, rows)


def plot(results: dict[str, Any], file: Path) -> None:
    """Latencies under load, beside a large request, and times to take a server out and back."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4.2))
    keys = ("p50", "p90", "p99", "max")
    for name, one in results["load"].items():
        left.plot(keys, [one["accepted_ms"][key] for key in keys], "o-", label=f"{name}, accepted")
        if one["refusal_ms"]:
            left.plot(keys, [one["refusal_ms"][key] for key in keys], "s--", label=f"{name}, refused")
    for name, one in results["fairness"].items():
        middle.plot(keys, [one["single_ms"][key] for key in keys], "o-", label=f"{name} a large request")
    for axes, title in ((left, "under load"), (middle, "single requests")):
        axes.set(yscale="log", ylabel="ms", title=title)
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
    names = list(results["losses"])
    for offset, key, label in ((-0.2, "eject_s", "out of rotation"), (0.2, "recover_s", "back")):
        heights = [max(results["losses"][name][key]) for name in names]
        right.bar([i + offset for i in range(len(names))], heights, 0.4, label=label)
    right.set(ylabel="s", title="lost servers, slowest of all", xticks=range(len(names)))
    right.set_xticklabels([name.partition(" (")[0] for name in names])
    right.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
