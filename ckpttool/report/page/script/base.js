"use strict";
// The first part of the page's script: making elements, and writing values as people read them. The parts are one
// script, in the order that __init__.py gives. No library draws the charts: none is published in a form that a Python
// package can depend on and put into a page, and what is needed here is little.

// Whatever is shown goes through textContent or setAttribute: nothing of a report is ever parsed as HTML.
const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((c) => c !== undefined && c !== null && c !== ""));
  return made;
}
const el = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
const draw = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

let made = 0;
const unique = (word) => `${word}-${(made += 1)}`;

// -- values as text

const GROUPED = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const UNITS = ["bytes", "kB", "MB", "GB", "TB", "PB"];

function bytesText(n) {
  if (n < 1000) return n === 1 ? "1 byte" : `${n} bytes`;
  let at = 0;
  let value = n;
  while (value >= 1000 && at < UNITS.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${value.toFixed(2)} ${UNITS[at]}`;
}

function numberText(value, digits = 4) {
  if (value === 0) return "0";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  const short = Number(value.toPrecision(digits));
  if (Number.isInteger(short) && size < 1e6) return GROUPED.format(short).replace("-", "\u2212");
  const text = size >= 1e-3 && size < 1e6 ? String(short) : short.toExponential().replace("e+", "e");
  return text.replace("-", "\u2212").replace("e-", "e\u2212");
}

function shareText(value) {
  if (value === 0) return "0%";
  if (!Number.isFinite(value)) return numberText(value);
  return `${numberText(value * 100, 3)}%`;
}

// How a value of each kind is written, and whether it stands to the right.
const KINDS = {
  text: { show: String, right: false },
  code: { show: String, right: false },
  shape: { show: (v) => v.join(" \u00d7 ") || "scalar", right: false },
  bytes: { show: bytesText, right: true },
  count: { show: (v) => GROUPED.format(v), right: true },
  number: { show: (v) => numberText(v), right: true },
  share: { show: shareText, right: true },
};
const NONE = "\u2013";

function show(kind, value) {
  if (value === null || value === undefined || value === "") return NONE;
  if (typeof value === "string") return value;
  if (typeof value === "boolean") return value ? "yes" : "no";
  return (KINDS[kind] ?? KINDS.number).show(value);
}
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const plural = (n, noun) => `${GROUPED.format(n)} ${noun}${n === 1 ? "" : "s"}`;

// {0..3,7} of sorted numbers.
function rangesText(numbers) {
  const runs = [];
  for (const n of numbers) {
    const last = runs[runs.length - 1];
    if (last && last[1] === n - 1) last[1] = n;
    else runs.push([n, n]);
  }
  const texts = runs.map(([a, b]) => (a === b ? `${a}` : `${a}..${b}`));
  return texts.length > 4 ? [...texts.slice(0, 3), "\u2026", texts[texts.length - 1]].join(",") : texts.join(",");
}

// -- pieces that several kinds of sections use

function paragraphs(text) {
  return (text ?? "").split(/\n\s*\n/).filter(Boolean).map((t) => el("p", { class: "lead" }, t));
}

// A table, folded behind its first rows; printing unfolds it.
const FIRST_ROWS = 25;

function plainTable(columns, rows, caption, first = FIRST_ROWS) {
  const body = el("tbody");
  const right = columns.map((c) => (c.align ? c.align === "right" : KINDS[c.kind ?? "text"].right));
  const cells = (row) => row.map((value, i) => {
    const kind = columns[i].kind ?? "text";
    const attributes = { class: [right[i] ? "right" : "", kind === "code" ? "code" : ""].join(" ").trim() || null };
    return el("td", attributes, show(kind, value));
  });
  const put = (some) => body.append(...some.map((row) => el("tr", null, cells(row))));
  put(rows.slice(0, first));
  const head = columns.map((c, i) => el("th", { scope: "col", class: right[i] ? "right" : null }, c.title));
  const table = el("table", { class: "plain" }, el("caption", { class: "unseen" }, caption), el("thead", null, el("tr", null, head)), body);
  const box = el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": caption }, table);
  return rows.length > first ? [box, moreButton(rows.length, () => put(rows.slice(first)))] : [box];
}

function moreButton(total, onAll) {
  const button = el("button", { type: "button", class: "more" }, `Show all ${plural(total, "row")}`);
  const all = () => {
    if (!button.isConnected) return;
    onAll();
    button.remove();
  };
  button.addEventListener("click", all);
  window.addEventListener("beforeprint", all);
  return button;
}

// What a picture shows, as a table that is made when somebody opens it.
function twin(columns, rows, caption) {
  const box = el("details", { class: "twin" }, el("summary", null, "As a table"));
  box.addEventListener("toggle", () => {
    if (box.open && box.childElementCount === 1) box.append(...plainTable(columns, rows(), caption));
  });
  return box;
}

// Radio buttons in a row: one of several ways to see something.
function choice(legend, options, chosen, onChange) {
  const name = unique("choice");
  const radios = options.map(([value, label]) => {
    const input = el("input", { type: "radio", name, value, onchange: () => onChange(value) });
    input.checked = value === chosen;
    return el("label", null, input, el("span", null, label));
  });
  return el("fieldset", { class: "choice" }, el("legend", null, legend), el("div", null, radios));
}

// What somebody points at or moves to, in words below a chart. It is read out when it is moved to by keyboard.
function status(hint) {
  const line = el("p", { class: "status", "aria-live": "polite" }, hint);
  return { line, say: (text) => (line.textContent = text || hint) };
}

// Calls back with the width of an element, now and whenever it changes.
function onWidth(element, callback) {
  let last = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width && width !== last) callback((last = width));
  }).observe(element);
}
