// Lines, bars, heat maps and pictures. Each has the same numbers as text: nothing is said by colour or place alone.

// -- scales

// About `most` round numbers from low to high.
function ticks(low, high, most) {
  const step = niceStep((high - low) / Math.max(1, most));
  const out = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) out.push(at * step);
  return out;
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5, 10].find((n) => n * power >= rough * (1 - 1e-9)) ?? 10);
}

// Where values are between 0 and 1, and which are written at the axis.
function scaleOf(values, log) {
  const shown = values.filter((v) => isNumber(v) && (!log || v > 0));
  if (!shown.length) return null;
  let low = shown.reduce((a, b) => Math.min(a, b));
  let high = shown.reduce((a, b) => Math.max(a, b));
  if (log) return logScale(low, high);
  if (low > 0 && low < high / 2) low = 0;
  if (low === high) [low, high] = [Math.min(0, low), Math.max(0, high) || 1];
  const marks = ticks(low, high, 5);
  const step = marks.length > 1 ? marks[1] - marks[0] : 1;
  [low, high] = [Math.min(low, Math.floor(low / step) * step), Math.max(high, Math.ceil(high / step - 1e-9) * step)];
  return { at: (v) => (v - low) / (high - low), marks: ticks(low, high, 5) };
}

// Between round numbers: powers of ten, or 1, 2 and 5 of each where there are few of them.
function logScale(low, high) {
  const steps = high / low < 300 ? [1, 2, 5] : [1];
  const round = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) round.push(...steps.map((n) => n * 10 ** power));
  let first = round.findLastIndex((v) => v <= low * (1 + 1e-9));
  let last = round.findIndex((v) => v >= high * (1 - 1e-9));
  if (first === last) [first, last] = [Math.max(0, first - 1), last + 1];
  const within = round.slice(Math.max(0, first), last + 1);
  const [from, to] = [Math.log10(within[0]), Math.log10(within[within.length - 1])];
  const every = Math.max(1, Math.ceil(within.length / 8));
  return { at: (v) => (v > 0 ? (Math.log10(v) - from) / (to - from) : NaN), marks: within.filter((_, i) => i % every === 0) };
}

// -- lines

const SERIES = 8; // colours and dashes in page.css
const CHART = { high: 260, top: 12, bottom: 44, right: 14 };

function drawLines(section) {
  const { x, series, log } = section;
  const scale = scaleOf(series.flatMap((s) => s.values), log);
  if (!scale || !x.length) return [el("p", { class: "empty" }, "No values to draw.")];
  const place = el("div", { class: "chart" });
  const { line, say } = status("Point at the chart or move the slider to read values.");
  const slider = el("input", { type: "range", min: 0, max: x.length - 1, value: 0, "aria-label": `Position: ${section.x_label}` });
  const chart = { section, scale, place, at: -1 };
  const move = (at) => {
    chart.at = at;
    chart.cross?.(at);
    const values = series.map((s) => `${s.name}: ${show("number", s.values[at])}`).join("; ");
    slider.setAttribute("aria-valuetext", `${x[at]}; ${values}`);
    say(at < 0 ? "" : `${section.x_label} ${x[at]} \u2014 ${values}`);
  };
  slider.addEventListener("input", () => move(Number(slider.value)));
  slider.addEventListener("focus", () => move(Number(slider.value)));
  chart.move = (at) => {
    slider.value = at;
    move(at);
  };
  onWidth(place, (width) => place.replaceChildren(linesPicture(chart, width)));
  const head = [{ title: section.x_label, align: "left" }, ...series.map((s) => ({ title: s.name, kind: "number" }))];
  const rows = () => x.map((value, i) => [String(value), ...series.map((s) => s.values[i])]);
  return [legend(series), place, slider, line, twin(head, rows, section.title)];
}

function legend(series) {
  const items = series.map((s, i) => {
    const sample = draw("svg", { class: "sample", width: 28, height: 10, "aria-hidden": "true" }, draw("line", { x1: 0, x2: 28, y1: 5, y2: 5, class: `series series-${i % SERIES}` }));
    return el("li", null, sample, s.name);
  });
  return el("ul", { class: "legend" }, items);
}

