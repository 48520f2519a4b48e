// Unpacks the report: JSON, and behind it the packed columns of the tensors. pack.py says how they are packed.

async function unpack(text) {
  const binary = atob(text);
  const packed = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) packed[i] = binary.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const report = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  if (report.tensors) report.tensors = new Tensors(report.tensors, bytes.subarray(4 + length));
  return report;
}

function wholeNumbers(pool, { at, n, planes, way }) {
  const out = new Float64Array(n);
  for (let plane = 0, weight = 1; plane < planes; plane += 1, weight *= 256) {
    const from = at + plane * n;
    for (let i = 0; i < n; i += 1) out[i] += pool[from + i] * weight;
  }
  if (way === "steps") {
    for (let i = 0, last = 0; i < n; i += 1) {
      const step = out[i];
      last += step % 2 ? -(step + 1) / 2 : step / 2;
      out[i] = last;
    }
  }
  return out;
}

// NaN stands for "no value" here; a column of numbers has its own NaN in `texts`.
function decimalNumbers(pool, { m, e }) {
  const mantissas = wholeNumbers(pool, m);
  const exponents = wholeNumbers(pool, e);
  const texts = new Map();
  const special = new Map([[511, "nan"], [510, "inf"], [-510, "-inf"]]);
  for (let i = 0; i < mantissas.length; i += 1) {
    const exponent = exponents[i] - 512;
    const zigzag = mantissas[i];
    const whole = zigzag % 2 ? -(zigzag + 1) / 2 : zigzag / 2;
    if (exponent === -512) mantissas[i] = NaN;
    else if (special.has(exponent)) {
      texts.set(i, special.get(exponent));
      mantissas[i] = exponent === 510 ? Infinity : exponent === -510 ? -Infinity : NaN;
    } else mantissas[i] = exponent < -300 ? Number(`${whole}e${exponent}`) : exponent < 0 ? whole / 10 ** -exponent : whole * 10 ** exponent;
  }
  return { keys: mantissas, texts };
}

// One property of all tensors. `keys` are numbers that sort it, NaN where there is no value.
class ColumnOfTensors {
  constructor(packed, pool, digits) {
    Object.assign(this, { id: packed.id, title: packed.title, kind: packed.kind, hidden: packed.hidden, help: packed.help });
    this.right = KINDS[this.kind].right;
    this.packed = packed;
    this.pool = pool;
    this.digits = digits;
  }

  unpack() {
    const { packed, pool } = this;
    if (packed.values) {
      this.values = packed.values;
      this.shown = packed.values.map((v) => (v === null ? NONE : KINDS[this.kind].show(v)));
      this.index = Uint32Array.from(wholeNumbers(pool, packed.index));
      const weigh = this.kind === "shape" ? (v) => v.reduce((a, b) => a * b, 1) : (v) => v;
      const order = [...packed.values.keys()].filter((i) => packed.values[i] !== null);
      order.sort((a, b) => (weigh(this.values[a]) < weigh(this.values[b]) ? -1 : weigh(this.values[a]) > weigh(this.values[b]) ? 1 : a - b));
      const ranks = new Float64Array(packed.values.length).fill(NaN);
      order.forEach((i, rank) => (ranks[i] = rank));
      this._keys = Float64Array.from(this.index, (i) => ranks[i]);
    } else if (packed.whole) {
      this._keys = wholeNumbers(pool, packed.whole).map((v) => (v === 0 ? NaN : v - 1));
      this.texts = new Map();
    } else {
      const { keys, texts } = decimalNumbers(pool, packed.decimal);
      this._keys = keys;
      this.texts = texts;
    }
    this.packed = null;
  }

  get keys() {
    if (this.packed) this.unpack();
    return this._keys;
  }

  // The different values of a column of texts.
  get different() {
    this.keys;
    return this.shown;
  }

  // The value as JSON has it.
  value(i) {
    const key = this.keys[i];
    if (this.index) return this.values[this.index[i]];
    return Number.isNaN(key) ? (this.texts.get(i) ?? null) : Number.isFinite(key) ? key : this.texts.get(i);
  }

