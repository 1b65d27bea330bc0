// Shared by all views: the plan, its indices, and the formats of figures and names.

const packed = Uint8Array.from(atob(document.getElementById("plan").textContent), (one) => one.charCodeAt(0));
const plan = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).json();

/** An element; a string child is text, never markup. */
function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function digits(value) {
  const size = Math.abs(value);
  return size >= 99.95 ? value.toFixed(0) : size >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

/** Microseconds: `12.3 ms`. */
function time(us) {
  const size = Math.abs(us);
  if (size < 0.005) return "0";
  return size >= 999500 ? `${digits(us / 1e6)} s` : size >= 999.5 ? `${digits(us / 1e3)} ms` : `${digits(us)} us`;
}

function bytes(count) {
  let size = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return unit === "B" ? `${size} B` : `${size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} TiB`;
}

/** Decimal prefixes, for rates: `812 TFLOP/s`. */
function rate(value, unit) {
  for (const [scale, prefix] of [
      [1e15, "P"],
      [1e12, "T"],
      [1e9, "G"],
      [1e6, "M"]
    ]) {
    if (value >= scale) return `${digits(value / scale)} ${prefix}${unit}`;
  }
  return `${digits(value)} ${unit}`;
}

/** `[B_dp, S] {U_tp}` with the axes, and what is not summed yet, in colour. */
function notation(text) {
  const made = el("span", { class: "notation" });
  for (const part of text.split(/((?<=[A-Z0-9])_[\w./]+|\{[^}]*\})/)) {
    if (part.startsWith("_")) made.append(el("i", {}, part));
    else if (part.startsWith("{")) made.append(el("u", {}, part));
    else made.append(part);
  }
  return made;
}

const pattern = (name) => name.replace(/\d+/g, "#");

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function grouped(items, key) {
  const groups = new Map();
  for (const item of items) {
    const name = key(item);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(item);
  }
  return groups;
}

const total = (items, of) => items.reduce((sum, item) => sum + of(item), 0);

const valueNamed = new Map(plan.values.map((value) => [value.name, value]));
const valueOfNode = new Map(plan.values.filter((value) => value.node).map((value) => [value.node, value]));
const collectiveNamed = new Map(plan.collectives.map((one) => [one.id, one]));
const moduleNamed = new Map(plan.modules.map((one) => [one.name, one]));
const rowOf = new Map(plan.modules.flatMap((one) => one.fqns.map((fqn) => [fqn, one])));
const taskOf = new Map(); // collective -> number of the task that runs it
const exposedOf = new Map(); // number of a task -> microseconds
const sources = new Map(); // "model.py:42" -> text of the line

for (const one of plan.collectives)
  if (one.line && one.source) sources.set(one.line, one.source);
if (plan.step) {
  plan.step.tasks.steps.forEach((steps, number) => steps && steps.split(" ").forEach((step) => taskOf.set(step,
    number)));
  for (const [number, start, end] of plan.step.exposed) {
    exposedOf.set(number, (exposedOf.get(number) || 0) + end - start);
  }
}

/** Lines of a stage's text: `{name, text, origin}`; a line without a name begins or ends the graph. */
const stages = new Map();

function linesOf(stage) {
  if (!stages.has(stage)) {
    const lines = plan.graphs[stage].split("\n").map((text) => {
      const named = /^%(\w+):/.exec(text);
      const origin = /\s{6}# (\S+:\d+)/.exec(text);
      return { name: named ? named[1] : "", text, line: origin ? origin[1] : "" };
    });
    stages.set(stage, { lines, numbers: new Map(lines.map((line, number) => [line.name, number])) });
  }
  return stages.get(stage);
}

/** The last stage that has a node, and its line there. */
function definition(node) {
  for (const stage of Object.keys(plan.graphs).reverse()) {
    const { lines, numbers } = linesOf(stage);
    if (numbers.has(node)) return { stage, number: numbers.get(node), ...lines[numbers.get(node)] };
  }
  return null;
}

const bareName = (id) => id.split("@")[0];

const $ = (id) => document.getElementById(id);
const link = (kind, id, text) => el("a", { href: `#${kind}=${encodeURIComponent(id)}`, class: "mono" }, text ===
  undefined ? id : text);
const soft = (text) => el("span", { class: "soft" }, text);
const figures = (...pairs) => el("dl", {}, ...pairs.filter(([, value]) => value !== null && value !== "" &&
    value !== undefined)
  .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));