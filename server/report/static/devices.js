"use strict";
// The fleet as tiles or as a table, and the dialog with one device's history.

const STATES = ["planned", "computing", "uploading", "masking", "done", "idle", "left out", "dropped", "refused", "gone"];
const MAX_CELLS = 24;
// On a narrow screen a long list of devices begins with these; a button shows all.
const FIRST = 20, NARROW = matchMedia("(max-width: 640px)");

class Fleet {
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.devices = new Map();
    this.elements = new Map();
    this.order = "";
    this.isWhole = false;
    byId("more").addEventListener("click", () => {
      this.isWhole = !this.isWhole;
      this.layOut();
    });
    NARROW.addEventListener("change", () => this.layOut());
    byId("only").append(...STATES.map((state) => make("option", { value: state, text: state })));
    for (const id of ["find", "only", "sort", "look"]) byId(id).addEventListener("input", () => this.layOut());
    byId("devices").addEventListener("click", (event) => {
      const name = event.target.closest("[data-name]")?.dataset.name;
      if (name !== undefined) onOpen(name);
    });
  }

  take(devices, isAll) {
    if (isAll) this.devices.clear();
    for (const device of devices) this.devices.set(device.name, { ...this.devices.get(device.name), ...device });
    this.changed = new Set(devices.map((device) => device.name));
    this.layOut();
  }

  shown() {
    const find = byId("find").value.trim().toLowerCase(), only = byId("only").value;
    const found = [...this.devices.values()].filter((one) =>
      (!find || one.name.toLowerCase().includes(find)) && (!only || one.state === only));
    const by = {
      name: (a, b) => COLLATE.compare(a.name, b.name),
      state: (a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state) || COLLATE.compare(a.name, b.name),
      seconds: (a, b) => (b.seconds || 0) - (a.seconds || 0),
      memory: (a, b) => (used(b) || 0) - (used(a) || 0),
      k: (a, b) => (b.k || 0) - (a.k || 0),
      share: (a, b) => (b.weight_share || 0) - (a.weight_share || 0),
    };
    return found.sort(by[byId("sort").value]);
  }

  layOut() {
    const found = this.shown(), look = byId("look").value;
    const isLong = NARROW.matches && found.length > FIRST + 5;
    const shown = isLong && !this.isWhole ? found.slice(0, FIRST) : found;
    byId("more").hidden = !isLong;
    byId("more").textContent = this.isWhole ? `Show the first ${FIRST}` : `Show all ${whole(found.length)} devices`;
    byId("more").setAttribute("aria-expanded", String(this.isWhole));
    const order = look + "\n" + shown.map((one) => one.name).join("\n");
    if (order !== this.order) {
      this.order = order;
      this.elements = new Map(shown.map((one) => [one.name, look === "tiles" ? newTile(one) : newRow(one)]));
      const inside = [...this.elements.values()].map((each) => each.root);
      byId("devices").replaceChildren(look === "tiles" ? make("div", { class: "tiles" }, ...inside) : table(inside));
      for (const one of shown) this.elements.get(one.name).show(one);
    } else {
      for (const one of shown) if (this.changed?.has(one.name)) this.elements.get(one.name).show(one);
    }
    this.changed = null;
    const counts = new Map();
    for (const one of this.devices.values()) counts.set(one.state, (counts.get(one.state) || 0) + 1);
    const parts = STATES.filter((state) => counts.has(state)).map((state) => `${whole(counts.get(state))} ${state}`);
    const filtered = found.length < this.devices.size ? `; ${whole(found.length)} found` : "";
    byId("counts").textContent = this.devices.size
      ? `${whole(this.devices.size)} devices: ${parts.join(", ")}${filtered}` : "No device has joined yet.";
  }
}

const COLLATE = new Intl.Collator("en", { numeric: true });

function used(device) {
  return device.memory && device.limit ? device.memory / device.limit : null;
}

function chip(element, state) {
  element.className = `chip ${state.replace(" ", "-")}`;
  element.textContent = state;
}

function newTile(device) {
  // A name that is too long loses its middle: its end tells like devices apart.
  const name = make("span", { class: "name" }, make("span", { text: device.name.slice(0, -8) }), make("span", { text: device.name.slice(-8) }));
  const state = make("span", { class: "chip" }), cells = make("div", { class: "bar" });
  const memory = make("i"), plan = make("span"), took = make("span"), room = make("span"), weight = make("span"), sensors = make("span", { class: "row" });
  const root = make("button", { class: "tile", type: "button", "data-name": device.name },
    make("span", { class: "top" }, name, state),
    make("span", { class: "row" }, plan, took), cells,
    make("span", { class: "row" }, room, weight), make("div", { class: "bar" }, memory), sensors);
  let number = null;
  const show = (one) => {
    chip(state, one.state);
    plan.textContent = one.k ? `K ${whole(one.k)} × ${whole(one.size)}` : one.state === "gone" ? "" : "no plan yet";
    took.textContent = one.seconds ? seconds(one.seconds) : "";
    const count = Math.min(one.k || 1, MAX_CELLS);
    if (count !== number) {
      number = count;
      cells.className = "bar cells";
      cells.replaceChildren(...Array.from({ length: count }, () => make("i")));
    }
    const filled = one.k ? Math.round((one.done || 0) / one.k * count) : 0;
    [...cells.children].forEach((cell, at) => cell.classList.toggle("on", at < filled));
    const share = used(one);
    memory.style.width = `${Math.min(100 * (share || 0), 100)}%`;
    memory.classList.toggle("hot", share > 0.95);
    memory.parentElement.hidden = share === null;
    room.textContent = memoryText(one);
    weight.textContent = one.weight_share === null ? "" : shareText(one.weight_share);
    weight.title = "share of the round's weight";
    sensors.textContent = sensorText(one);
    sensors.hidden = !sensors.textContent;
    root.title = one.why ? `${one.name}: ${one.why}` : one.name;
    root.setAttribute("aria-label", `${one.name}: ${one.state}; ${plan.textContent}, ${whole(one.done || 0)} done; memory ${memoryText(one)}`);
  };
  return { root, show };
}

