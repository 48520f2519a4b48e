// Puts the page together. A kind of section is a line in this table: it takes a section and the report, and gives elements.
const SECTIONS = {
  treemap: drawTreemap,
  tensors: drawTensors,
  histograms: drawHistograms,
  figures: drawFigures,
  lines: drawLines,
  heatmap: drawHeatmap,
  bars: drawBars,
  statement: () => [],
  table: drawTable,
  findings: drawFindings,
};

function drawSection(section, report) {
  const heading = unique("heading");
  const place = el("section", { id: section.id, "aria-labelledby": heading, class: `kind-${section.kind}` }, el("h2", { id: heading }, section.title, el("a", { class: "anchor", href: `#${section.id}`, "aria-label": `Link to ${section.title}` }, "#")), paragraphs(section.text));
  // A section that fails says so, and all others are drawn.
  try {
    fill(place, null, SECTIONS[section.kind](section, report));
  } catch (error) {
    place.append(el("p", { class: "message" }, `This section cannot be drawn: ${error.message}`));
    console.error(error);
  }
  return place;
}

// -- light and dark

const THEME = "ckpttool-report-theme";
const storage = (act) => {
  try {
    return act(window.localStorage);
  } catch {
    return null; // a browser may forbid it for files
  }
};

function themeSwitch() {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const button = el("button", { type: "button", class: "theme" });
  const say = () => {
    button.textContent = isDark() ? "Light colours" : "Dark colours";
  };
  const remembered = storage((s) => s.getItem(THEME));
  if (remembered === "dark" || remembered === "light") root.dataset.theme = remembered;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    storage((s) => s.setItem(THEME, root.dataset.theme));
    say();
  });
  system.addEventListener("change", say);
  say();
  return button;
}

// -- the page around the sections

function contents(sections) {
  const links = new Map(sections.map((s) => [s.id, el("a", { href: `#${s.id}` }, s.title)]));
  const nav = el("nav", { class: "contents", "aria-label": "Contents" }, el("p", { class: "contents-title", "aria-hidden": "true" }, "Contents"), el("ol", null, [...links.values()].map((a) => el("li", null, a))));
  const watch = (places) => {
    const seen = new Set();
    const observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) seen[isIntersecting ? "add" : "delete"](target.id);
      const first = sections.find((s) => seen.has(s.id));
      for (const [id, link] of links) {
        if (id === first?.id) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    }, { rootMargin: "-10% 0px -60% 0px" });
    for (const place of places) observer.observe(place);
  };
  return { nav, watch };
}

const VERDICTS = { good: "\u2714", bad: "\u2716", unsure: "\u26a0", differs: "\u2260", unknown: "?" };

function drawReport(report) {
  const header = el("header", { class: "top" }, el("div", null, el("h1", null, report.title), el("p", { class: "subtitle" }, report.subtitle)), themeSwitch());
  const facts = el("dl", { class: "facts" }, report.facts.map(([label, text]) => el("div", { class: text.length > 14 ? "wide" : null }, el("dt", null, label), el("dd", null, text))));
  const notes = report.notes.length ? el("div", { class: "notes", role: "note", "aria-label": "Notes" }, el("ul", null, report.notes.map((n) => el("li", null, n)))) : null;
  const verdicts = (report.verdicts ?? []).map(({ state, text }) => el("p", { class: `verdict ${state}` }, el("span", { "aria-hidden": "true" }, `${VERDICTS[state]} `), text));
  if (verdicts.length) header.append(el("div", { class: "verdicts" }, verdicts));
  const { nav, watch } = contents(report.sections);
  // The table comes before the treemap is drawn, which has links into it.
  const drawn = new Map();
  for (const section of [...report.sections].sort((a, b) => (b.kind === "tensors") - (a.kind === "tensors"))) drawn.set(section, drawSection(section, report));
  const places = report.sections.map((section) => drawn.get(section));
  const main = el("main", { id: "main" }, report.facts.length ? facts : null, notes, places);
  const app = document.getElementById("app");
  app.replaceChildren(el("a", { class: "skip", href: "#main" }, "Skip to the report"), header, el("div", { class: "columns" }, report.sections.length > 1 ? nav : null, main), el("footer", null, "Made by ckpttool. Everything is in this file; it loads nothing."));
  watch(places);
  if (location.hash.length > 1) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

function message(text) {
  document.getElementById("app").replaceChildren(el("main", null, el("p", { class: "message" }, text)));
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    message("This browser cannot unpack the report: it has no DecompressionStream. Browsers since May 2023 have it (Chrome 80, Firefox 113, Safari 16.4).");
    return;
  }
  let report = null;
  try {
    report = await unpack(document.getElementById("data").textContent);
  } catch (error) {
    message(`The data of this report is damaged, perhaps because the file is not complete: ${error.message}`);
    return;
  }
  drawReport(report);
  performance.mark("ckpttool:ready");
}

start();
