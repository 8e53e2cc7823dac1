// Draws the curves of runs, and draws them again when there are new steps.
"use strict";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const digits = (value) => value == null ? "–" : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));

/** One table of steps and values for all lines of a chart: each run has steps of its own. */
function joined(lines) {
  return uPlot.join(lines.map((line) => [line.x, line.y]), lines.map(() => lines[0].y.map(() => 2)));
}

function seriesOf(lines) {
  return [{ label: "step" }, ...lines.map((line) => ({
    label: line.name, stroke: css(line.color), width: line.faint ? 1 : 1.6, alpha: line.faint ? 0.35 : 1, spanGaps: true, points: { show: line.x.length < 2, size: 5 },
    value: (_, value) => digits(value),
  }))];
}

function linesOf(metric, runs) {
  const lines = [];
  runs.forEach((run, at) => {
    const curve = run.curves[metric];
    if (!curve) return;
    const color = `--curve-${at + 1}`;
    lines.push({ name: run.name, x: curve.x, y: curve.y, color, faint: Boolean(curve.smooth) });
    if (curve.smooth) lines.push({ name: `${run.name}, smooth`, x: curve.x, y: curve.smooth, color, faint: false });
  });
  return lines;
}

/** A logarithm is drawn only of what is above 0. */
function isLog(figure, lines) {
  return figure.closest("[data-curves]").dataset.scale === "log" && lines.every((line) => line.y.every((value) => value == null || value > 0));
}

/** The scale of a curve; by itself, uPlot draws zeros from 0 to 100. */
function ranged(_, low, high) {
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  return low ? [Math.min(0, 2 * low), Math.max(0, 2 * low)] : [0, 1];
}

function draw(figure, runs) {
  const lines = linesOf(figure.dataset.metric, runs);
  figure.hidden = lines.length === 0;
  if (!lines.length) return;
  const place = figure.querySelector(".plot");
  const last = lines[lines.length - 1].y;
  figure.querySelector("output").textContent = runs.length === 1 ? digits(last[last.length - 1]) : "";
  const data = joined(lines);
  if (figure.plot && figure.plot.series.length === data.length) { figure.plot.setData(data); return; }
  figure.plot?.destroy();
  const grid = { stroke: css("--rule"), width: 1 }, stroke = css("--soft"), font = "11px system-ui, sans-serif";
  figure.plot = new uPlot({
    width: place.clientWidth || 300, height: 170, series: seriesOf(lines), legend: { show: false }, cursor: { y: false, sync: { key: "steps" } },
    padding: [8, 8, 0, 0], scales: { x: { time: false }, y: isLog(figure, lines) ? { distr: 3 } : { range: ranged } },
    axes: [
      { stroke, grid, font, ticks: grid, size: 26, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] },
      { stroke, grid, font, ticks: { show: false }, size: 54, space: 32, values: (_, ticks) => ticks.map(digits) },
    ],
    hooks: { setCursor: [(plot) => { figure.querySelector("output").textContent = atCursor(plot, lines, runs); }] },
  }, data, place);
}

function atCursor(plot, lines, runs) {
  const at = plot.cursor.idx;
  const shown = lines.map((line, index) => ({ line, value: plot.data[index + 1][at ?? plot.data[0].length - 1] })).filter(({ line }) => !line.faint);
  if (at == null) return runs.length === 1 ? digits(shown[0]?.value) : "";
  return `step ${plot.data[0][at]}: ${shown.map(({ value }) => digits(value)).join(" · ")}`;
}

async function show(charts) {
  const reply = await fetch(charts.dataset.curves);
  if (!reply.ok) { notice((await reply.json()).detail); return; }
  const { runs, metrics } = await reply.json();
  for (const { name, meaning } of metrics) {
    if (charts.querySelector(`[data-metric="${CSS.escape(name)}"]`)) continue;
    const figure = charts.querySelector("template").content.firstElementChild.cloneNode(true);
    figure.dataset.metric = name;
    figure.querySelector("b").textContent = name;
    figure.querySelector(".meaning").textContent = meaning;
    charts.append(figure);
  }
  charts.shown = runs;
  for (const figure of charts.querySelectorAll("figure")) draw(figure, runs);
  charts.dataset.drawn = innerWidth;
  charts.dataset.steps = runs.map((run) => run.steps).join(",");
}

const all = [...document.querySelectorAll("[data-curves]")];
all.forEach(show);

// New steps come with the live part of the page, which says how many there are
let version = document.querySelector("[data-version]")?.dataset.version;
let showing = false;
document.addEventListener("htmx:sseMessage", async () => {
  if (showing) return;
  showing = true;
  try {
    // More may have come while they were drawn, and perhaps no further message will
    for (let now; (now = document.querySelector("[data-version]")?.dataset.version) !== version;) {
      version = now;
      for (const charts of all) await show(charts);
    }
  } finally { showing = false; }
});

function again() {
  for (const charts of all) {
    if (!charts.shown) continue; // they are drawn when there is something
    for (const figure of charts.querySelectorAll("figure")) { figure.plot?.destroy(); figure.plot = null; draw(figure, charts.shown); }
    charts.dataset.drawn = innerWidth;
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
let resizing;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(again, 150); });
