"use strict";
// The page of a run: keeps what the server sent, and shows it.

const run = { about: {}, status: {}, points: [], diagnosis: [] };
const INLINE = byId("state-of-run"); // in a report.html the whole state is in the file

const CHARTS = [
  { title: "Loss", format: short, isLog: true, series: (points) => [
    line("training", points, (one) => one.loss),
    ...["test_loss", "held_out_loss"].map((name) => line(name.replace("_loss", "").replace("_", " "), points, (one) => one.metrics[name]))] },
  { title: "Metrics", format: short, isOptional: true, series: (points) => metricNames(points).map((name) => line(name.replaceAll("_", " "), points, (one) => one.metrics[name])) },
  { title: "Effective batch, in units of weight", format: short, isLog: true, series: (points) => [
    line("effective batch", points, (one) => one.weight),
    line("noise scale", points, (one) => one.noise_scale > 0 ? one.noise_scale : null)] },
  { title: "Time of a round, mean over devices", format: seconds, isStacked: true, isOptional: true, series: (points) =>
    ["down", "compute", "up", "wait"].filter((name) => points.some((one) => one.client_split[name] !== undefined))
      .map((name) => line(name, points, (one) => one.client_split[name])) },
  { title: "The server's time of a round", format: seconds, isStacked: true, series: (points) => splitNames(points).map((name) => line(name, points, (one) => one.split[name] ?? 0)) },
  { title: "Accumulation steps (K) per device", format: whole, isWhole: true, isFromZero: true, series: (points) => [
    { ...line("most", points, (one) => one.k_max), low: line("", points, (one) => one.k_min).points },
    line("fewest", points, (one) => one.k_min)] },
  { title: "Devices in a round", format: whole, isWhole: true, isFromZero: true, series: (points) => [
    line("in the sum", points, (one) => one.num_clients), line("invited", points, (one) => one.num_invited),
    line("left out or refused", points, (one) => one.num_left_out + one.num_refused)] },
  { title: "Bytes of a round", format: bytes, isFromZero: true, series: (points) => [
    line("up", points, (one) => one.bytes_up), line("down", points, (one) => one.bytes_down)] },
  { title: "Learning rate", format: short, isFromZero: true, series: (points) => [line("of the step", points, (one) => one.learning_rate)] },
  { title: "Gradient variance per example", format: short, isLog: true, isOptional: true, series: (points) => [
    line("within devices", points, (one) => positive(one.gradient_variance)), line("between devices", points, (one) => positive(one.heterogeneity)),
    line("squared mean", points, (one) => positive(one.squared_gradient))] },
  { title: "Privacy spent (epsilon)", format: short, isFromZero: true, isOptional: true, series: (points) => [line("epsilon", points, (one) => one.epsilon)] },
];

function positive(value) {
  return value > 0 ? value : null;
}

function line(name, points, read) {
  const axis = byId("axis").value;
  return { name, points: points.map((one) => [one[axis], read(one)]) };
}

function metricNames(points) {
  const names = new Set(points.slice(-50).flatMap((one) => Object.keys(one.metrics)));
  return [...names].filter((name) => !name.endsWith("_loss")).sort((a, b) => a.startsWith("train_") - b.startsWith("train_")).slice(0, 6);
}

function splitNames(points) {
  const names = ["wait", "plan", "train", "fold", "unmask", "divide", "step", "evaluate"];
  return names.filter((name) => points.some((one) => (one.split[name] || 0) > 0));
}

const charts = CHARTS.map((form) => ({ form, chart: new Chart(form) }));
byId("charts").append(...charts.map(({ chart }) => chart.element));

const ring = new Chart({ title: "What the server sees of a masked round", format: percent, isFromZero: true, isCount: true });
byId("charts").append(ring.element);

function showRing() {
  const seen = run.status.ring;
  ring.element.hidden = !seen;
  if (!seen) return;
  const shares = (counts) => {
    const total = counts.reduce((sum, count) => sum + count, 0) || 1;
    return counts.map((count, at) => [at, count / total]);
  };
  ring.show([{ name: "one device's vector", points: shares(seen.masked) }, { name: "the opened sum", points: shares(seen.opened) }],
    `round ${seen.round}, part of the ring`, whole);
}