  text(i, digits = this.digits) {
    const key = this.keys[i];
    if (this.index) return this.shown[this.index[i]];
    return Number.isNaN(key) ? (this.texts.get(i) ?? NONE) : this.format(key, digits);
  }

  format(number, digits = this.digits) {
    return this.kind === "number" ? numberText(number, digits) : KINDS[this.kind].show(number);
  }

  // Width in characters, of what is to be seen at most.
  get width() {
    const title = this.title.length + 3;
    if (!this.right) {
      return Math.max(title, Math.min(32, this.different.reduce((most, t) => Math.max(most, t.length), 4)) + 2);
    }
    return Math.max(title, { bytes: 11, share: 11, number: SHOWN_DIGITS + 7 }[this.kind] ?? 2 + this.widest());
  }

  // Of a row that stands for several: a range where there are numbers.
  get foldedWidth() {
    if (!this.right || this.kind === "bytes") return this.width;
    return this.kind === "count" ? Math.max(this.width, 2 * this.widest() + 4) : this.width + 8;
  }

  widest() {
    let most = 1;
    for (const key of this.keys) if (key > most) most = key;
    return show(this.kind, most).length;
  }
}

class Tensors {
  constructor(packed, pool) {
    const { count, digits } = packed;
    this.count = count;
    this.digits = digits;
    this.templates = packed.templates;
    this.template = Uint32Array.from(wholeNumbers(pool, packed.template));
    this.numbers = wholeNumbers(pool, packed.numbers);
    this.columns = packed.columns.map((column) => new ColumnOfTensors(column, pool, digits));
    this.column = new Map(this.columns.map((column) => [column.id, column]));
    this.packedHistograms = packed.histograms && { ...packed.histograms, pool };
    this.packedOthers = packed.others && { ...packed.others, pool };
    this.name();
  }

  name() {
    this.first = new Uint32Array(this.count); // where a tensor's numbers begin
    this.names = new Array(this.count);
    let at = 0;
    for (let i = 0; i < this.count; i += 1) {
      const pieces = this.templates[this.template[i]].text;
      this.first[i] = at;
      let name = pieces[0];
      for (let slot = 1; slot < pieces.length; slot += 1) name += this.numbers[at++] + pieces[slot];
      this.names[i] = name;
    }
  }

  get lower() {
    return (this._lower ??= this.names.map((name) => name.toLowerCase()));
  }

  // The stack and number of the layer, "" outside layers.
  layer(i) {
    const { stack, text, module } = this.templates[this.template[i]];
    return text.length > 1 && (stack || module) ? `${stack}.${this.numbers[this.first[i]]}` : "";
  }

  module(i) {
    return this.templates[this.template[i]].module;
  }

  bytes(i) {
    const sizes = this.column.get("bytes")?.keys[i];
    return Number.isNaN(sizes) || sizes === undefined ? 0 : sizes;
  }

  // The heights of the bins of a tensor and their ends; null where it has none.
  histogram(i, packed = this.packedHistograms, ends = ["min", "max"]) {
    if (!packed) return null;
    const heights = packed.pool.subarray(packed.at + i * packed.bins, packed.at + (i + 1) * packed.bins);
    const [low, high] = ends.map((id) => this.column.get(id)?.keys[i] ?? NaN);
    return heights.some(Boolean) ? { heights, low, high, levels: packed.levels } : null;
  }

  // The same of the other checkpoint.
  other(i) {
    return this.histogram(i, this.packedOthers, ["other_min", "other_max"]);
  }

  // Natural order: numbers as numbers, texts between them as texts.
  compareNames(a, b) {
    const one = this.templates[this.template[a]].text;
    const two = this.templates[this.template[b]].text;
    for (let piece = 0; ; piece += 1) {
      if (one[piece] !== two[piece]) return one[piece] < two[piece] ? -1 : 1;
      const ended = [piece + 1 >= one.length, piece + 1 >= two.length];
      if (ended[0] || ended[1]) return ended[0] === ended[1] ? a - b : ended[0] ? -1 : 1;
      const difference = this.numbers[this.first[a] + piece] - this.numbers[this.first[b] + piece];
      if (difference) return difference;
    }
  }
}
