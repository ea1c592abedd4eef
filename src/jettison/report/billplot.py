"""The picture of a bill: devices over time, of the run and of each packing."""

from __future__ import annotations

import matplotlib as mpl
from matplotlib.figure import Figure

from jettison.report.bill import Bill
from jettison.report.plots import STYLE, WIDTH_IN, run_color


def draw_bill(bill: Bill) -> Figure:
    """Devices as steps; the run's own are dark, the fewest possible dashed."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 3.2), layout="constrained")
        axis = figure.subplots()
        for label, used, style in (("awake", bill.awake, "-"), ("holding KV", bill.holding, ":")):
            if used is not None:
                times = [*used.times_s, bill.duration_s]
                axis.step(times, [*used.devices, used.devices[-1]], where="post", color="#333333", linestyle=style,
                          linewidth=1.6, label=f"{bill.run}: {label}")  # fmt: skip
        for index, (name, placed) in enumerate(bill.placed.items()):
            axis.step(bill.demand.times_s, placed.devices, where="post", color=run_color(index), linewidth=1.1,
                      label=name)  # fmt: skip
        axis.step(bill.demand.times_s, bill.least, where="post", color="#777777", linewidth=1.0, linestyle="--",
                  label="least")  # fmt: skip
        axis.set_xlim(0.0, bill.duration_s)
        axis.set_ylim(bottom=0.0)
        axis.set_ylabel("devices")
        axis.set_xlabel("seconds since the start")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
