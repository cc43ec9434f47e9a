// Shows the values under the pointer on all charts with the same axis. The charts themselves do not need this script.
"use strict";
(() => {
  const { places, charts } = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const plots = [...document.querySelectorAll(".plot")].map((element) => {
    const cursor = element.appendChild(document.createElement("span"));
    cursor.className = "cursor";
    cursor.hidden = true;
    return { element, cursor, chart: charts[element.dataset.chart], at: null };
  });

  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
  };

  // Shares of the width and values of an axis, which may be logarithmic.
  const shareOf = ({ low, high, is_log }, x) =>
    is_log ? Math.log(x / low) / Math.log(high / low) : (x - low) / (high - low);
  const valueAt = ({ low, high, is_log }, share) =>
    is_log ? low * (high / low) ** share : low + share * (high - low);

  const format = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-3) return value.toExponential(3);
    return value.toLocaleString("en-US", { maximumSignificantDigits: 5 });
  };

  const row = (label, color, text) => {
    const line = document.createElement("div");
    line.className = "c" + (color % 8);
    for (const part of [label, text]) line.appendChild(document.createElement("span")).textContent = part;
    return line;
  };

  const describe = (chart, x) => {
    const rows = [];
    let at = null;
    for (const series of chart.series) {
      const xs = places[series.x], index = nearest(xs, x);
      const range = series.low === undefined ? null
        : series.high === undefined || series.low[index] === series.high[index] ? format(series.low[index])
        : format(series.low[index]) + " to " + format(series.high[index]);
      if (at === null) at = xs[index];
      const place = xs[index] === at ? "" : ` (at ${format(xs[index])})`;
      const error = series.error ? ` ± ${format(series.error[index])}` : "";
      if (series.middle_label || range === null) {
        rows.push(row(series.middle_label ? `${series.label}, ${series.middle_label}` : series.label + place, series.color, format(series.middle[index]) + error));
      }
      if (range !== null) rows.push(row(series.label + place, series.color, range));
    }
    return { at, rows };
  };

  const show = (plot, x, left, top) => {
    const { chart } = plot, found = describe(chart, x);
    for (const other of plots) {
      const { x_unit } = other.chart, share = shareOf(other.chart, found.at);
      other.cursor.hidden = x_unit !== chart.x_unit || share < 0 || share > 1;
      other.cursor.style.left = 100 * share + "%";
      other.at = found.at;
    }
    const head = document.createElement("b");
    head.textContent = `${chart.x_unit} ${found.at.toLocaleString("en-US")}, ${chart.unit}`;
    tip.replaceChildren(head, ...found.rows);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, left + box.width + 18 > innerWidth ? left - box.width - 14 : left + 14) + "px";
    tip.style.top = Math.max(4, Math.min(top + 14, innerHeight - box.height - 6)) + "px";
  };

  const hide = () => {
    tip.hidden = true;
    for (const plot of plots) plot.cursor.hidden = true;
  };

  for (const plot of plots) {
    const { element, chart } = plot;
    const move = (event) => {
      const box = element.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      show(plot, valueAt(chart, share), event.clientX, event.clientY);
    };
    element.addEventListener("pointermove", move);
    element.addEventListener("pointerdown", move);
    element.addEventListener("pointerleave", hide);
    element.addEventListener("blur", hide);
    element.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
      if (steps === undefined) return;
      event.preventDefault();
      const xs = places[chart.series[0].x];
      const from = plot.at === null ? xs.length - 1 : nearest(xs, plot.at);
      const x = xs[Math.min(xs.length - 1, Math.max(0, from + steps))];
      const box = element.getBoundingClientRect();
      show(plot, x, box.left + box.width * shareOf(chart, x), box.top + 20);
    });
  }
})();
