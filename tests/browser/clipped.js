// What does not fit where it is: labels that are clipped or lie over one another, and a page wider than its window.
() => {
  const wrong = [];
  const say = (what, e) => wrong.push(`${what}: ${e.textContent.slice(0, 60)} (${e.className.baseVal ?? e.className})`);
  const inside = (a, b) =>
    a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
  for (const label of document.querySelectorAll(".box .label, .box .cell")) {
    if (!label.textContent) continue;
    if (label.scrollWidth > label.clientWidth + 1) say("clipped", label);
    const box = label.closest(".box").getBoundingClientRect();
    if (!inside(label.getBoundingClientRect(), box)) say("outside its box", label);
  }
  const boxes = [...document.querySelectorAll(".box")].map((b) => b.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => meet(a, b) && wrong.push("boxes overlap")));
  for (const svg of document.querySelectorAll(".chart svg")) {
    const texts = [...svg.querySelectorAll("text")];
    const rects = texts.map((t) => t.getBoundingClientRect());
    texts.forEach((t, i) => inside(rects[i], svg.getBoundingClientRect()) || say("outside its chart", t));
    rects.forEach((a, i) => rects.slice(i + 1).forEach((b) => meet(a, b) && say("overlaps", texts[i])));
  }
  const texts = "h1, h2, dt, dd, button, th, .plain td, .bars th, .legend li, .choice span, summary";
  for (const text of document.querySelectorAll(texts)) {
    if (text.closest(".virtual") || !text.offsetParent) continue;
    if (text.scrollWidth > text.clientWidth + 1 && text.clientWidth) say("clipped", text);
  }
  for (const text of document.querySelectorAll(".virtual td.right .cut")) {
    if (text.scrollWidth > text.clientWidth + 1) say("clipped", text);
  }
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("the page is wider than the window");
  return wrong;
}
