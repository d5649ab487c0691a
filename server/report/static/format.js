"use strict";
// Numbers, times and sizes as a reader wants them, and small helpers to build elements.
// Every text is set as text and never as HTML: names come from devices.

const DASH = "–";

function short(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return trim(value / (unit === "k" ? 1e3 : limit), digits) + unit;
  }
  if (size && size < 1e-3) return value.toExponential(1);
  return trim(value, Math.max(digits, size >= 1000 ? 4 : digits));
}

function trim(value, digits) {
  const text = Number(value).toPrecision(digits);
  return String(Number(text));
}

function bytes(value) {
  if (value === null || value === undefined) return DASH;
  for (const [limit, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= limit) return `${trim(value / limit, 3)}\u00a0${unit}`;
  }
  return `${Math.round(value)}\u00a0B`;
}

function seconds(value) {
  if (value === null || value === undefined) return DASH;
  if (value >= 172800) return `${trim(value / 86400, 3)} d`;
  if (value >= 7200) return `${trim(value / 3600, 3)} h`;
  if (value >= 120) return `${trim(value / 60, 3)} min`;
  if (value >= 1) return `${trim(value, 3)} s`;
  return value ? `${trim(value * 1000, 2)} ms` : "0 s";
}

function percent(value) {
  return value === null || value === undefined ? DASH : `${Math.round(100 * value)} %`;
}

function whole(value) {
  return value === null || value === undefined ? DASH : Math.round(value).toLocaleString("en");
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") element.textContent = value;
    else if (key === "class") element.className = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// A text as parts in which a flag, as --page, stays in one piece.
function withFlags(text) {
  return text.split(/(--[a-z][a-z-]*)/).map((part) => part.startsWith("--") ? make("code", { text: part }) : part);
}

function byId(id) {
  return document.getElementById(id);
}
