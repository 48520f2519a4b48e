// Sizes as areas. Boxes are buttons, so that they can be reached and opened by keyboard; a text table says the same.

// What tensors are grouped by, and through which groups one goes down to a tensor.
const OUTSIDE = "outside layers";
const GROUPINGS = {
  layer: { title: "layer", key: (t, i) => t.layer(i) || OUTSIDE },
  module: { title: "module", key: (t, i) => t.module(i) || "(no name)" },
  dtype: { title: "dtype", key: (t, i) => t.column.get("dtype")?.text(i) ?? NONE },
  component: { title: "component", key: (t, i) => t.column.get("component")?.text(i) ?? NONE },
  tensor: { title: "tensor", key: (t, i) => t.names[i] },
};
const PATHS = [
  ["layer", "by layer", ["layer", "module", "tensor"]],
  ["module", "by module", ["module", "layer", "tensor"]],
  ["dtype", "by dtype", ["dtype", "module", "layer", "tensor"]],
  ["component", "by component", ["component", "module", "layer", "tensor"]],
];

// What a module does, as far as its name says; it is the colour of a box, with a legend. The first that fits counts.
const ROLES = [
  ["norm", "norms", /norm|(^|[._])ln(_|\d|$)/i],
  ["expert", "experts", /expert/i],
  ["attention", "attention", /attn|attention|(^|[._])[qkvo]_proj/i],
  ["mlp", "feed-forward", /mlp|ffn|feed_forward|(up|down|gate)_proj/i],
  ["embedding", "embeddings and head", /embed|lm_head|wte|wpe|output_layer/i],
  ["other", "other", /(?:)/],
];
const roleOf = (module) => ROLES.find(([, , pattern]) => pattern.test(module))[0];

const MOST_BOXES = 130; // layers of the deepest models
const INNER_BOXES = 24;

function drawTreemap(section, report) {
  const tensors = report.tensors;
  const told = PATHS.filter(([id]) => different(tensors, GROUPINGS[id].key));
  const paths = told.length ? told : PATHS.slice(1, 2);
  const map = { tensors, title: section.title, path: paths[0][2], trail: [], open: (i) => openTensor(i, [i]) };
  map.place = el("div", { class: "treemap", role: "group", "aria-label": "Treemap of sizes" });
  map.crumbs = el("nav", { class: "crumbs", "aria-label": "Where in the treemap" });
  map.twin = el("div");
  map.told = status("Click a box to open it. Keys: arrows move, Enter opens, Escape goes back.");
  const ways = choice("Group", paths.map(([id, title]) => [id, title]), paths[0][0], (id) => {
    map.path = paths.find(([way]) => way === id)[2];
    map.trail = [];
    arrange(map);
  });
  map.place.addEventListener("keydown", (event) => treemapKey(map, event));
  onWidth(map.place, (width) => {
    map.width = width;
    lay(map);
  });
  gather(map);
  return [ways, map.crumbs, map.place, rolesLegend(tensors), map.told.line, map.twin];
}

// Whether a grouping has more than one group: a map of one box shows nothing.
function different(tensors, key) {
  const first = key(tensors, 0);
  for (let i = 1; i < tensors.count; i += 1) if (key(tensors, i) !== first) return true;
  return false;
}

// The groups of the level that the trail has come to: layers in their order, others largest first; the rest are one group.
function gather(map) {
  const { tensors, path, trail } = map;
  let chosen = null;
  for (const { level, key } of trail) {
    const group = GROUPINGS[level].key;
    const every = chosen ?? Uint32Array.from({ length: tensors.count }, (_, i) => i);
    chosen = every.filter((i) => group(tensors, i) === key);
  }
  map.level = path[trail.length];
  map.inner = path[trail.length + 1];
  map.groups = groupsOf(tensors, chosen, map.level, map.inner);
  map.total = map.groups.reduce((sum, g) => sum + g.bytes, 0);
  map.boxes = map.groups.slice(0, MOST_BOXES).filter((g) => g.bytes > 0);
  const rest = map.groups.slice(MOST_BOXES);
  const left = rest.reduce((sum, g) => sum + g.bytes, 0);
  if (left) map.boxes.push({ key: null, label: `${rest.length} smaller`, bytes: left, count: rest.reduce((n, g) => n + g.count, 0), inner: new Map(), role: "other" });
  putCrumbs(map);
  putTwin(map);
}

