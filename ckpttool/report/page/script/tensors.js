// The table of tensors. Only the rows that can be seen are in the page, so 100,000 of them cost as much as thirty.

const SHOWN_DIGITS = 4; // in the table; the details of a tensor have all
const AROUND = 8; // rows drawn beyond each edge
const narrow = window.matchMedia("(max-width: 640px)");
// Pixels; page.css has the same. Where it is narrow, names have two lines.
const rowHeight = () => (narrow.matches ? 52 : 32);
const FOUND_IN_TEXT = ["dtype", "component", "file", "state"];
let searchTensors = null; // set when there is a table: search for something and show it
let openTensor = () => {};

// -- searching

// A query is words that are all in a name, globs of whole names, `re:` and a pattern, or `layer:`, `module:`, `dtype:`
// ... with a value. Returns what says whether a tensor fits; throws SyntaxError for a pattern that is none.
function parseQuery(query, tensors) {
  const text = query.trim();
  if (!text) return null;
  if (text.startsWith("re:")) {
    const pattern = new RegExp(text.slice(3), "i");
    return (i) => pattern.test(tensors.names[i]);
  }
  const tests = [...text.matchAll(/(\w+):(?:"([^"]*)"|(\S+))|\S+/g)].map((m) => wordTest(m, tensors));
  return (i) => tests.every((test) => test(i));
}

function wordTest([word, field, quoted, bare], tensors) {
  const wanted = (quoted ?? bare)?.toLowerCase();
  if (field === "layer") return (i) => wanted === tensors.layer(i).toLowerCase() || wanted === String(tensors.layer(i)).split(".").pop();
  if (field === "module") return byKind(tensors.templates.map((t) => t.module.toLowerCase() === wanted), (i) => tensors.template[i]);
  if (FOUND_IN_TEXT.includes(field) && tensors.column.has(field)) {
    const column = tensors.column.get(field);
    return byKind(column.different.map((text) => text.toLowerCase() === wanted), (i) => column.index[i]);
  }
  const lower = tensors.lower;
  const needle = word.toLowerCase();
  if (/[*?[]/.test(word)) {
    const pattern = globPattern(needle);
    return (i) => pattern.test(lower[i]);
  }
  return (i) => lower[i].includes(needle);
}
const byKind = (fits, kindOf) => (i) => fits[kindOf(i)];

function globPattern(glob) {
  let out = "";
  for (let at = 0; at < glob.length; at += 1) {
    const end = glob[at] === "[" ? glob.indexOf("]", at + 2) : -1;
    if (glob[at] === "*") out += ".*";
    else if (glob[at] === "?") out += ".";
    else if (end > 0) {
      out += `[${glob.slice(at + 1, end).replace(/^!/, "^").replace(/[\\\]]/g, "\\$&")}]`;
      at = end;
    } else out += glob[at].replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&");
  }
  return new RegExp(`^${out}$`, "s");
}

// -- the model of the table: which rows there are, in which order

class Rows {
  constructor(tensors) {
    this.tensors = tensors;
    this.query = "";
    this.sort = null; // { column: id or "name", down }
    this.folded = tensors.count > 300;
    this.opened = new Set();
    this.found = this.find();
    this.order();
  }

  find() {
    const { tensors } = this;
    const test = parseQuery(this.query, tensors);
    const found = new Uint32Array(tensors.count);
    let n = 0;
    for (let i = 0; i < tensors.count; i += 1) if (!test || test(i)) found[n++] = i;
    return found.subarray(0, n);
  }

  search(query) {
    this.query = query;
    this.found = this.find();
    this.order();
  }

  // Sorts what was found, folds it, and lists what is to be seen: tensors as numbers, groups as objects.
  order() {
    const sorted = this.sorted(this.found.slice());
    if (this.folded) this.groups = this.sortGroups(this.group(sorted));
    this.inOrder = this.folded ? null : sorted;
    this.list();
  }

  list() {
    if (!this.folded) {
      this.entries = this.inOrder;
      return;
    }
    const out = [];
    for (const group of this.groups) {
      if (group.members.length === 1) out.push(group.members[0]);
      else {
        out.push(group);
        if (this.opened.has(group.template)) for (const i of group.members) out.push({ tensor: i, group });
      }
    }
    this.entries = out;
  }

  // Tensors in the order of the table, folded ones included.
  get every() {
    return this.folded ? this.groups.flatMap((g) => g.members) : [...this.inOrder];
  }

  sorted(found) {
    if (!this.sort) return found;
    const { column, down } = this.sort;
    const sign = down ? -1 : 1;
    if (column === "name") return found.sort((a, b) => sign * this.tensors.compareNames(a, b));
    const { keys } = this.tensors.column.get(column);
    return found.sort((a, b) => compareKeys(keys[a], keys[b], sign) || a - b);
  }

  group(sorted) {
    const found = new Map();
    for (const i of sorted) {
      const template = this.tensors.template[i];
      const group = found.get(template);
      if (group) group.members.push(i);
      else found.set(template, { template, members: [i] });
    }
    return [...found.values()];
  }

  // Sizes of a group add up; of all else its first member decides, which has the largest or smallest value.
  sortGroups(groups) {
    const column = this.sort && this.tensors.column.get(this.sort.column);
    if (column?.kind !== "bytes") return groups;
    const sign = this.sort.down ? -1 : 1;
    const sums = new Map(groups.map((g) => [g, g.members.reduce((sum, i) => sum + (column.keys[i] || 0), 0)]));
    return groups.sort((a, b) => compareKeys(sums.get(a), sums.get(b), sign));
  }

  // model.layers.{0..31}.mlp.up_proj.weight
  foldedName(group) {
    if (group.name) return group.name;
    const { tensors } = this;
    const pieces = tensors.templates[group.template].text;
    let name = pieces[0];
    for (let slot = 1; slot < pieces.length; slot += 1) {
      const numbers = [...new Set(group.members.map((i) => tensors.numbers[tensors.first[i] + slot - 1]))].sort((a, b) => a - b);
      name += (numbers.length > 1 ? `{${rangesText(numbers)}}` : numbers[0]) + pieces[slot];
    }
    return (group.name = name);
  }

  foldedText(group, column) {
    group.cells ??= new Map();
    if (!group.cells.has(column.id)) group.cells.set(column.id, this.summed(group, column));
    return group.cells.get(column.id);
  }

  summed(group, column) {
    const { keys } = column;
    if (column.kind === "bytes") return column.format(group.members.reduce((sum, i) => sum + (keys[i] || 0), 0));
    let [low, high] = [group.members[0], group.members[0]];
    for (const i of group.members) {
      if (keys[i] < keys[low] || Number.isNaN(keys[low])) low = i;
      if (keys[i] > keys[high] || Number.isNaN(keys[high])) high = i;
    }
    const [from, to] = [low, high].map((i) => column.text(i, SHOWN_DIGITS - 1));
    if (from === to) return from;
    return column.index ? "several" : `${from} \u2026 ${to}`;
  }
}

// Tensors without a value come last, whichever way the others are sorted.
function compareKeys(a, b, sign) {
  if (a === b) return 0;
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) ? (Number.isNaN(b) ? 0 : 1) : -1;
  return a < b ? -sign : sign;
}

// -- the table

class TensorView {
  constructor(tensors) {
    this.tensors = tensors;
    this.rows = new Rows(tensors);
    this.id = unique("tensors");
    this.active = 0;
    this.chosen = new Set(this.usual());
    this.build();
  }

  usual() {
    return this.tensors.columns.filter((c) => (narrow.matches ? c.id === "bytes" : !c.hidden)).map((c) => c.id);
  }

  get columns() {
    return this.tensors.columns.filter((c) => this.chosen.has(c.id));
  }

  build() {
    this.search = el("input", { type: "search", id: `${this.id}-search`, autocomplete: "off", spellcheck: "false", placeholder: "words, *glob*, re:pattern", "aria-describedby": `${this.id}-count` });
    this.search.addEventListener("input", () => this.find(this.search.value));
    this.counted = el("p", { class: "counted", id: `${this.id}-count`, role: "status" });
    this.fold = el("input", { type: "checkbox" });
    this.fold.checked = this.rows.folded;
    this.fold.addEventListener("change", () => {
      this.rows.folded = this.fold.checked;
      this.rows.order();
      this.putHead();
      this.changed();
    });
    this.colgroup = el("colgroup");
    this.head = el("thead", { role: "rowgroup" });
    this.body = el("tbody", { role: "rowgroup" });
    this.table = el("table", { class: "tensors", role: "treegrid", tabindex: 0, "aria-label": "Tensors", "aria-describedby": `${this.id}-keys` }, this.colgroup, this.head, this.body);
    this.box = el("div", { class: "virtual" }, this.table);
    this.box.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.table.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("click", (event) => this.clicked(event));
    onWidth(this.box, () => {
      this.putHead();
      this.drawRows();
    });
    window.addEventListener("beforeprint", () => this.print());
    window.addEventListener("afterprint", () => this.changed());
    this.putHead();
    this.changed();
  }

  get elements() {
    const find = el("div", { class: "find" }, el("label", { for: this.search.id }, "Search"), this.search, el("kbd", { "aria-hidden": "true" }, "/"));
    const fold = el("label", { class: "check", title: "Tensors whose names differ only in numbers as one row" }, this.fold, el("span", null, "Fold layers and experts"));
    const copies = [["CSV", () => this.csv()], ["JSON", () => this.json()]].map(([name, text]) => el("button", { type: "button", class: "small", onclick: (event) => this.copy(event.target, name, text()) }, `Copy ${name}`));
    const tools = el("div", { class: "tools" }, find, fold, this.chooser(), el("div", { class: "copies" }, copies));
    const keys = el("p", { class: "keys", id: `${this.id}-keys` }, "Keys: ", ...[["/", "searches"], ["\u2191 \u2193", "move"], ["\u2192 \u2190", "unfold and fold"], ["Enter", "opens"]].flatMap(([key, does], i) => [i ? ", " : "", el("kbd", null, key), ` ${does}`]), ".");
    return [tools, this.counted, this.box, keys];
  }

  chooser() {
    const box = (column) => {
      const input = el("input", { type: "checkbox", "data-column": column.id });
      input.checked = this.chosen.has(column.id);
      input.addEventListener("change", () => {
        if (input.checked) this.chosen.add(column.id);
        else this.chosen.delete(column.id);
        this.putHead();
        this.drawRows();
      });
      return el("label", { class: "check", title: column.help }, input, el("span", null, column.title));
    };
    const menu = el("details", { class: "menu" }, el("summary", null, "Columns"), el("div", { class: "sheet" }, this.tensors.columns.map(box)));
    menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      menu.open = false;
      menu.querySelector("summary").focus();
    });
    document.addEventListener("click", (event) => menu.contains(event.target) || (menu.open = false));
    return menu;
  }

  // -- what is seen

  putHead() {
    const named = { id: "name", title: "Name", right: false };
    const characters = this.tensors.templates.reduce((most, t) => Math.max(most, t.text.join("{0..10}").length + (t.text.length > 1 ? 9 : 0)), 20);
    const others = this.columns.map((c) => (this.rows.folded ? c.foldedWidth : c.width));
    const left = narrow.matches ? (this.box.clientWidth || 340) / 7.9 - 3.2 - (others[0] ?? 0) : 68;
    const widths = [Math.max(22, Math.min(characters, left)), ...others];
    this.colgroup.replaceChildren(...widths.map((ch) => {
      const col = el("col");
      col.style.width = `calc(${ch} * var(--ch) + 12px)`;
      return col;
    }));
    this.table.style.width = `calc(${widths.reduce((a, b) => a + b, 0)} * var(--ch) + ${12 * widths.length}px)`;
    const cell = (column) => {
      const button = el("button", { type: "button", title: column.help, onclick: () => this.sortBy(column) }, column.title, el("span", { class: "arrow", "aria-hidden": "true" }));
      return el("th", { role: "columnheader", scope: "col", class: column.right ? "right" : null, "aria-sort": "none", "data-column": column.id }, button);
    };
    this.head.replaceChildren(el("tr", { role: "row", "aria-rowindex": 1 }, cell(named), this.columns.map(cell)));
    this.table.setAttribute("aria-colcount", this.columns.length + 1);
    this.showSort();
  }

  showSort() {
    const { sort } = this.rows;
    for (const th of this.head.querySelectorAll("th")) {
      const mine = sort?.column === th.dataset.column;
      th.setAttribute("aria-sort", mine ? (sort.down ? "descending" : "ascending") : "none");
      th.querySelector(".arrow").textContent = mine ? (sort.down ? " \u25bc" : " \u25b2") : "";
    }
  }

  // First by what people look for: large numbers, and names from the beginning; then the other way; then as it was.
  sortBy(column) {
    const { rows } = this;
    const firstDown = column.right;
    if (rows.sort?.column !== column.id) rows.sort = { column: column.id, down: firstDown };
    else if (rows.sort.down === firstDown) rows.sort.down = !firstDown;
    else rows.sort = null;
    rows.order();
    this.showSort();
    this.changed();
    performance.mark("ckpttool:sorted");
  }

  find(query) {
    try {
      this.rows.search(query);
      this.search.removeAttribute("aria-invalid");
    } catch (error) {
      this.search.setAttribute("aria-invalid", "true");
      this.counted.textContent = `This is not a pattern: ${error.message}`;
      return;
    }
    this.changed();
    performance.mark("ckpttool:filtered");
  }

  // After a search, a sort, a fold: from the first row on.
  changed() {
    this.active = 0;
    this.box.scrollTop = 0;
    this.count();
    this.drawRows();
  }

  count() {
    const { found } = this.rows;
    let size = 0;
    for (const i of found) size += this.tensors.bytes(i);
    const all = found.length === this.tensors.count ? "" : ` of ${GROUPED.format(this.tensors.count)}`;
    this.counted.textContent = `${GROUPED.format(found.length)}${all} tensor${this.tensors.count === 1 ? "" : "s"}, ${bytesText(size)}${this.rows.folded ? `, in ${plural(this.rows.groups.length, "row")}` : ""}`;
  }

  scrolled() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.drawRows();
    });
  }

  drawRows(all = false) {
    const { entries } = this.rows;
    const row = rowHeight();
    this.box.style.setProperty("--rows", Math.max(2, entries.length));
    const high = this.box.clientHeight || 480;
    const from = all ? 0 : Math.max(0, Math.floor(this.box.scrollTop / row) - AROUND);
    const to = all ? Math.min(entries.length, all) : Math.min(entries.length, Math.ceil((this.box.scrollTop + high) / row) + AROUND);
    const drawn = [];
    for (let at = from; at < to; at += 1) drawn.push(this.row(entries[at], at));
    if (!entries.length) drawn.push(el("tr", { role: "row" }, el("td", { role: "gridcell", colspan: this.columns.length + 1, class: "empty" }, "No tensor fits.")));
    this.body.replaceChildren(...this.space(from), ...drawn, ...this.space(all ? 0 : entries.length - to));
    this.table.setAttribute("aria-rowcount", entries.length + 1);
    this.point();
  }

  // Stands for rows that are not drawn.
  space(rows) {
    if (rows <= 0) return [];
    const cell = el("td", { colspan: this.columns.length + 1 });
    cell.style.height = `${rows * rowHeight()}px`;
    return [el("tr", { class: "space", "aria-hidden": "true" }, cell)];
  }

  row(entry, at) {
    const tensor = typeof entry === "number" ? entry : entry.tensor;
    const inside = typeof entry === "object" && entry.tensor !== undefined;
    const group = tensor === undefined ? entry : null;
    const open = group && this.rows.opened.has(group.template);
    const name = group ? this.rows.foldedName(group) : this.tensors.names[tensor];
    const mark = group ? el("span", { class: "twist", "aria-hidden": "true" }, open ? "\u25be" : "\u25b8") : null;
    const times = group ? el("span", { class: "times" }, `${GROUPED.format(group.members.length)}\u00d7`) : null;
    const label = el("td", { role: "gridcell", class: inside ? "name inside" : "name" }, el("span", { class: "cut", title: name }, mark, times, name));
    const text = (column) => (group ? this.rows.foldedText(group, column) : column.text(tensor, SHOWN_DIGITS));
    const cells = this.columns.map((column) => {
      const shown = text(column);
      return el("td", { role: "gridcell", class: column.right ? "right" : null }, el("span", { class: "cut", title: shown.length > 12 ? shown : null }, shown));
    });
    const attributes = { role: "row", id: `${this.id}-${at}`, "data-at": at, "aria-rowindex": at + 2, "aria-level": inside ? 2 : 1, class: group ? "group" : null };
    if (group) attributes["aria-expanded"] = String(Boolean(open));
    return el("tr", attributes, label, cells);
  }

  // -- moving

  point() {
    for (const tr of this.body.querySelectorAll(".active")) tr.classList.remove("active");
    const here = document.getElementById(`${this.id}-${this.active}`);
    if (here) {
      here.classList.add("active");
      this.table.setAttribute("aria-activedescendant", here.id);
    } else this.table.removeAttribute("aria-activedescendant");
  }

  go(at) {
    this.active = Math.max(0, Math.min(this.rows.entries.length - 1, at));
    const row = rowHeight();
    const top = this.active * row;
    const room = this.box.clientHeight - this.head.offsetHeight;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + row > this.box.scrollTop + room) this.box.scrollTop = top + row - room + 2;
    this.drawRows();
  }

  key(event) {
    if (event.target !== this.table || event.ctrlKey || event.altKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(this.box.clientHeight / rowHeight()) - 2);
    const goal = { ArrowDown: this.active + 1, ArrowUp: this.active - 1, PageDown: this.active + page, PageUp: this.active - page, Home: 0, End: Infinity }[event.key];
    const entry = this.rows.entries[this.active];
    if (goal !== undefined) this.go(goal);
    else if (event.key === "Enter" || event.key === " ") this.act(this.active);
    else if (event.key === "ArrowRight" && entry?.members) this.toggle(entry, true);
    else if (event.key === "ArrowLeft" && entry?.members) this.toggle(entry, false);
    else if (event.key === "ArrowLeft" && entry?.group) this.go(this.rows.entries.indexOf(entry.group));
    else return;
    event.preventDefault();
  }

  clicked(event) {
    const row = event.target.closest("tr[data-at]");
    if (!row || String(window.getSelection())) return;
    this.active = Number(row.dataset.at);
    this.table.focus({ preventScroll: true });
    this.act(this.active);
  }

  act(at) {
    const entry = this.rows.entries[at];
    if (entry === undefined) return;
    if (entry.members) this.toggle(entry, !this.rows.opened.has(entry.template));
    else openTensor(entry.tensor ?? entry, this.rows.every);
  }

  toggle(group, open) {
    if (open) this.rows.opened.add(group.template);
    else this.rows.opened.delete(group.template);
    this.rows.list();
    this.drawRows();
  }

  // -- taking along

  csv() {
    const columns = this.tensors.columns;
    // A spreadsheet takes a text that begins so for a formula.
    const cell = (value) => {
      if (value === null) return "";
      const text = typeof value === "number" ? String(value) : String(Array.isArray(value) ? value.join("x") : value).replace(/^[=+\-@\t\r]/, "'$&");
      return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const lines = this.rows.every.map((i) => [this.tensors.names[i], ...columns.map((c) => c.value(i))].map(cell).join(","));
    return `${["name", ...columns.map((c) => c.id)].join(",")}\n${lines.join("\n")}\n`;
  }

  json() {
    const rows = this.rows.every.map((i) => Object.fromEntries([["name", this.tensors.names[i]], ...this.tensors.columns.map((c) => [c.id, c.value(i)])]));
    return JSON.stringify(rows, null, 1);
  }

  async copy(button, name, text) {
    let done = "Copied";
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
      area.value = text;
      document.body.append(area);
      area.select();
      if (!document.execCommand("copy")) done = "Not allowed here";
      area.remove();
    }
    button.textContent = done;
    setTimeout(() => (button.textContent = `Copy ${name}`), 1500);
  }

  // On paper: folded, and no more rows than somebody would read.
  print() {
    this.rows.folded = this.tensors.count > 300 || this.rows.folded;
    this.rows.order();
    this.drawRows(500);
    if (this.rows.entries.length > 500) this.body.append(el("tr", null, el("td", { colspan: this.columns.length + 1 }, `and ${GROUPED.format(this.rows.entries.length - 500)} more rows`)));
    this.rows.folded = this.fold.checked;
    this.rows.order();
  }
}