function linesPicture(chart, width) {
  const { section, scale } = chart;
  const { x, series } = section;
  const marks = scale.marks.map((v) => [scale.at(v), numberText(v)]);
  const left = 12 + 7 * Math.max(...marks.map(([, text]) => text.length));
  const right = width - CHART.right;
  const bottom = CHART.high - CHART.bottom;
  const toX = (i) => (x.length < 2 ? (left + right) / 2 : left + ((right - left) * i) / (x.length - 1));
  const toY = (share) => bottom - (bottom - CHART.top) * share;
  const axis = marks.flatMap(([share, text]) => [
    draw("line", { x1: left, x2: right, y1: toY(share), y2: toY(share), class: "grid" }),
    draw("text", { x: left - 6, y: toY(share) + 4, "text-anchor": "end" }, text),
  ]);
  const labels = xLabels(x, toX, width).map(([at, text, anchor]) => draw("text", { x: at, y: bottom + 17, "text-anchor": anchor }, text));
  const words = draw("text", { x: (left + right) / 2, y: CHART.high - 8, "text-anchor": "middle", class: "axis" }, section.x_label);
  const drawn = series.map((s, i) => {
    const shares = s.values.map((v) => (isNumber(v) ? scale.at(v) : NaN));
    const path = draw("path", { d: pathOf(shares, toX, toY), class: `series series-${i % SERIES}` });
    const alone = shares.flatMap((share, at) => (isNumber(share) && !isNumber(shares[at - 1]) && !isNumber(shares[at + 1]) ? [draw("circle", { cx: toX(at), cy: toY(share), r: 3, class: `point series-${i % SERIES}` })] : []));
    return [path, alone];
  });
  const cross = draw("line", { y1: CHART.top, y2: bottom, class: "cross", visibility: "hidden" });
  const svg = draw("svg", { width, height: CHART.high, role: "img", "aria-label": `${section.title}: ${section.y_label} by ${section.x_label}` }, axis, labels, words, drawn.flat(2), cross);
  chart.cross = (at) => {
    fill(cross, { visibility: at < 0 ? "hidden" : "visible", x1: toX(at), x2: toX(at) }, []);
  };
  chart.cross(chart.at);
  svg.addEventListener("pointermove", (event) => {
    const share = (event.clientX - svg.getBoundingClientRect().left - left) / Math.max(1, right - left);
    chart.move(Math.max(0, Math.min(x.length - 1, Math.round(share * (x.length - 1)))));
  });
  return svg;
}

function pathOf(shares, toX, toY) {
  let path = "";
  shares.forEach((share, i) => {
    if (isNumber(share)) path += `${isNumber(shares[i - 1]) ? "L" : "M"}${toX(i).toFixed(1)} ${toY(share).toFixed(1)}`;
  });
  return path;
}