function memoryText(one) {
  if (!one.memory && !one.limit) return "memory unknown";
  if (!one.memory) return `of ${bytes(one.limit)}`;
  return one.limit ? `${bytes(one.memory)} of ${bytes(one.limit)}` : bytes(one.memory);
}

function shareText(share) {
  return share === null || share === undefined ? DASH : `${trim(100 * share, 3)} %`;
}

function sensorText(one) {
  const parts = [];
  if (one.heat !== null) parts.push(`${Math.round(one.heat)} °C`);
  if (one.battery !== null) parts.push(`${one.on_battery ? "battery" : "charging"} ${percent(one.battery)}`);
  else if (one.on_battery) parts.push("on battery");
  return parts.join(" · ");
}

const COLUMNS = ["device", "state", "K × size", "done", "share", "seconds", "examples/s", "memory", "limit", "heat", "battery", "up", "why"];

function newRow(device) {
  const cells = COLUMNS.map(() => make("td"));
  const state = make("span", { class: "chip" });
  cells[0].append(make("button", { type: "button", "data-name": device.name, title: device.name, text: device.name }));
  cells[1].append(state);
  const show = (one) => {
    chip(state, one.state);
    const texts = [one.k ? `${whole(one.k)} × ${whole(one.size)}` : DASH, whole(one.done), shareText(one.weight_share), seconds(one.seconds), short(one.speed),
      bytes(one.memory), bytes(one.limit), one.heat === null ? DASH : `${Math.round(one.heat)} °C`,
      one.battery === null && one.on_battery ? "in use" : percent(one.battery), one.up ? `${bytes(one.up)}/s` : DASH, one.why || ""];
    texts.forEach((text, at) => { cells[at + 2].textContent = text; });
  };
  return { root: make("tr", {}, ...cells), show };
}

function table(rows) {
  const head = make("tr", {}, ...COLUMNS.map((text) => make("th", { scope: "col", text })));
  return make("div", { class: "table-box", tabindex: "0", role: "region", "aria-label": "Devices as a table" },
    make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

const DEVICE_CHARTS = [
  ["Seconds in each round", seconds, "seconds"],
  ["Micro-batches (K)", whole, "k"],
  ["Examples", whole, "examples"],
  ["Share of the round's weight", shareText, "weight_share"],
  ["Peak memory", bytes, "memory"],
  ["Loss on its own examples", short, "loss"],
];

function showDevice(device, points) {
  byId("device-name").textContent = device.name;
  byId("device-why").textContent = `${device.state}${device.why ? `: ${device.why}` : ""}`;
  const facts = [["plan", device.k ? `${whole(device.k)} × ${whole(device.size)}` : DASH], ["quota", whole(device.quota)],
    ["speed", device.speed ? `${short(device.speed)} examples/s` : DASH], ["share of the weight", shareText(device.weight_share)], ["memory", memoryText(device)],
    ["heat", device.heat === null ? DASH : `${Math.round(device.heat)} °C`],
    ["battery", device.battery === null ? (device.on_battery ? "in use" : DASH) : `${percent(device.battery)}${device.on_battery ? ", in use" : ""}`],
    ["labels", device.labels || DASH],
    ["link", device.up ? `↑ ${bytes(device.up)}/s, ↓ ${bytes(device.down)}/s` : DASH]];
  byId("device-facts").replaceChildren(...facts.filter(([, text]) => text !== DASH).map(([name, text]) => make("div", {}, make("dt", { text: name }), make("dd", { text }))));
  const charts = DEVICE_CHARTS.map(([title, format, key]) => {
    const chart = new Chart({ title, format, isWhole: format === whole, isFromZero: key !== "loss" });
    chart.show([{ name: key === "k" ? "K" : key.replace("weight_", ""), points: points.map((one) => [one.round, one[key]]) }], "round", whole);
    return chart;
  });
  byId("device-charts").replaceChildren(...charts.filter((chart) => chart.series.length).map((chart) => chart.element));
  if (!points.length) byId("device-charts").replaceChildren(make("p", { class: "empty", text: "It has been in no round yet." }));
  byId("device").showModal();
}
