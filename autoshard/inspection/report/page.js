// The page: summary, module tree, search, and the selected thing.

const VIEWS = { overview, timeline: showTimeline, tensor, collectives, roofline, program, remarks };
const state = { view: "overview", picked: null, stage: Object.keys(plan.graphs).at(-1), timeline: null };

function header() {
  const { mesh, cost, search } = plan;
  $("title").textContent =
    `${mesh.names.map((name, i) => `${name}=${mesh.sizes[i]} ${plan.recipes[i] || ""}`.trim()).join(", ")}` +
    (mesh.hardware ? ` of ${mesh.hardware.name}` : "");
  if (!cost) { $("summary").append(soft("no step was predicted")); return; }
  const bar = (whole, parts) => el("div", { class: "bar" }, ...parts.map(([size, name, label]) =>
    el("i", { style: `width:${(100 * size) / whole}%;background:var(--${name})`, title: label })));
  const us = (seconds) => time(seconds * 1e6);
  $("summary").append(
    el("div", { class: "stat" }, el("b", {}, us(cost.step_time)), soft(" a step"),
      bar(cost.step_time, [
        [cost.compute, "forward", `compute ${us(cost.compute)}`],
        [cost.exposed_comm, "exposed", `exposed ${us(cost.exposed_comm)}`]
      ]),
      el("small", {},
        `compute ${us(cost.compute)}, exposed ${us(cost.exposed_comm)}, hidden ${us(cost.hidden_comm)}`)),
    el("div", { class: "stat" }, el("b", {}, bytes(cost.peak_memory)), soft(search ?
        ` of ${bytes(search.memory_limit)}` : " at the peak"),
      bar(Math.max(cost.peak_memory, search ? search.memory_limit : 0), Object.entries(cost.memory).map(([kind,
        size
      ]) => [size, kindColor(kind), `${kind} ${bytes(size)}`])),
      el("small", {}, Object.entries(cost.memory).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([kind, size]) =>
        `${kind} ${bytes(size)}`).join(", "))),
    ...(search ? [el("div", { class: "stat" }, el("b", {}, search.chosen), soft(
        ` of ${search.candidates.length} simulated`),
      el("div", { class: "soft" }, search.gap === null ? "no gap was proven" :
        `no plan takes ${(100 * search.gap).toFixed(2)} % less, by the solver's model`))] : []));
}

/** Kinds of memory have one colour everywhere; the plan's cost names them in the plural. */
function kindColor(kind) {
  const order = ["parameter", "buffer", "optimizer", "gradient", "input", "output", "activation", "gathered",
    "temporary"
  ];
  return `k${order.findIndex((name) => kind.startsWith(name))}`;
}

// --- the tree of modules