// As many as there is room for, none over another and none beyond the edges.
function xLabels(x, toX, width) {
  const out = [];
  const texts = x.map((v) => short(String(v), 16));
  const most = Math.max(...texts.map((t) => t.length)) * 7 + 14;
  const every = Math.max(1, Math.ceil((most * x.length) / Math.max(1, toX(x.length - 1) - toX(0))));
  const step = every > 2 ? niceStep(every) : every;
  let last = -Infinity;
  for (let i = 0; i < x.length; i += Math.ceil(step)) {
    const half = (texts[i].length * 7) / 2;
    const at = Math.max(half, Math.min(width - half, toX(i)));
    if (at - half < last) continue;
    out.push([at, texts[i], "middle"]);
    last = at + half + 8;
  }
  return out;
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}\u2026` : text);

// -- bars

function drawBars(section) {
  const { labels, values, unit, log } = section;
  const kind = section.value_kind ?? "number";
  const known = values.filter((v) => isNumber(v) && (!log || v > 0)).map(Math.abs);
  const most = known.reduce((a, b) => Math.max(a, b), 0) || 1;
  const least = known.reduce((a, b) => Math.min(a, b), most);
  const from = Math.log10(least) - 0.5;
  const share = (v) => (log ? (Math.log10(Math.abs(v)) - from) / (Math.log10(most) - from) : Math.abs(v) / most);
  const body = el("tbody");
  const row = (label, i) => {
    const value = values[i];
    const bar = el("div", { class: "bar", "aria-hidden": "true" });
    bar.style.width = isNumber(value) && (!log || value > 0) ? `${Math.max(0, Math.min(1, share(value))) * 100}%` : "0";
    return el("tr", null, el("th", { scope: "row" }, label), el("td", { class: "track" }, bar), el("td", { class: "right" }, show(kind, value)));
  };
  const put = (from_, to) => body.append(...labels.slice(from_, to).map((label, i) => row(label, from_ + i)));
  put(0, FIRST_ROWS);
  const head = el("thead", null, el("tr", null, el("th", { scope: "col" }, "Name"), el("td", null), el("th", { scope: "col", class: "right" }, log ? `${unit} (log)` : unit)));
  const table = el("table", { class: "bars" }, el("caption", { class: "unseen" }, section.title), head, body);
  return labels.length > FIRST_ROWS ? [table, moreButton(labels.length, () => put(FIRST_ROWS, labels.length))] : [table];
}

// -- heat maps

const NUMBERS_UP_TO = 12; // columns; with more of them the cells are colours, and the line below has the numbers

function drawHeatmap(section) {
  const { rows, columns, values, log } = section;
  const kind = section.value_kind ?? "number";
  const known = values.flat().filter((v) => isNumber(v) && (!log || v > 0));
  if (!known.length) return [el("p", { class: "empty" }, "No values to draw.")];
  const high = known.reduce((a, b) => Math.max(a, b));
  const low = log ? known.reduce((a, b) => Math.min(a, b)) : Math.min(0, known.reduce((a, b) => Math.min(a, b)));
  const span = (log ? Math.log10(high / low) : high - low) || 1;
  const heat = (v) => (log ? (v > 0 ? 0.06 + (0.94 * Math.log10(v / low)) / span : 0) : (v - low) / span);
  const { line, say } = status("Point at a cell, or move with the arrow keys, to read it.");
  const wide = columns.length <= NUMBERS_UP_TO;
  const cell = (value, r, c) => {
    const text = isNumber(value) && kind === "number" ? numberText(value, 3) : show(kind, value);
    const cell_ = el("td", { role: "gridcell", tabindex: -1, class: value === null ? "none" : "heat", "data-r": r, "data-c": c }, el("span", { class: wide ? null : "unseen" }, text));
    if (isNumber(value)) cell_.style.setProperty("--heat", `${(100 * Math.max(0, Math.min(1, heat(value)))).toFixed(1)}%`);
    return cell_;
  };
  const head = el("tr", { role: "row" }, el("th", { scope: "col", role: "columnheader" }, section.row_label ?? "layer"), columns.map((c) => el("th", { scope: "col", role: "columnheader", class: "turned" }, el("span", null, short(c, 40)))));
  const lines = rows.map((name, r) => el("tr", { role: "row" }, el("th", { scope: "row", role: "rowheader" }, name), columns.map((_, c) => cell(values[r][c], r, c))));
  const label = `${section.title}: ${section.unit}`;
  const table = el("table", { class: wide ? "heatmap numbers" : "heatmap", role: "grid", "aria-label": label }, el("thead", { role: "rowgroup" }, head), el("tbody", { role: "rowgroup" }, lines));
  const told = (r, c) => `${section.row_label ?? ""} ${rows[r]}, ${columns[c]}: ${show(kind, values[r][c])} (${section.unit})`.trim();
  rove(table, rows.length, columns.length, (r, c) => say(told(r, c)));
  return [heatLegend(section, kind, low, high), el("div", { class: "scroll tall" }, table), line];
}

function heatLegend(section, kind, low, high) {
  return el("p", { class: "legend heat-legend" }, el("span", null, `${section.unit}${section.log ? " (log)" : ""}: ${show(kind, low)}`), el("span", { class: "ramp", "aria-hidden": "true" }), el("span", null, show(kind, high)));
}

// One cell of a grid is in the order of Tab; arrows, Home and End move from it. `told` is called for where one is.
function rove(table, height, width, told) {
  const find = (r, c) => table.querySelector(`td[data-r="${r}"][data-c="${c}"]`);
  let at = [0, 0];
  find(0, 0)?.setAttribute("tabindex", "0");
  const go = (r, c) => {
    find(...at).setAttribute("tabindex", "-1");
    at = [Math.max(0, Math.min(height - 1, r)), Math.max(0, Math.min(width - 1, c))];
    const cell = find(...at);
    cell.setAttribute("tabindex", "0");
    cell.focus();
  };
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -width], End: [0, width], PageUp: [-10, 0], PageDown: [10, 0] };
  table.addEventListener("keydown", (event) => {
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    go(at[0] + move[0], at[1] + move[1]);
  });
  const tell = (event) => {
    const cell = event.target.closest("td[data-r]");
    if (cell) told(Number(cell.dataset.r), Number(cell.dataset.c));
  };
  table.addEventListener("focusin", tell);
  table.addEventListener("pointerover", tell);
  table.addEventListener("click", (event) => {
    const cell = event.target.closest("td[data-r]");
    if (cell) go(Number(cell.dataset.r), Number(cell.dataset.c));
  });
}

// -- pictures made by Python, which come as trees of elements that svg.py has let through

function grow([name, attributes, children]) {
  return draw(name, attributes, children.map((child) => (typeof child === "string" ? child : grow(child))));
}

function drawFigures(section) {
  return section.figures.map((figure) => {
    const svg = grow(figure.svg);
    fill(svg, { role: "img", "aria-label": svg.getAttribute("aria-label") ?? `${figure.title}. ${figure.caption}` }, []);
    const box = el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": figure.title }, svg);
    return el("figure", null, el("figcaption", null, el("strong", null, figure.title), " ", figure.caption), box);
  });
}

// -- tables and findings

function drawTable(section) {
  if (!section.rows.length) return [el("p", { class: "empty" }, "Nothing to list.")];
  return plainTable(section.columns, section.rows, section.title, section.first);
}

const SEVERITIES = [["error", "\u2716"], ["warning", "\u26a0"], ["note", "\u2139"]];

function drawFindings(section) {
  const checked = Object.entries(section.checked).filter(([, n]) => n !== null).map(([noun, n]) => `${show("count", n)} ${n === 1 ? noun.replace(/s$/, "") : noun}`);
  const found = SEVERITIES.map(([severity]) => section.findings.filter((f) => f.severity === severity).length);
  const counted = SEVERITIES.flatMap(([severity], i) => (found[i] ? [plural(found[i], severity)] : []));
  const text = section.findings.length ? `${counted.join(", ")}.` : "\u2714 No problems found.";
  const summary = el("p", { class: found[0] ? "verdict bad" : found[1] ? "verdict unsure" : "verdict" }, text, checked.length ? ` Checked: ${checked.join(", ")}.` : "");
  const item = (sign, finding) => el("li", { class: `finding ${finding.severity}` },
    el("p", null, el("span", { class: "badge" }, el("span", { "aria-hidden": "true" }, `${sign} `), finding.severity), " ", el("code", null, finding.id)),
    el("p", { class: "what" }, finding.text),
    finding.where && el("p", { class: "where" }, "where: ", el("code", null, finding.where)),
    finding.hint && el("p", { class: "hint" }, "hint: ", finding.hint));
  const all = SEVERITIES.flatMap(([severity, sign]) => section.findings.filter((f) => f.severity === severity).map((f) => item(sign, f)));
  const list = el("ul", { class: "findings" }, all.slice(0, FIRST_ROWS));
  const more = all.length > FIRST_ROWS ? moreButton(all.length, () => list.append(...all.slice(FIRST_ROWS))) : null;
  return all.length ? [summary, list, more] : [summary];
}