function drawTensors(section, report) {
  const view = new TensorView(report.tensors);
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input:not([type=radio], [type=checkbox], [type=range]), textarea, select, dialog");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    view.search.focus();
    view.search.select();
  });
  searchTensors = (query) => {
    view.search.value = query;
    view.find(query);
    view.search.scrollIntoView({ block: "start" });
    view.search.focus({ preventScroll: true });
  };
  detailsOf(report.tensors);
  return view.elements;
}

// -- one tensor

function detailsOf(tensors) {
  const title = el("h2", { id: "tensor-title" });
  const content = el("div", { class: "details" });
  const button = (text, onclick) => el("button", { type: "button", class: "small", onclick }, text);
  const dialog = el("dialog", { class: "tensor", "aria-labelledby": "tensor-title" });
  let [shown, among] = [0, []];
  const step = (by) => {
    const next = among[among.indexOf(shown) + by];
    if (next !== undefined) put(next);
  };
  const before = button("\u2190 Previous", () => step(-1));
  const after = button("Next \u2192", () => step(1));
  const close = button("Close", () => dialog.close());
  const put = (i) => {
    shown = i;
    title.textContent = tensors.names[i];
    before.disabled = among.indexOf(i) <= 0;
    after.disabled = among.indexOf(i) >= among.length - 1;
    content.replaceChildren(...tensorDetails(tensors, i));
  };
  dialog.append(el("div", { class: "bar-of-dialog" }, before, after, close), title, content);
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  openTensor = (i, all) => {
    among = all.length > 1 ? all : [i];
    put(i);
    dialog.showModal();
    close.focus();
  };
}

