"use strict";
// The guide: each slider asks the server to compute again, and each answer is drawn. In the guide
// that is a part of the documents, the answers were recorded at some positions of each slider.

const LABS = typeof RECORDED === "undefined" ? null : RECORDED.labs;
const shown = {}; // the last answer of each experiment
let loopAt = 0, chosenWay = 1;

function section(name) {
  return byId(name);
}

function values(name) {
  const found = {};
  for (const input of section(name).querySelectorAll("input[data-name]")) found[input.dataset.name] = valueOf(name, input);
  return found;
}

// A recorded slider moves over the places of its positions, a live one over the numbers themselves.
function valueOf(name, input) {
  return LABS ? LABS[name].grid[input.dataset.name][input.value] : Number(input.value);
}

function useRecorded(name) {
  for (const input of section(name).querySelectorAll("input[data-name]")) {
    const positions = LABS[name].grid[input.dataset.name], start = positions.indexOf(Number(input.value));
    for (const [key, value] of [["min", 0], ["max", positions.length - 1], ["step", 1]]) input.setAttribute(key, value);
    input.value = start;
  }
}

function recorded(name, given) {
  const { grid, answers } = LABS[name];
  const place = Object.entries(grid).reduce((sum, [key, positions]) => sum * positions.length + positions.indexOf(given[key]), 0);
  return unpacked(answers[place]);
}

function unpacked(value) {
  if (Array.isArray(value)) return value.map(unpacked);
  if (value === null || typeof value !== "object") return value;
  if ("$" in value) return unpacked(RECORDED.pool[value.$]);
  return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, unpacked(part)]));
}

function verdict(name, text, kind = "") {
  const element = section(name).querySelector(".verdict");
  element.replaceChildren(...withFlags(text));
  element.dataset.kind = kind;
}

function bars(name, rows, most, mark) {
  // rows: [{title, parts: [[share kind, value]], text, isOver}]
  section(name).querySelector("[data-bars]").replaceChildren(...rows.map((row) => {
    const track = make("div", { class: `track${row.isOver ? " over" : ""}` });
    row.parts.forEach(([kind, value]) => {
      const part = make("i", { class: `p${kind}` });
      part.style.width = `${Math.min(100 * value / most, 100)}%`;
      track.append(part);
    });
    if (mark) {
      const line = make("b");
      line.style.left = `${Math.min(100 * mark / most, 99.6)}%`;
      track.append(line);
    }
    return make("div", {}, make("span", { text: row.title }), track, make("span", { text: row.text }));
  }));
}

const SHOW = {
  memory(found, given) {
    const size = Math.min(given.size, given.batch), most = Math.max(found.limit * 1.15, found.parameters * 2 + found.whole);
    const row = (title, activations) => ({
      title, parts: [[0, found.parameters], [1, found.vector], [2, activations]],
      text: bytes(2 * found.parameters + activations), isOver: 2 * found.parameters + activations > found.limit,
    });
    bars("memory", [row(`in one pass of ${given.batch}`, found.whole), row(`in micro-batches of ${size}`, found.small)], most, found.limit);
    const cut = `${found.k} micro-batches of ${size}`;
    if (found.fits_whole) verdict("memory", `The whole batch fits: K = 1, accumulation would only cost time. At most ${found.most} examples fit.`, "good");
    else if (found.fits_small) verdict("memory", `The batch overflows the device; as ${cut} it fits, with the same gradient. At most ${found.most} examples fit at once.`, "good");
    else verdict("memory", found.most ? `Not even ${size} examples fit; at most ${found.most} do.` : "Not even one example fits: this device recomputes activations, or is refused by name.", "bad");
  },

  loop(found) {
    const range = byId("loop-step");
    range.max = found.steps.length;
    loopAt = Math.min(loopAt, found.steps.length);
    range.value = loopAt;
    showLine();
  },

  sums(found, given) {
    const rows = found.ways.map((way, at) => {
      const share = way.error === null ? 0 : Math.max(0, (Math.log10(Math.max(way.error, 1e-9)) + 9) / 9.5);
      const bar = make("i", { class: way.error !== null && way.error < 1e-5 ? "p1" : "p2" });
      bar.style.width = `${100 * share}%`;
      const name = make("button", { type: "button", text: way.name });
      name.addEventListener("click", () => { chosenWay = at; showWay(); });
      return make("tr", {}, make("td", {}, name), make("td", { text: way.error === null ? "fails" : short(way.error, 2) }),
        make("td", {}, make("div", { class: "track" }, bar)), make("td", { text: way.why }));
    });
    byId("sums-rows").replaceChildren(...rows);
    const last = found.sizes[found.sizes.length - 1];
    const sizes = `K = ${found.sizes.length}: ${found.sizes.length > 1 ? `${found.sizes.length - 1} micro-batches of ${found.sizes[0]} and one of ${last}` : `one of ${last}`}`;
    verdict("sums", `${sizes}. Summed and divided once, the gradient is that of the whole batch to ${short(found.ways[0].error, 2)}.`, "good");
    showWay();
  },

  pace(found) {
    const most = found.round * 1.05;
    bars("pace", found.devices.slice(0, 12).map((one, at) => ({
      title: `${at % 2 ? "slow" : "fast"}: ${whole(one.quota)} examples, K ${one.k}`,
      parts: [[0, one.seconds], [2, one.transfer]], text: seconds(one.seconds + one.transfer),
    })), most);
    verdict("pace", `A round takes ${seconds(found.round)}, ${percent(found.transfer_share)} of it on the link; one fast device alone ${seconds(found.one_device)}. ${found.advice}`);
  },

  masks(found, given) {
    const colluders = Math.min(given.colluders, given.devices - 1);
    byId("masks-pictures").replaceChildren(
      picture("the plain update shows the image", found.plain), picture("masked, as the server receives it", found.masked),
      picture(`with the masks of ${colluders} removed`, found.seen), picture(`the opened sum of all ${given.devices}`, found.sum));
    verdict("masks", found.is_revealed
      ? "All other devices collude: their masks are all that hid the update, and it is revealed. A session needs enough members that nobody controls."
      : `${found.keys_missing} ${found.keys_missing === 1 ? "mask is" : "masks are"} still unknown: what the colluders see is noise. The sum opens exactly: ${found.is_sum_exact ? "yes, every bit" : "no"}.`,
    found.is_revealed ? "bad" : "good");
    const points = (counts) => counts.map((count, at) => [at, count]);
    histogram.show([{ name: "plain", points: points(found.histogram_plain) }, { name: "masked", points: points(found.histogram_masked) }], "part of the ring", whole);
  },
};