function groupsOf(tensors, chosen, level, inner) {
  const found = new Map();
  const { key } = GROUPINGS[level];
  const innerKey = inner && inner !== "tensor" ? GROUPINGS[inner].key : (t, i) => t.module(i);
  const n = chosen ? chosen.length : tensors.count;
  for (let at = 0; at < n; at += 1) {
    const i = chosen ? chosen[at] : at;
    const k = key(tensors, i);
    let group = found.get(k);
    if (!group) found.set(k, (group = { key: k, label: k, bytes: 0, count: 0, first: i, inner: new Map() }));
    const size = tensors.bytes(i);
    group.bytes += size;
    group.count += 1;
    const name = innerKey(tensors, i);
    const part = group.inner.get(name);
    if (part) part.bytes += size;
    else group.inner.set(name, { label: name, bytes: size, role: roleOf(tensors.module(i)) });
  }
  const groups = [...found.values()];
  for (const group of groups) group.role = [...group.inner.values()].reduce((a, b) => (b.bytes > a.bytes ? b : a)).role;
  if (level !== "layer") return groups.sort((a, b) => b.bytes - a.bytes);
  const outside = (group) => group.key === OUTSIDE;
  return groups.sort((a, b) => outside(a) - outside(b) || tensors.compareNames(a.first, b.first));
}

// Areas in proportion to bytes, as near to squares as they can be: rows along the shorter side (Bruls and others, 2000),
// or in the order of the items along the width, one row below the other (Bederson and others, 2002).
function squarify(items, x, y, width, height, ordered = false) {
  const out = [];
  const total = items.reduce((sum, item) => sum + item.bytes, 0);
  const scale = total > 0 ? (width * height) / total : 0;
  const areas = items.map((item) => item.bytes * scale);
  let at = 0;
  while (at < items.length && width > 0 && height > 0) {
    const along = ordered || width < height;
    const side = along ? width : height;
    let end = at + 1;
    let sum = areas[at];
    let best = ratio(areas.slice(at, end), sum, side);
    while (end < items.length) {
      const next = ratio(areas.slice(at, end + 1), sum + areas[end], side);
      if (next > best) break;
      best = next;
      sum += areas[end];
      end += 1;
    }
    const depth = sum / side;
    let from = 0;
    for (let i = at; i < end; i += 1) {
      const length = areas[i] / depth;
      out.push(along ? { item: items[i], x: x + from, y, w: length, h: depth } : { item: items[i], x, y: y + from, w: depth, h: length });
      from += length;
    }
    if (along) [y, height] = [y + depth, height - depth];
    else [x, width] = [x + depth, width - depth];
    at = end;
  }
  return out;
}

// How far the boxes of a row are from squares, on average over their areas.
function ratio(areas, sum, side) {
  const depth = sum / side;
  return areas.reduce((all, area) => all + (area / sum) * Math.max(area / depth / depth, (depth * depth) / area), 0);
}

const pen = document.createElement("canvas").getContext("2d");
function textWidth(text, font) {
  pen.font = font;
  return pen.measureText(text).width;
}
const LABEL = { font: "600 12px system-ui, sans-serif", thin: "12px system-ui, sans-serif", size: 12, line: 16, pad: 5 };

// The longest of some ways to write a label that there is room for, "" if there is none.
function fitting(ways, width, font = LABEL.font) {
  return ways.find((text) => textWidth(text, font) <= width) ?? "";
}

// "model.layers.12" may be written as "layers.12" and as "12".
function ways(label) {
  const parts = label.split(".");
  return parts.map((_, i) => parts.slice(i).join(".")).filter(Boolean);
}

function lay(map) {
  if (!map.width) return;
  const height = map.width < 560 ? 400 : 440;
  map.place.style.height = `${height}px`;
  const laid = squarify(map.boxes, 0, 0, map.width, height, map.level === "layer");
  map.buttons = laid.map((box) => treemapBox(map, box));
  map.place.replaceChildren(...map.buttons);
  map.buttons[0]?.setAttribute("tabindex", "0");
  if (!map.buttons.length) map.place.append(el("p", { class: "empty" }, "These tensors have no bytes."));
}

function treemapBox(map, { item, x, y, w, h }) {
  const percent = shareText(item.bytes / (map.total || 1));
  const words = `${item.label}: ${bytesText(item.bytes)}, ${percent}, ${plural(item.count, "tensor")}`;
  const button = el("button", { type: "button", class: `box role-${item.role}`, tabindex: -1, "aria-label": words });
  place(button, x, y, w, h);
  const room = w - 2 * LABEL.pad - 2;
  const label = h >= LABEL.line + 4 ? fitting(item.key === null ? [item.label] : ways(item.label), room) : "";
  let used = 3;
  const write = (text, kind) => {
    const line = el("span", { class: kind, "aria-hidden": "true" }, text);
    line.style.top = `${used}px`;
    button.append(line);
    used += LABEL.line + 1;
  };
  if (label) write(label, "label");
  const size = label && h >= used + LABEL.line + 4 ? fitting([`${bytesText(item.bytes)} \u00b7 ${percent}`, bytesText(item.bytes)], room, LABEL.thin) : "";
  if (size) write(size, "label size");
  innerBoxes(button, item, w - 2, h - 2, used);
  button.addEventListener("click", () => into(map, item));
  const tell = () => map.told.say(words);
  button.addEventListener("focus", tell);
  button.addEventListener("pointerenter", tell);
  return button;
}