function tensorDetails(tensors, i) {
  const pairs = tensors.columns.filter((c) => c.value(i) !== null).map((c) => el("div", { title: c.help }, el("dt", null, c.title), el("dd", { class: c.kind }, c.text(i))));
  const histogram = tensors.histogram(i);
  return [histogram && histogramOf(tensors, histogram, tensors.other(i)), el("dl", { class: "facts of-tensor" }, pairs)].filter(Boolean);
}

// One histogram as bars, a second one as a line over them: the areas of both are equal.
function histogramOf(tensors, one, two) {
  const both = two ? [one, two] : [one];
  const low = Math.min(...both.map((h) => h.low));
  const high = Math.max(...both.map((h) => h.high));
  const [width, height] = [520, 120];
  const span = high - low || 1;
  const steps = both.map(({ heights, low: from, high: to }) => {
    const wide = (to - from) / heights.length || span;
    const sum = heights.reduce((a, b) => a + b, 0);
    return [...heights].map((n, at) => ({ from: from + wide * at, to: from + wide * (at + 1), dense: n / (sum * wide) }));
  });
  const most = Math.max(...steps.flat().map((s) => s.dense));
  const toX = (v) => ((v - low) / span) * width;
  const toY = (dense) => height - (dense / most) * (height - 2);
  const bars = steps[0].map((s) => draw("rect", { x: toX(s.from) + 1, width: Math.max(1, toX(s.to) - toX(s.from) - 2), y: toY(s.dense), height: height - toY(s.dense), class: "histogram-bar" }));
  const line = two ? draw("path", { d: `M${toX(two.low)} ${height}${steps[1].map((s) => `V${toY(s.dense).toFixed(1)}H${toX(s.to).toFixed(1)}`).join("")}V${height}`, class: "series series-1 whole" }) : null;
  const peak = steps[0].reduce((a, b) => (b.dense > a.dense ? b : a));
  const names = tensors.packedOthers?.names;
  const range = (h) => (h.low === h.high ? `all elements are ${numberText(h.low)}` : `${numberText(h.low)} to ${numberText(h.high)}`);
  const words = two ? `Bars: ${names[0]}, ${range(one)}. Line: ${names[1]}, ${range(two)}` : one.low === one.high ? `All finite elements are ${numberText(low)}` : `Histogram from ${numberText(low)} to ${numberText(high)}; the fullest bin is from ${numberText(peak.from)} to ${numberText(peak.to)}`;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words, preserveAspectRatio: "none" }, bars, line, draw("line", { x1: 0, x2: width, y1: height, y2: height, class: "grid" }));
  const ends = el("div", { class: "ends" }, el("span", null, numberText(low)), el("span", null, numberText(high)));
  return el("figure", { class: "histogram" }, svg, ends, el("figcaption", null, `${words}. Heights are in ${one.levels} steps of the fullest bin.`));
}

// Both histograms of a tensor that is chosen, those that changed most first.
function drawHistograms(section, report) {
  const { tensors } = report;
  const change = tensors.column.get("relative")?.keys ?? [];
  const known = (i) => (Number.isNaN(change[i]) ? Infinity : change[i]); // what is not a number comes first
  const found = Array.from({ length: tensors.count }, (_, i) => i).filter((i) => tensors.histogram(i) && tensors.other(i)).sort((a, b) => known(b) - known(a) || a - b);
  if (!found.length) return [el("p", { class: "empty" }, "No tensor has histograms of both.")];
  const place = el("div");
  const id = unique("choose");
  const select = el("select", { id, onchange: () => put(Number(select.value)) }, found.map((i) => el("option", { value: i }, tensors.names[i])));
  const put = (i) => place.replaceChildren(histogramOf(tensors, tensors.histogram(i), tensors.other(i)));
  put(found[0]);
  return [el("p", { class: "select" }, el("label", { for: id }, "Tensor "), select), place];
}
