"use strict";
// Unpacks the report and draws it. Everything that is shown is made with createElement and textContent.
(async () => {
  const app = document.getElementById("app");
  const add = (parent, name, text) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const report = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  add(app, "h1", report.title);
  add(app, "p", report.subtitle);
  for (const [label, text] of report.facts) add(app, "p", `${label}: ${text}`);
  for (const section of report.sections) {
    const place = add(app, "section");
    place.id = section.id;
    add(place, "h2", section.title);
    add(place, "p", section.text ?? "");
  }
})();