function picture(title, pixels) {
  const svg = draw("svg", { viewBox: "0 0 8 8", role: "img", "aria-label": title });
  pixels.forEach((value, at) => svg.append(draw("rect", { x: at % 8, y: Math.floor(at / 8), width: 1.02, height: 1.02, "fill-opacity": value })));
  return make("figure", {}, svg, make("figcaption", { text: title }));
}

function showWay() {
  const way = shown.sums.ways[chosenWay];
  byId("sums-code").textContent = `# ${way.name}\n${way.code}`;
}

function showLine() {
  const found = shown.loop, step = found.steps[loopAt], vector = step ? step.vector : found.vector;
  byId("loop-step").nextElementSibling.textContent = `${loopAt} of ${found.steps.length}`;
  const lines = [];
  for (const [name, source] of Object.entries(found.sources)) {
    lines.push(make("div", { class: "file", text: `# ${source.file}` }));
    source.lines.forEach((text, at) => {
      const isHere = step && step.function === name && step.line === source.first + at;
      lines.push(make("div", isHere ? { class: "at", "aria-current": "step", text: text || " " } : { text: text || " " }));
    });
    lines.push(make("div", { text: " " }));
  }
  const code = byId("loop-code");
  code.replaceChildren(...lines);
  const here = code.querySelector(".at");
  if (here) code.scrollTop += here.getBoundingClientRect().top - code.getBoundingClientRect().top - 160;
  const most = Math.max(...found.vector.map(Math.abs), ...found.steps.flatMap((one) => one.vector.map(Math.abs)), 1e-9);
  byId("loop-vector").replaceChildren(...vector.flatMap((value, at) => {
    const bar = make("i", { class: value < 0 ? "minus" : "" }), share = 50 * Math.abs(value) / most;
    bar.style.width = `${share}%`;
    bar.style.left = value < 0 ? `${50 - share}%` : "50%";
    return [make("span", { text: `p${at}` }), make("div", { class: "track" }, bar), make("span", { text: short(value, 4) })];
  }));
  const done = step ? step.done : found.k;
  byId("loop-verdict").textContent = step
    ? `${done} of ${found.k} micro-batches are in the vector.`
    : `Done: the update is this vector and its weight ${found.weight}, from micro-batches of ${found.sizes.join(", ")}. The server divides once.`;
}

function moveTo(at) {
  loopAt = Math.min(Math.max(at, 0), shown.loop.steps.length);
  byId("loop-step").value = loopAt;
  showLine();
}

const histogram = new Chart({ title: "How often each part of the ring occurs", format: whole, isFromZero: true, isWhole: true, isCount: true });
byId("masks-charts").append(histogram.element);

