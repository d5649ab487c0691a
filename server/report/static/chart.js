"use strict";
// A line chart in SVG: axes with round numbers, a cross that follows pointer and arrow keys, and a
// sentence for screen readers. One chart is drawn again in place as its run goes on.

const COLOURS = 7, HEIGHT = 200, LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 36;

class Chart {
  // form: {title, format, isLog, isStacked, isFromZero, isWhole, isCount}
  constructor(form) {
    this.form = form;
    this.series = [];
    this.at = null;
    this.svg = draw("svg", { tabindex: "0", role: "img" });
    this.legend = make("div", { class: "legend" });
    this.tip = make("div", { class: "tip", hidden: "" });
    this.element = make("figure", { class: "chart" },
      make("figcaption", {}, make("h3", { text: form.title }), this.legend), this.svg, this.tip);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("blur", () => this.leave());
    this.svg.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  // series: [{name, points: [[x, y], ...], low: [[x, y], ...] for a band}]
  show(series, nameOfX, formatX = short) {
    this.series = series.map((one, colour) => ({
      colour, ...one, points: one.points.filter(([x, y]) => x !== null && y !== null && y !== undefined),
    })).filter((one) => one.points.length);
    this.nameOfX = nameOfX;
    this.formatX = formatX;
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width) return;
    const parts = [];
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", this.sentence());
    this.legend.replaceChildren(...this.series.map((one) =>
      make("span", { class: `k${one.colour % COLOURS}` }, make("b", { text: this.form.isCount ? one.name : `${one.name} ${this.form.format(last(one.points)[1])}` }))));
    if (!this.series.length) {
      this.svg.replaceChildren(draw("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing yet"));
      return;
    }
    const stacked = this.form.isStacked ? stack(this.series) : this.series;
    const xs = stacked.flatMap((one) => one.points.map((point) => point[0]));
    const ys = stacked.flatMap((one) => [...one.points, ...(one.low || [])].map((point) => point[1]))
      .filter((y) => Number.isFinite(y));
    const [minX, maxX] = spread(xs, 0);
    let [minY, maxY] = [Math.min(...extremes(ys)), Math.max(...extremes(ys))];
    const isLog = this.form.isLog && minY > 0 && maxY / minY >= 8;
    if (!isLog) [minY, maxY] = spread([minY, maxY, ...(this.form.isFromZero || this.form.isStacked ? [0] : [])], 0.06);
    if (this.form.isFromZero && minY < 0) minY = 0;
    const scaleX = (x) => LEFT + (x - minX) / (maxX - minX || 1) * (width - LEFT - RIGHT);
    const y01 = isLog ? (y) => Math.log(y / minY) / Math.log(maxY / minY) : (y) => (y - minY) / (maxY - minY || 1);
    const scaleY = (y) => HEIGHT - BOTTOM - y01(y) * (HEIGHT - TOP - BOTTOM);
    for (const y of isLog ? logTicks(minY, maxY) : ticks(minY, maxY, 4, this.form.isWhole)) {
      const at = scaleY(y);
      parts.push(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }),
        draw("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, this.form.format(y)));
    }
    for (const x of ticks(minX, maxX, Math.max(2, Math.floor(width / 55)), this.nameOfX !== "time" && this.nameOfX !== "virtual time")) {
      parts.push(draw("text", { x: scaleX(x), y: HEIGHT - 20, "text-anchor": "middle" }, this.formatX(x)));
    }
    parts.push(draw("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, this.nameOfX));
    for (const one of stacked) {
      const line = one.points.map(([x, y]) => `${scaleX(x).toFixed(1)},${scaleY(isLog ? Math.max(y, minY) : y).toFixed(1)}`);
      if (one.low) {
        const back = [...one.low].reverse().map(([x, y]) => `${scaleX(x).toFixed(1)},${scaleY(y).toFixed(1)}`);
        parts.push(draw("polygon", { class: `${this.form.isStacked ? "stack" : "band"} f${one.colour % COLOURS}`, points: [...line, ...back].join(" ") }));
      }
      if (!this.form.isStacked) {
        parts.push(one.points.length === 1
          ? draw("circle", { class: `f${one.colour % COLOURS}`, r: 3, cx: scaleX(one.points[0][0]), cy: scaleY(one.points[0][1]) })
          : draw("polyline", { class: `series k${one.colour % COLOURS}`, points: line.join(" ") }));
      }
    }
    this.place = { scaleX, minX, maxX, width };
    this.cross = draw("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.svg.replaceChildren(...parts, this.cross);
    if (this.at !== null) this.mark(this.at);
  }

  sentence() {
    if (!this.series.length) return `${this.form.title}: nothing yet`;
    const found = this.series.map((one) =>
      `${one.name} from ${this.form.format(one.points[0][1])} to ${this.form.format(last(one.points)[1])}`);
    return `${this.form.title} over ${this.nameOfX}: ${found.join("; ")}`;
  }

  point(event) {
    if (!this.place) return;
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    this.mark(this.place.minX + Math.min(Math.max(share, 0), 1) * (this.place.maxX - this.place.minX));
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.series.length) return;
    event.preventDefault();
    const xs = this.series[0].points.map((point) => point[0]);
    const now = this.at === null ? (by < 0 ? xs.length : -1) : nearest(xs, this.at);
    this.mark(xs[Math.min(Math.max(now + by, 0), xs.length - 1)]);
  }

  mark(x) {
    if (!this.place || !this.series.length) return;
    this.at = x;
    const lines = [];
    let found = null;
    for (const one of this.series) {
      const point = one.points[nearest(one.points.map((each) => each[0]), x)];
      found = found === null ? point[0] : found;
      if (point[0] === found) lines.push(`${one.name} ${this.form.format(point[1])}`);
    }
    const at = this.place.scaleX(found);
    for (const key of ["x1", "x2"]) this.cross.setAttribute(key, at);
    this.cross.setAttribute("visibility", "visible");
    this.tip.textContent = `${this.nameOfX} ${this.formatX(found)}: ${lines.join(", ")}`;
    this.tip.hidden = false;
    const left = at > this.place.width / 2;
    this.tip.style.left = left ? "auto" : `${at + 20}px`;
    this.tip.style.right = left ? `${this.place.width - at + 20}px` : "auto";
  }

  leave() {
    this.at = null;
    this.tip.hidden = true;
    if (this.cross) this.cross.setAttribute("visibility", "hidden");
  }
}

function last(list) {
  return list[list.length - 1];
}

function extremes(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function spread(values, margin) {
  const [low, high] = extremes(values);
  if (low === high) return [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  return [low - margin * (high - low), high + margin * (high - low)];
}

function ticks(low, high, number, isWhole) {
  const rough = Math.max((high - low) / number || 1, isWhole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let n = Math.ceil(low / size); n * size <= high + 1e-9 * size; n++) found.push(n * size);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const part of high / low < 1e3 ? [1, 2, 5] : [1]) found.push(part * 10 ** power);
  }
  return found.filter((value) => value >= low && value <= high);
}

function nearest(sorted, x) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - sorted[low - 1] < sorted[low] - x ? low - 1 : low;
}

function stack(series) {
  const below = new Map();
  return series.map((one) => {
    const low = one.points.map(([x]) => [x, below.get(x) || 0]);
    const points = one.points.map(([x, y]) => [x, (below.get(x) || 0) + y]);
    for (const [x, y] of points) below.set(x, y);
    return { ...one, points, low };
  });
}
