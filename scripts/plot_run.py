"""Draw the loss, gradient norm and throughput of one or several runs into a PNG.

    python scripts/plot_run.py outputs --output run.png
    python scripts/plot_run.py outputs/a outputs/b/metrics.jsonl --output compare.png

A run is its dump folder or its metrics.jsonl. Each run has one colour in all panels; validation
losses are dots on a dashed line, beside the training loss. Steps without a finite value, null in
the file, leave a gap. Needs matplotlib (`pip install matplotlib`); it draws without a display.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_lite.observe.metrics import METRICS_FILE, Record, read_metrics

# Okabe and Ito's palette: told apart with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


class PlotError(Exception):
    """What keeps the picture from being drawn, in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 drawn, 2 the input is not there or matplotlib is not."""
    arguments = _parse_arguments(argv)
    try:
        labels = run_labels(arguments.runs)
        runs = {label: load_run(run) for label, run in zip(labels, arguments.runs, strict=True)}
        draw(runs, Path(arguments.output))
    except PlotError as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 2
    print(arguments.output)
    return 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a dump folder or a metrics.jsonl")
    parser.add_argument("--output", default="run.png", help="the picture (default: %(default)s)")
    return parser.parse_args(argv)


def load_run(run: str) -> list[Record]:
    """The records of a run; raises PlotError if there is nothing to draw."""
    path = Path(run)
    try:
        records = read_metrics(path)
    except FileNotFoundError:
        where = path / METRICS_FILE if path.is_dir() else path
        raise PlotError(f"{where} does not exist; give the dump folder of a run") from None
    except (OSError, ValueError) as error:
        raise PlotError(str(error)) from error
    if not records:
        raise PlotError(f"{run} holds no records; the run has not logged a step yet")
    return records


def run_labels(runs: Sequence[str]) -> list[str]:
    """A name for each run: its folder's, with as many parents as it takes to tell them apart."""
    folders = []
    for run in runs:
        path = Path(run).resolve()
        folders.append(path.parent if path.name == METRICS_FILE else path)
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        labels = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(labels)) == len(labels):
            return labels
    raise PlotError("the same run is given twice")


def series(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one quantity; NaN, which a plot leaves blank, where it is null."""
    found = [record for record in records if name in record]
    values = [math.nan if record[name] is None else record[name] for record in found]
    return [record["step"] for record in found], values


def draw(runs: dict[str, list[Record]], output: Path) -> None:
    """Draw the three panels of all `runs` (label -> records) into `output`."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise PlotError("matplotlib is not installed; run: pip install matplotlib") from None
    figure, (loss, norm, speed) = pyplot.subplots(
        3, 1, figsize=(9, 9), sharex=True, height_ratios=(2, 1, 1), layout="constrained"
    )
    for index, (label, records) in enumerate(runs.items()):
        color = COLORS[index % len(COLORS)]
        _line(loss, records, "loss", color=color, label=label)
        _line(loss, records, "validation_loss", color=color, label=f"{label}, validation")
        _line(norm, records, "grad_norm", color=color)
        _line(speed, records, "tokens_per_second", color=color)
    _style(loss, "loss")
    _style(norm, "gradient norm")
    _style(speed, "tokens per second")
    loss.legend(frameon=False)
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter("{x:,.0f}")
    speed.set_xlabel("step")
    figure.align_ylabels()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no picture's
        raise PlotError(f"{output} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _line(
    axes: Any, records: Sequence[Record], name: str, *, color: str, label: str | None = None
) -> None:
    steps, values = series(records, name)
    if not steps:
        return
    if name == "validation_loss":
        axes.plot(steps, values, "o--", color=color, label=label, markersize=4, linewidth=1)
    else:
        marker = "o" if len(steps) == 1 else None  # a line of one point is not seen
        axes.plot(steps, values, color=color, label=label, linewidth=1.4, marker=marker)


def _style(axes: Any, title: str) -> None:
    axes.set_ylabel(title)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