function treeOf(rows, parameters) {
  const root = { name: "", children: new Map(), row: null, held: [] };
  const at = (path) => path.reduce((node, part) => {
    if (!node.children.has(part)) node.children.set(part, { name: part, children: new Map(), row: null,
    held: [] });
    return node.children.get(part);
  }, root);
  const steps = (name) => name.split(".").reduce((parts, part) => (/^[\d{]/.test(part) && parts.length ?
    [...parts.slice(0, -1), `${parts.at(-1)}.${part}`] : [...parts, part]), []); // "layers.0-31" is one step
  for (const row of rows) at(row.fqns.length ? steps(row.name) : [row.name]).row = row;
  for (const group of parameters) {
    const owners = new Set(group.names.map((name) => rowOf.get(name.split(".").slice(0, -1).join("."))));
    for (const owner of owners) at(owner ? steps(owner.name) : steps(group.name).slice(0, -1)).held.push(group);
  }
  return root;
}

function sums(node) {
  const own = node.row || { compute: 0, exposed: 0, received: 0 };
  const below = [...node.children.values()].map(sums);
  node.sum = {
    compute: own.compute + total(below, (s) => s.compute),
    exposed: own.exposed + total(below, (s) => s.exposed),
    received: own.received + total(below, (s) => s.received)
  };
  return node.sum;
}

function branch(node, whole, depth) {
  const spent = (node.sum.compute + node.sum.exposed) * 1e6;
  const head = el("div", { class: "node", role: "treeitem", "data-module": node.row ? node.row.name : "",
      tabindex: "-1" },
    el("span", { class: "fold" }, node.children.size || node.held.length ? "\u25be" : ""), el(
    "span", { class: "label" }, node.name),
    el("span", { class: "heat" }, el("i", { style: `width:${(100 * node.sum.compute) / whole}%` }), el(
    "i", { style: `width:${(100 * node.sum.exposed) / whole}%` })),
    el("span", { class: "cost" }, plan.step ? time(spent) : bytes(node.sum.received)));
  const made = el("div", { class: `branch${depth > 1 ? " closed" : ""}` }, head, el("div", { class: "children" },
    ...node.held.map((group) => el("div", { class: "node held", onclick: () => select("value", group.names[
        0]) },
      el("span", { class: "fold" }), `${group.names[0].split(".").at(-1)} `, notation(group.notation))),
    ...[...node.children.values()].map((child) => branch(child, whole, depth + 1))));
  head.addEventListener("click", (event) => {
    if (event.target.className === "fold" || !node.row) made.classList.toggle("closed");
    else { made.classList.remove("closed");
      select("module", node.row.name); }
  });
  return made;
}

function tree() {
  const root = treeOf(plan.modules, plan.parameters),
    all = sums(root);
  $("tree").replaceChildren(...[...root.children.values()].map((node) => branch(node, all.compute + all.exposed ||
    1, 0)));
}

// --- search

function matches(text) {
  const wanted = text.toLowerCase(),
    has = (...fields) => fields.some((field) => field && field.toLowerCase().includes(wanted));
  const lines = [...new Set([...sources.keys(), ...plan.values.map((value) => value.line).filter(Boolean)])];
  return [
    ["module", plan.modules.filter((one) => has(one.name, ...one.fqns.slice(0, 400))).map((one) => [one.name, one
      .notation
    ])],
    ["line", lines.filter((line) => has(line, sources.get(line))).map((line) => [line, sources.get(line) || ""])],
    ["value", plan.values.filter((one) => has(one.name, one.op)).map((one) => [one.name, one.notation])],
    ["collective", plan.collectives.filter((one) => has(one.id, one.kind, one.reason, one.fqn)).map((one) => [one
      .id, one.reason
    ])],
  ];
}

function find() {
  const text = $("search").value.trim();
  $("tree").style.display = text ? "none" : "";
  if (!text) { $("found").replaceChildren(); if (state.timeline) state.timeline.highlight(null); return; }
  const sections = matches(text).filter(([, found]) => found.length);
  $("found").replaceChildren(...(sections.length ? sections.flatMap(([kind, found]) => [
    el("h2", {}, `${found.length} ${kind}${found.length > 1 ? "s" : ""}`),
    ...[...grouped(found, ([id]) => pattern(id)).values()].slice(0, 30).map((alike) => el("div",
      { class: "node result", "data-kind": kind, title: alike[0][1], onclick: () => select(kind, alike[0][0]) },
      el("span", { class: "label mono" }, alike[0][0]),
      el("span", { class: "cost" }, alike.length > 1 ? `${alike.length} alike` : ""))),
  ]) : [soft("nothing matches")]));
  if (state.timeline) {
    const { tasks } = plan.step, wanted = text.toLowerCase();
    state.timeline.highlight(new Set(tasks.name.flatMap((name, n) => (`${name} ${tasks.fqn[n]} ${tasks.kind[n]}`
      .toLowerCase().includes(wanted) ? [n] : []))));
  }
}

// --- the selected thing

function select(kind, id) { location.hash = `${kind}=${encodeURIComponent(id)}`; }

function picked() {
  const [kind, ...rest] = location.hash.slice(1).split("=");
  const id = decodeURIComponent(rest.join("="));
  if (VIEWS[kind]) { show(kind); return; }
  const about = { module: aboutModule, value: aboutValue, collective: aboutCollective, line: aboutLine,
    task: aboutTask } [kind];
  if (!about) return;
  state.picked = { kind, id };
  $("details").replaceChildren(...about(id).filter(Boolean));
  $("details").scrollTop = 0;
  document.querySelectorAll("#tree .picked").forEach((node) => node.classList.remove("picked"));
  if (kind === "module") document.querySelectorAll(`#tree [data-module="${CSS.escape(id)}"]`).forEach((node) => node
    .classList.add("picked"));
  if (kind === "value" && state.view === "tensor") show("tensor");
  if (state.timeline) state.timeline.highlight(tasksOf(kind, id));
}

/** Return the numbers of the tasks of a thing; null where it has none. */
function tasksOf(kind, id) {
  if (!plan.step) return null;
  const { tasks } = plan.step;
  if (kind === "task") return new Set([+id]);
  if (kind === "collective") return taskOf.has(id) ? new Set(tasks.steps.flatMap((steps, n) => (steps.split(" ")
    .includes(id) ? [n] : []))) : null;
  if (kind === "module") { const fqns = new Set((moduleNamed.get(id) || { fqns: [] }).fqns); return new Set(tasks
      .fqn.flatMap((fqn, n) => (fqns.has(fqn) ? [n] : []))); }
  if (kind === "value") { const node = (valueNamed.get(id) || { node: id }).node; return new Set(tasks.nodes
      .flatMap((nodes, n) => (nodes.split(" ").includes(node) ? [n] : []))); }
  const steps = plan.collectives.filter((one) => one.line === id).map((one) => taskOf.get(one.id)).filter((n) =>
    n !== undefined);
  const nodes = new Set(plan.values.filter((value) => value.line === id).map((value) => value.node));
  return new Set([...steps, ...tasks.nodes.flatMap((names, n) => (names.split(" ").some((name) => nodes.has(name)) ?
    [n] : []))]);
}

function show(view) {
  state.view = view;
  state.timeline = null;
  document.querySelectorAll("#tabs button").forEach((button) => button.setAttribute("aria-selected",
    `${button.dataset.view === view}`));
  $("view").replaceChildren(...[VIEWS[view]()].flat());
}

header();
tree();
$("tabs").append(...Object.keys(VIEWS).map((view) => el("button", { role: "tab", "data-view": view, onclick: () =>
    show(view) }, view)));
$("search").addEventListener("input", find);
window.addEventListener("hashchange", picked);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target.tagName !== "INPUT") { event.preventDefault();
    $("search").focus(); }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(state.view));
$("details").append(soft("Pick a module, value, collective or task. / searches."));
show("overview");
picked();