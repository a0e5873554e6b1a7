"use strict";
(() => {
  const { charts, marks } = JSON.parse(document.getElementById("data").textContent);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 4, notation: "compact" });
  const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
  const isTiny = (value) => value !== 0 && Math.abs(value) < 1e-3;
  const tick = (value) => (value == null ? "" : isTiny(value) ? value.toExponential(0) : short.format(value));
  const text = (value) => (value == null ? "\u2013" : isTiny(value) ? value.toExponential(3) : plain.format(value));
  const ticks = (plot, values) => {
    const labels = values.map(tick);
    const clash = labels.some((label, number) => label && labels.indexOf(label) !== number);
    return clash ? values.map((value) => (value == null ? "" : isTiny(value) ? value.toExponential(2) : plain.format(value))) : labels;
  };
  const built = new Map();

  const drawMarks = (plot) => {
    const { left, top, width, height } = plot.bbox;
    const context = plot.ctx;
    context.save();
    context.strokeStyle = color("--mark");
    context.lineWidth = devicePixelRatio;
    context.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const step of marks) {
      const x = Math.round(plot.valToPos(step, "x", true));
      if (x < left || x > left + width) continue;
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
    }
    context.restore();
  };

  const chartOf = (place) => charts[Number(place.dataset.chart)];
  const build = (place, logarithmic = Boolean(chartOf(place).startsLog)) => {
    const old = built.get(place);
    if (old) old.plot.destroy();
    const chart = chartOf(place);
    const data = chart.tables.length > 1 ? uPlot.join(chart.tables) : chart.tables[0];
    const axis = { stroke: color("--soft"), grid: { stroke: color("--rule"), width: 1 }, ticks: { stroke: color("--rule"), width: 1 }, font: "12px system-ui, sans-serif" };
    const series = chart.labels.map((label, number) => {
      const hue = chart.colors[number];
      const stroke = color(`--s${(hue % 8) + 1}`);
      const values = data[number + 1];
      let count = 0;
      for (const value of values) count += value != null;
      // A result of an evaluation is a point; of a dense line, points would hide the line.
      return { label, stroke, width: 1.5, dash: hue >= 8 ? [6, 4] : undefined, points: { show: count <= 60, size: 5, fill: stroke }, value: (plot, value) => text(value) };
    });
    const options = {
      width: place.clientWidth,
      height: 230,
      scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1 } },
      axes: [
        { ...axis, values: (plot, values) => values.map((value) => (value == null || value % 1 ? "" : short.format(value))) },
        { ...axis, values: ticks, size: (plot, labels) => 18 + 7 * Math.max(3, ...(labels || []).map((label) => (label || "").length)) },
      ],
      series: [{ label: "step", value: (plot, value) => (value == null ? "\u2013" : String(value)) }, ...series],
      cursor: { sync: { key: "step" }, drag: { x: true, y: false } },
      hooks: { draw: [drawMarks] },
    };
    place.replaceChildren();
    const plot = new uPlot(options, data, place);
    built.set(place, { plot, logarithmic });
    place.querySelectorAll(".u-legend .u-series + .u-series th").forEach((name, number) => {
      name.tabIndex = 0;
      name.title = "show or hide";
      name.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        plot.setSeries(number + 1, { show: !plot.series[number + 1].show });
      });
    });
  };

  const places = [...document.querySelectorAll("[data-chart]")];
  const near = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        near.unobserve(entry.target);
        build(entry.target);
      }
    },
    { rootMargin: "600px" },
  );
  for (const place of places) {
    if (chartOf(place).log) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "log scale";
      button.setAttribute("aria-pressed", String(Boolean(chartOf(place).startsLog)));
      button.addEventListener("click", () => {
        const pressed = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(pressed));
        near.unobserve(place);
        build(place, pressed);
      });
      place.parentElement.querySelector("figcaption").append(button);
    }
    near.observe(place);
  }
  addEventListener("resize", () => {
    for (const [place, { plot }] of built) plot.setSize({ width: place.clientWidth, height: 230 });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const [place, { logarithmic }] of built) build(place, logarithmic);
  });
  for (const details of document.querySelectorAll("details")) {
    details.addEventListener("toggle", () => {
      for (const [place, { plot }] of built) if (details.contains(place)) plot.setSize({ width: place.clientWidth, height: 230 });
    });
  }
  addEventListener("beforeprint", () => {
    for (const place of places) {
      const details = place.closest("details");
      if (details) details.open = true;
    }
    for (const place of places) if (!built.has(place)) build(place);
  });
  const openTarget = () => {
    const folded = document.getElementById(location.hash.slice(1))?.querySelector(":scope > details");
    if (folded) folded.open = true;
  };
  addEventListener("hashchange", openTarget);
  openTarget();
})();