function chosen() {
  const span = Number(byId("span").value), points = run.points;
  byId("scroll-label").hidden = !span || points.length <= span;
  if (!span || points.length <= span) return points;
  const end = span + Math.round(Number(byId("scroll").value) * (points.length - span));
  return points.slice(end - span, end);
}

function showCharts() {
  const points = chosen(), axis = byId("axis").value;
  const names = { round: ["round", whole], time: [run.points.some((one) => one.virtual_seconds !== null) ? "virtual time" : "time", seconds], examples_done: ["examples", short] };
  for (const { form, chart } of charts) {
    chart.show(form.series(points), ...names[axis]);
    chart.element.hidden = form.isOptional && !chart.series.length;
  }
}

// Speeds over some rounds: optimizer steps an hour, examples a second, and the seconds in which as
// many examples are summed as all devices have. Virtual seconds where the clock is virtual.
function rates(points) {
  // Without what the server waited for devices to connect, or was paused.
  const total = points.reduce((sum, one) => sum + (one.virtual_seconds ?? one.seconds - (one.split.wait ?? 0)), 0);
  const examples = points.reduce((sum, one) => sum + one.num_examples, 0);
  const epoch = points.length ? points[points.length - 1].num_epoch_examples : null;
  return {
    updatesPerHour: total > 0 ? 3600 * points.length / total : null,
    examplesPerSecond: total > 0 ? examples / total : null,
    secondsPerEpoch: examples > 0 && epoch ? epoch * total / examples : null,
    epochExamples: epoch,
  };
}

function showFigures() {
  const one = run.points[run.points.length - 1], about = run.about;
  const figures = [];
  const add = (name, value, note = "") => figures.push(make("div", {}, make("dt", { text: name }), make("dd", { text: value }, make("small", { text: note }))));
  if (one) {
    const { updatesPerHour, examplesPerSecond, secondsPerEpoch, epochExamples } = rates(run.points.slice(-20));
    const clock = one.virtual_seconds === null ? "" : "virtual clock";
    add("Loss", one.loss === null ? "hidden" : short(one.loss), one.loss === null ? "differential privacy is on" : "of the training, in the last round");
    const evaluated = [...run.points].reverse().find((point) => Object.keys(point.metrics).some((name) => name.startsWith("test_")));
    for (const [name, value] of Object.entries(evaluated?.metrics ?? {}).filter(([name]) => name.startsWith("test_") && !name.endsWith("_loss")).slice(0, 2)) {
      add(name.replace("test_", "Test ").replaceAll("_", " "), short(value), `after round ${whole(evaluated.round)}`);
    }
    add("Effective batch", whole(one.num_examples), one.weight === one.num_examples ? "examples a step" : `examples; weight ${short(one.weight)}`);
    if (one.noise_scale) add("Noise scale", short(one.noise_scale), one.weight === one.num_examples ? "examples, where larger batches stop to help" : "in weight, where larger batches stop to help");
    add("Steps", short(updatesPerHour), `of the optimizer an hour${clock && `, ${clock}`}`);
    add("Speed", short(examplesPerSecond), `examples a second${clock && `, ${clock}`}`);
    if (secondsPerEpoch !== null) add("Epoch", seconds(secondsPerEpoch), `for the ${whole(epochExamples)} examples of all devices`);
    add("Devices", `${whole(one.num_clients)} of ${whole(one.num_invited)}`, "in the last sum");
    const shares = [...fleet.devices.values()].filter((each) => each.weight_share !== null && each.round >= one.round).sort((a, b) => a.weight_share - b.weight_share);
    if (shares.length > 1) {
      const [least, most] = [shares[0], shares[shares.length - 1]];
      const planned = one.is_masked ? ", as planned" : "", isEven = least.weight_share === most.weight_share;
      if (isEven) add("Share of weight", shareText(least.weight_share), `of each device${planned}`);
      else add("Share of weight", `${shareText(least.weight_share)} to ${shareText(most.weight_share)}`, `by device: ${least.name} least, ${most.name} most${planned}`);
    }
    add("K", one.k_min === one.k_max ? whole(one.k_min) : `${whole(one.k_min)} to ${whole(one.k_max)}`, "micro-batches per device");
    add("Traffic", bytes(one.bytes_up + one.bytes_down), `a round: ↑\u00a0${bytes(one.bytes_up)}, ↓\u00a0${bytes(one.bytes_down)}`);
    if (one.epsilon !== null) add("Epsilon", short(one.epsilon), `spent by each ${about.unit}, delta ${short(one.delta)}`);
    if (one.num_examples_left_out) add("Left out", whole(one.num_examples_left_out), "examples that could not be used");
  }
  byId("figures").replaceChildren(...figures);
}