const RUN_CHARTS = [
  [new Chart({ title: "Loss", format: short, isLog: true }), (one) => [["training", one.loss], ["test", one.metrics.test_loss]]],
  [new Chart({ title: "Test accuracy", format: short }), (one) => [["accuracy", one.metrics.test_accuracy]]],
  [new Chart({ title: "K, most and fewest", format: whole, isFromZero: true, isWhole: true }), (one) => [["most", one.k_max], ["fewest", one.k_min]]],
  [new Chart({ title: "Devices in the sum", format: whole, isFromZero: true, isWhole: true }), (one) => [["in the sum", one.num_clients], ["invited", one.num_invited]]],
];
byId("run-charts").append(...RUN_CHARTS.map(([chart]) => chart.element));

async function compute(name) {
  const given = values(name);
  const asked = JSON.stringify(given);
  section(name).dataset.asked = asked;
  const answer = LABS ? recorded(name, given) : await (await fetch(`lab/${name}?${new URLSearchParams(given)}`)).json();
  if (section(name).dataset.asked !== asked) return; // a slider has moved on
  shown[name] = answer;
  SHOW[name](shown[name], given);
  section(name).dataset.shown = asked;
}

const waiting = {};
function computeSoon(name) {
  clearTimeout(waiting[name]);
  waiting[name] = setTimeout(() => compute(name), 60);
}

let polling = null;
async function start() {
  clearTimeout(polling);
  if (LABS) {
    const moved = Object.entries(values("run")).find(([name, value]) => value !== LABS.run.centre[name]);
    showRun(unpacked(LABS.run.answers[moved ? moved.join("=") : ""]));
    return;
  }
  byId("run-verdict").textContent = "starts";
  await fetch(`run/start?${new URLSearchParams(values("run"))}`);
  watch();
}

async function watch() {
  const found = await (await fetch("run/state")).json();
  showRun(found);
  if (found.status && !found.status.has_ended && !found.fault) polling = setTimeout(watch, 400);
}

function showRun(found) {
  shown.run = found;
  for (const [chart, read] of RUN_CHARTS) {
    const names = found.points.length ? read(found.points[0]).map(([name]) => name) : [];
    chart.show(names.map((name, at) => ({ name, points: found.points.map((one) => [one.round, read(one)[at][1]]) })), "round", whole);
  }
  const last = found.points[found.points.length - 1];
  byId("run-verdict").dataset.kind = found.fault ? "bad" : "";
  if (found.fault) byId("run-verdict").textContent = found.fault;
  else if (last) {
    const accuracy = last.metrics.test_accuracy;
    const privacy = last.epsilon === null ? "" : `; epsilon ${short(last.epsilon)}`;
    byId("run-verdict").textContent = `Round ${last.round}: test accuracy ${accuracy === undefined ? DASH : percent(accuracy)}, ${whole(last.num_examples)} examples from ${whole(last.num_clients)} devices, ${seconds(last.time)} of virtual time${privacy}.`;
  }
}

function showOutputs(name) {
  for (const input of section(name).querySelectorAll("input[data-name]")) {
    const text = String(valueOf(name, input));
    input.nextElementSibling.textContent = text;
    input.setAttribute("aria-valuetext", text);
  }
}

// Of the recorded runs one slider is moved at a time: the others go back.
function centreOthers(moved) {
  for (const input of section("run").querySelectorAll("input[data-name]")) {
    const name = input.dataset.name;
    if (input !== moved) input.value = LABS.run.grid[name].indexOf(LABS.run.centre[name]);
  }
}

for (const lab of document.querySelectorAll(".lab")) {
  const name = lab.id;
  if (LABS) useRecorded(name);
  showOutputs(name);
  lab.addEventListener("input", (event) => {
    if (!event.target.dataset.name) return;
    if (LABS && name === "run") centreOthers(event.target);
    showOutputs(name);
    if (lab.dataset.lab) computeSoon(name);
  });
  if (lab.dataset.lab) compute(name);
}
byId("loop-step").addEventListener("input", (event) => moveTo(Number(event.target.value)));
byId("loop-back").addEventListener("click", () => moveTo(loopAt - 1));
byId("loop-next").addEventListener("click", () => moveTo(loopAt + 1));
byId("loop-jump").addEventListener("click", () => {
  const { steps } = shown.loop, now = steps[loopAt] ? steps[loopAt].done : 0;
  const next = steps.findIndex((step, at) => at > loopAt && step.done > now);
  moveTo(next < 0 ? steps.length : next);
});
byId("run-start").addEventListener("click", start);
if (LABS) {
  byId("run-start").textContent = "Show the recorded run";
  byId("run-verdict").before(make("p", { class: "quiet", text: "These runs were recorded with one slider moved at a time: the others go back to where they were." }));
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
}
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