function place(element, x, y, w, h) {
  Object.assign(element.style, { left: `${x}px`, top: `${y}px`, width: `${Math.max(0, w)}px`, height: `${Math.max(0, h)}px` });
}

// What a box is made of: not reachable, because opening the box shows it as boxes of their own.
function innerBoxes(button, item, w, h, used) {
  if (item.inner.size < 2 || h - used < 14 || w < 24) return;
  button.classList.add("nested");
  const all = [...item.inner.values()].filter((part) => part.bytes > 0).sort((a, b) => b.bytes - a.bytes).slice(0, INNER_BOXES);
  for (const { item: part, x, y, w: wide, h: high } of squarify(all, 3, used, w - 6, h - used - 3)) {
    if (wide < 2 || high < 2) continue;
    const text = high >= LABEL.line && wide > 30 ? fitting(ways(part.label), wide - 8) : "";
    const cell = el("span", { class: `cell role-${part.role}`, "aria-hidden": "true" }, text);
    place(cell, x, y, wide - 1, high - 1);
    button.append(cell);
  }
}

function into(map, item) {
  if (item.key === null) {
    map.twin.querySelector("details").open = true;
    map.twin.scrollIntoView({ block: "nearest" });
    return;
  }
  if (map.level === "tensor" || (map.inner === "tensor" && item.count === 1)) {
    map.open(item.first);
    return;
  }
  map.trail.push({ level: map.level, key: item.key });
  arrange(map, true);
}

function arrange(map, focused = false) {
  gather(map);
  lay(map);
  if (focused) map.buttons[0]?.focus();
}

function treemapKey(map, event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const at = map.buttons.indexOf(document.activeElement);
  const goal = step ? at + step : { Home: 0, End: map.buttons.length - 1 }[event.key];
  if (event.key === "Escape" || event.key === "Backspace") {
    if (map.trail.pop()) arrange(map, true);
  } else if (goal === undefined || !map.buttons[goal]) return;
  else {
    map.buttons[at]?.setAttribute("tabindex", "-1");
    map.buttons[goal].setAttribute("tabindex", "0");
    map.buttons[goal].focus();
  }
  event.preventDefault();
}

function putCrumbs(map) {
  const crumb = (text, depth) => {
    const here = depth === map.trail.length;
    const goto = () => {
      map.trail.length = depth;
      arrange(map, true);
    };
    return el("li", null, here ? el("span", { "aria-current": "true" }, text) : el("button", { type: "button", onclick: goto }, text));
  };
  const items = [crumb("Everything", 0), ...map.trail.map(({ key }, i) => crumb(key, i + 1))];
  const query = map.trail.map(({ level, key }) => `${level}:"${key}"`).join(" ");
  const findable = map.trail.length && !query.replace(/:"|" |"$/g, "").includes('"') && map.trail.every(({ key }) => ![OUTSIDE, NONE, "(no name)"].includes(key));
  const link = findable && searchTensors ? el("button", { type: "button", class: "small", onclick: () => searchTensors(query) }, "Show in the table") : null;
  map.crumbs.replaceChildren(el("ol", null, items), ...(link ? [link] : []));
}

function putTwin(map) {
  const columns = [{ title: GROUPINGS[map.level].title, kind: "code" }, { title: "tensors", kind: "count" }, { title: "size", kind: "bytes" }, { title: "share", kind: "share" }];
  const rows = () => map.groups.map((g) => [g.label, g.count, g.bytes, map.total ? g.bytes / map.total : 0]);
  const open = map.twin.querySelector("details")?.open;
  map.twin.replaceChildren(twin(columns, rows, "Sizes in the treemap"));
  if (open) map.twin.firstChild.open = true;
}

function rolesLegend(tensors) {
  const bytes = new Map();
  const roles = tensors.templates.map((t) => roleOf(t.module));
  for (let i = 0; i < tensors.count; i += 1) {
    const role = roles[tensors.template[i]];
    bytes.set(role, (bytes.get(role) ?? 0) + tensors.bytes(i));
  }
  const total = [...bytes.values()].reduce((a, b) => a + b, 0) || 1;
  const items = ROLES.filter(([id]) => bytes.get(id)).map(([id, title]) => el("li", null, el("span", { class: `swatch role-${id}`, "aria-hidden": "true" }), `${title} ${shareText(bytes.get(id) / total)}`));
  return el("ul", { class: "legend" }, items);
}