function showStatus() {
  const { about, status } = run, isOver = status.has_ended, rounds = Number(about.rounds);
  byId("title").textContent = about.task;
  byId("subtitle").textContent = [about.optimizer, about.is_masked ? `updates are masked (${about.secure})` : "", about.is_private ? "differential privacy" : "", about.folder].filter(Boolean).join(" · ");
  document.title = `${whole(status.round)} · ${about.task} · Headwater`;
  byId("progress").max = rounds || 1;
  byId("progress").value = rounds ? status.round : 0;
  byId("progress").hidden = !rounds;
  const answers = status.invited ? `: ${whole(status.answered)} of ${whole(status.invited)} devices answered` : "";
  const note = status.note ? ` (${status.note})` : "";
  byId("phase").textContent = `round ${whole(status.round)}${rounds ? ` of ${whole(rounds)}` : ""} done${isOver ? "" : `; ${status.phase}${answers}`}${note}`;
  showState(isOver ? (status.phase === "replay" ? "replay" : "ended") : "live", isOver ? "" : "live");
}

function showState(text, kind) {
  const element = byId("state");
  if (element.textContent !== text) element.textContent = text;
  element.dataset.kind = kind;
}

function showDiagnosis() {
  byId("diagnosis").replaceChildren(...run.diagnosis.map((text) => make("li", {}, ...withFlags(text))));
}

const fleet = new Fleet(async (name) => {
  const device = fleet.devices.get(name);
  let points = run.histories?.[name] ?? [];
  if (!INLINE) {
    try {
      const answer = await fetch(`device?name=${encodeURIComponent(name)}`);
      points = answer.ok ? await answer.json() : [];
    } catch {
      points = []; // the run has ended and its page is gone: what is known stays on show
    }
  }
  showDevice(device, points);
});

let due = false;

function take(found, isAll) {
  if (found.about) run.about = found.about;
  if (found.diagnosis) run.diagnosis = found.diagnosis;
  run.status = found.status;
  // Points that this page has already, because it joined between two ticks, are not added twice.
  const numNew = isAll ? found.points.length : Math.min(found.num_points - run.num_points, found.points.length);
  run.points = isAll ? found.points : run.points.concat(numNew > 0 ? found.points.slice(-numNew) : []);
  run.num_points = found.num_points;
  if (run.points.length > 6000) run.points = run.points.filter((_, at) => at % 2 || at > run.points.length - 2000);
  fleet.take(found.devices, isAll);
  if (due || document.hidden) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    showAll();
  });
}

function showAll() {
  showStatus();
  showFigures();
  showDiagnosis();
  showCharts();
  showRing();
}

for (const id of ["axis", "span", "scroll"]) byId(id).addEventListener("input", showCharts);
byId("close").addEventListener("click", () => byId("device").close());
document.addEventListener("visibilitychange", () => { if (!document.hidden && run.status.phase) showAll(); });

const theme = byId("theme");
function setTheme(name) {
  document.documentElement.dataset.theme = name;
}
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
theme.addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

if (INLINE) {
  const found = JSON.parse(INLINE.textContent);
  run.histories = found.histories;
  take(found, true);
} else {
  const source = new EventSource("changes");
  source.addEventListener("all", (event) => take(JSON.parse(event.data), true));
  source.addEventListener("changes", (event) => take(JSON.parse(event.data), false));
  source.addEventListener("error", () => {
    if (run.status.has_ended) source.close();
    else showState("connection lost", "lost");
  });
}
