"use strict";
// The page: summary, module tree, search, views, and what is known of the thing that was picked.

const LACKING = "This plan has no simulated step: it was made where the hardware is not known, or for a recipe that was run. " +
  "Plan it with plan(model, Mesh('dp=8', hardware='h100'), args) to see one.";
const VIEWS = { overview, timeline: showTimeline, tensor, collectives, roofline, program, remarks };
const state = { view: "overview", picked: null, stage: Object.keys(plan.graphs).at(-1), timeline: null };

const $ = (id) => document.getElementById(id);
const link = (kind, id, text) => el("a", { href: `#${kind}=${encodeURIComponent(id)}`, class: "mono" }, text === undefined ? id : text);
const soft = (text) => el("span", { class: "soft" }, text);
const figures = (...pairs) => el("dl", {}, ...pairs.filter(([, value]) => value !== null && value !== "" && value !== undefined)
  .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));

function header() {
  const { mesh, cost, search } = plan;
  $("title").textContent = `${mesh.names.map((name, i) => `${name}=${mesh.sizes[i]} ${plan.recipes[i] || ""}`.trim()).join(", ")}` +
    (mesh.hardware ? ` of ${mesh.hardware.name}` : "");
  if (!cost) { $("summary").append(soft("no step was predicted")); return; }
  const bar = (whole, parts) => el("div", { class: "bar" }, ...parts.map(([size, name, label]) =>
    el("i", { style: `width:${(100 * size) / whole}%;background:var(--${name})`, title: label })));
  const us = (seconds) => time(seconds * 1e6);
  $("summary").append(
    el("div", { class: "stat" }, el("b", {}, us(cost.step_time)), soft(" a step"),
      bar(cost.step_time, [[cost.compute, "forward", `compute ${us(cost.compute)}`], [cost.exposed_comm, "exposed", `exposed ${us(cost.exposed_comm)}`]]),
      el("small", {}, `compute ${us(cost.compute)}, exposed ${us(cost.exposed_comm)}, hidden ${us(cost.hidden_comm)}`)),
    el("div", { class: "stat" }, el("b", {}, bytes(cost.peak_memory)), soft(search ? ` of ${bytes(search.memory_limit)}` : " at the peak"),
      bar(Math.max(cost.peak_memory, search ? search.memory_limit : 0), Object.entries(cost.memory).map(([kind, size], i) => [size, `k${i}`, `${kind} ${bytes(size)}`])),
      el("small", {}, Object.entries(cost.memory).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([kind, size]) => `${kind} ${bytes(size)}`).join(", "))),
    ...(search ? [el("div", { class: "stat" }, el("b", {}, search.chosen), soft(` of ${search.candidates.length} simulated`),
      el("div", { class: "soft" }, search.gap === null ? "nothing was proven" : `within ${(100 * search.gap).toPrecision(2)} % of the best, by the solver's model`))] : []));
}

// --- the tree of modules

function treeOf(rows, parameters) {
  const root = { name: "", children: new Map(), row: null, held: [] };
  const at = (path) => path.reduce((node, part) => {
    if (!node.children.has(part)) node.children.set(part, { name: part, children: new Map(), row: null, held: [] });
    return node.children.get(part);
  }, root);
  const steps = (name) => name.match(/[^.{]+(\{[^}]*\})?[^.]*/g) || [name];
  for (const row of rows) at(row.fqns.length ? steps(row.name) : [row.name]).row = row;
  for (const group of parameters) {
    const owner = rowOf.get(group.names[0].split(".").slice(0, -1).join("."));
    at(owner ? steps(owner.name) : steps(group.name).slice(0, -1)).held.push(group);
  }
  return root;
}

function sums(node) {
  const own = node.row || { compute: 0, exposed: 0, received: 0 };
  const below = [...node.children.values()].map(sums);
  node.sum = { compute: own.compute + total(below, (s) => s.compute), exposed: own.exposed + total(below, (s) => s.exposed),
    received: own.received + total(below, (s) => s.received) };
  return node.sum;
}

function branch(node, whole, depth) {
  const spent = (node.sum.compute + node.sum.exposed) * 1e6;
  const head = el("div", { class: "node", role: "treeitem", "data-module": node.row ? node.row.name : "", tabindex: "-1" },
    el("span", { class: "fold" }, node.children.size || node.held.length ? "\u25be" : ""), el("span", { class: "label" }, node.name),
    el("span", { class: "heat" }, el("i", { style: `width:${(100 * node.sum.compute) / whole}%` }), el("i", { style: `width:${(100 * node.sum.exposed) / whole}%` })),
    el("span", { class: "cost" }, plan.step ? time(spent) : bytes(node.sum.received)));
  const made = el("div", { class: `branch${depth > 1 ? " closed" : ""}` }, head, el("div", { class: "children" },
    ...node.held.map((group) => el("div", { class: "node held", onclick: () => select("value", group.names[0]) },
      el("span", { class: "fold" }), `${group.names[0].split(".").at(-1)} `, notation(group.notation))),
    ...[...node.children.values()].map((child) => branch(child, whole, depth + 1))));
  head.addEventListener("click", (event) => {
    if (event.target.className === "fold" || !node.row) made.classList.toggle("closed");
    else { made.classList.remove("closed"); select("module", node.row.name); }
  });
  return made;
}

function tree() {
  const root = treeOf(plan.modules, plan.parameters), all = sums(root);
  $("tree").replaceChildren(...[...root.children.values()].map((node) => branch(node, all.compute + all.exposed || 1, 0)));
}

// --- search

function matches(text) {
  const wanted = text.toLowerCase(), has = (...fields) => fields.some((field) => field && field.toLowerCase().includes(wanted));
  const lines = [...new Set([...sources.keys(), ...plan.values.map((value) => value.line).filter(Boolean)])];
  return [
    ["module", plan.modules.filter((one) => has(one.name, ...one.fqns.slice(0, 400))).map((one) => [one.name, one.notation])],
    ["line", lines.filter((line) => has(line, sources.get(line))).map((line) => [line, sources.get(line) || ""])],
    ["value", plan.values.filter((one) => has(one.name, one.op)).map((one) => [one.name, one.notation])],
    ["collective", plan.collectives.filter((one) => has(one.id, one.kind, one.reason, one.fqn)).map((one) => [one.id, one.reason])],
  ];
}

function find() {
  const text = $("search").value.trim();
  $("tree").style.display = text ? "none" : "";
  if (!text) { $("found").replaceChildren(); if (state.timeline) state.timeline.highlight(null); return; }
  const sections = matches(text).filter(([, found]) => found.length);
  $("found").replaceChildren(...(sections.length ? sections.flatMap(([kind, found]) => [
    el("h2", {}, `${found.length} ${kind}${found.length > 1 ? "s" : ""}`),
    ...found.slice(0, 30).map(([id, note]) => el("div", { class: "node result", "data-kind": kind, title: note, onclick: () => select(kind, id) },
      el("span", { class: "label mono" }, id))),
  ]) : [soft("nothing has this name")]));
  if (state.timeline) {
    const { tasks } = plan.step, wanted = text.toLowerCase();
    state.timeline.highlight(new Set(tasks.name.flatMap((name, n) => (`${name} ${tasks.fqn[n]} ${tasks.kind[n]}`.toLowerCase().includes(wanted) ? [n] : []))));
  }
}

// --- what is picked

function select(kind, id) { location.hash = `${kind}=${encodeURIComponent(id)}`; }

function picked() {
  const [kind, ...rest] = location.hash.slice(1).split("=");
  const id = decodeURIComponent(rest.join("="));
  if (VIEWS[kind]) { show(kind); return; }
  const about = { module: aboutModule, value: aboutValue, collective: aboutCollective, line: aboutLine, task: aboutTask }[kind];
  if (!about) return;
  state.picked = { kind, id };
  $("details").replaceChildren(...about(id).filter(Boolean));
  $("details").scrollTop = 0;
  document.querySelectorAll("#tree .picked").forEach((node) => node.classList.remove("picked"));
  if (kind === "module") document.querySelectorAll(`#tree [data-module="${CSS.escape(id)}"]`).forEach((node) => node.classList.add("picked"));
  if (kind === "value" && state.view === "tensor") show("tensor");
  if (state.timeline) state.timeline.highlight(tasksOf(kind, id));
}

/** Numbers of the tasks that a thing is about; null where it is about none. */
function tasksOf(kind, id) {
  if (!plan.step) return null;
  const { tasks } = plan.step;
  if (kind === "task") return new Set([+id]);
  if (kind === "collective") return taskOf.has(id) ? new Set([taskOf.get(id)]) : null;
  if (kind === "module") { const fqns = new Set((moduleNamed.get(id) || { fqns: [] }).fqns); return new Set(tasks.fqn.flatMap((fqn, n) => (fqns.has(fqn) ? [n] : []))); }
  if (kind === "value") { const node = (valueNamed.get(id) || { node: id }).node; return new Set(tasks.nodes.flatMap((nodes, n) => (nodes.split(" ").includes(node) ? [n] : []))); }
  const steps = plan.collectives.filter((one) => one.line === id).map((one) => taskOf.get(one.id)).filter((n) => n !== undefined);
  const nodes = new Set(plan.values.filter((value) => value.line === id).map((value) => value.node));
  return new Set([...steps, ...tasks.nodes.flatMap((names, n) => (names.split(" ").some((name) => nodes.has(name)) ? [n] : []))]);
}

function title(kind, id) { return el("h2", { class: "mono" }, soft(`${kind} `), id); }

function lineLink(line) { return line ? el("div", {}, link("line", line), sources.has(line) ? el("div", { class: "mono soft" }, sources.get(line)) : "") : null; }

function moduleLink(fqn) {
  const row = rowOf.get(fqn);
  return row ? link("module", row.name, fqn || row.name) : fqn || null;
}

function list(name, items, most) {
  if (!items.length) return null;
  return el("div", {}, el("h2", {}, `${name} (${items.length})`), ...items.slice(0, most).map((item) => el("div", {}, item)), items.length > most ? soft(`and ${items.length - most} more`) : "");
}

function collectiveItem(one) {
  return el("span", {}, link("collective", one.id), ` ${bytes(one.bytes)}`, one.exposed > 5e-9 ? el("span", { class: "exposed" }, ` ${time(one.exposed * 1e6)} exposed`) : "");
}

const byCost = (a, b) => (b.exposed || 0) - (a.exposed || 0) || b.bytes - a.bytes;

function aboutModule(name) {
  const row = moduleNamed.get(name);
  if (!row) return [title("module", name)];
  const fqns = new Set(row.fqns);
  const own = plan.collectives.filter((one) => fqns.has(one.fqn)).sort(byCost);
  const held = plan.parameters.filter((group) => group.names.some((one) => fqns.has(one.split(".").slice(0, -1).join("."))));
  const made = plan.values.filter((value) => value.role === "value" && fqns.has(value.fqn));
  return [title("module", name), row.notation ? el("div", {}, notation(row.notation)) : null,
    figures(["modules", row.fqns.length > 1 ? `${row.fqns.length}` : ""], ["compute", plan.step ? time(row.compute * 1e6) : ""],
      ["received", bytes(row.received)], ["exposed", plan.step ? time(row.exposed * 1e6) : ""]),
    list("parameters", held.map((group) => el("span", {}, link("value", group.names[0], group.name), " ", notation(group.notation))), 12),
    list("collectives", own.map(collectiveItem), 14),
    list("lines", [...new Set([...own, ...made].map((one) => one.line).filter(Boolean))].map(lineLink), 8),
    list("values", made.map((value) => el("span", {}, link("value", value.name), " ", notation(value.notation))), 14)];
}

function aboutValue(name) {
  const value = valueNamed.get(name) || valueOfNode.get(name) || valueOfNode.get(bareName(name));
  const node = value ? value.node : name;
  const found = definition(bareName(node));
  const related = plan.collectives.filter((one) => operandsOf(one.id).includes(node));
  return [title(value ? value.role : "value", name),
    value ? el("div", {}, notation(value.notation)) : null,
    value ? figures(["global", `${value.dtype}[${value.shape.join(", ")}]`], ["per rank", `[${value.local.join(", ")}]`],
      ...plan.mesh.names.map((axis, i) => [`on ${axis}`, value.placements[i]]), ["op", value.op], ["module", moduleLink(value.fqn)], ["because", value.note]) : null,
    lineLink(value ? value.line : found && found.line),
    value ? el("p", {}, el("a", { onclick: () => { state.tensor = value.name; show("tensor"); } }, "what each rank holds")) : null,
    found ? el("p", {}, el("a", { onclick: () => goTo(found) }, `in the program, ${found.stage}`)) : null,
    list("collectives that move it", related.map(collectiveItem), 14)];
}

/** Names of the values that a collective is given, read in the text of the stage that has it. */
const operandsKnown = new Map();
function operandsOf(id) {
  if (!operandsKnown.has(id)) {
    const text = plan.graphs.COLLECTIVE || "", node = bareName(id);
    const number = text ? linesOf("COLLECTIVE").numbers.get(node) : undefined;
    const call = number === undefined ? "" : linesOf("COLLECTIVE").lines[number].text.split("      # ")[0].split(" = ").slice(1).join(" = ");
    operandsKnown.set(id, [...call.matchAll(/%(\w+)/g)].map((found) => found[1]));
  }
  return operandsKnown.get(id);
}

function aboutCollective(id) {
  const one = collectiveNamed.get(id);
  if (!one) return [title("collective", id)];
  const found = definition(bareName(id));
  return [title(one.kind, id),
    figures(["over", one.axes.join(", ")], ["receives", bytes(one.bytes)], ["takes", one.seconds === null ? "" : time(one.seconds * 1e6)],
      ["exposed", one.exposed === null ? "" : el("span", { class: one.exposed > 5e-9 ? "exposed" : "" }, time(one.exposed * 1e6))],
      ["runs in", `${one.backward ? "backward" : "forward"}${one.recomputed ? ", and again in the backward" : ""}`], ["because", one.reason], ["module", moduleLink(one.fqn)],
      ["message", taskOf.has(id) ? link("task", taskOf.get(id), one.bucket ? `${one.bucket}, with others` : plan.step.tasks.name[taskOf.get(id)]) : ""]),
    lineLink(one.line),
    list("moves", operandsOf(id).map((name) => link("value", (valueOfNode.get(name) || { name }).name)), 8),
    found ? el("p", {}, el("a", { onclick: () => goTo(found) }, `in the program, ${found.stage}`)) : null];
}

function aboutLine(line) {
  const own = plan.collectives.filter((one) => one.line === line).sort(byCost);
  const values = plan.values.filter((value) => value.line === line);
  const modules = [...new Set([...own, ...values].map((one) => rowOf.get(one.fqn)).filter(Boolean))];
  return [title("line", line), sources.has(line) ? el("pre", {}, sources.get(line)) : null,
    figures(["collectives", `${own.length}`], ["received", bytes(total(own, (one) => one.bytes))], ["exposed", plan.step ? time(total(own, (one) => one.exposed || 0) * 1e6) : ""]),
    list("modules", modules.map((row) => link("module", row.name)), 10), list("collectives", own.map(collectiveItem), 20),
    list("values", values.map((value) => el("span", {}, link("value", value.name), " ", notation(value.notation))), 20)];
}

function aboutTask(id) {
  const number = +id, { tasks, buffers } = plan.step, us = tasks.end[number] - tasks.start[number], isLink = tasks.stream[number] > 0;
  const names = (text) => (text ? text.split(" ") : []);
  return [title(tasks.kind[number], tasks.name[number]),
    figures(["on", LANES[plan.step.streams[tasks.stream[number]]]], ["starts", time(tasks.start[number])], ["takes", time(us)],
      ["exposed", isLink ? el("span", { class: "exposed" }, time(exposedOf.get(number) || 0)) : ""],
      [isLink ? "size" : "reads and writes", bytes(tasks.bytes[number])], ["computes", tasks.flops[number] ? `${rate(tasks.flops[number], "FLOP")}, ${rate(tasks.flops[number] / (us * 1e-6), "FLOP/s")}` : ""],
      ["module", moduleLink(tasks.fqn[number])], ["in", tasks.backward[number] ? "backward" : "forward"]),
    list("collectives of the plan", names(tasks.steps[number]).map((step) => collectiveItem(collectiveNamed.get(step))), 20),
    list("calls", names(tasks.nodes[number]).map((node) => link("value", node)), 20),
    list("reads", tasks.inputs[number].map((i) => `${buffers.name[i]}, ${bytes(buffers.bytes[i])}`), 10),
    list("makes", tasks.outputs[number].map((i) => `${buffers.name[i]}, ${bytes(buffers.bytes[i])}`), 10)];
}

// --- views

function show(view) {
  state.view = view;
  state.timeline = null;
  document.querySelectorAll("#tabs button").forEach((button) => button.setAttribute("aria-selected", `${button.dataset.view === view}`));
  $("view").replaceChildren(...[VIEWS[view]()].flat());
}

function overview() {
  const { search } = plan, letters = Object.entries(plan.letters).map(([letter, size]) => `${letter}=${size}`).join("  ");
  const rows = plan.modules.map((row) => el("tr", { class: "row", onclick: () => select("module", row.name) }, el("td", {}, row.name), el("td", {}, notation(row.notation)),
    ...(plan.step ? [el("td", { class: "figure" }, time(row.compute * 1e6))] : []), el("td", { class: "figure" }, row.received ? bytes(row.received) : "-"),
    ...(plan.step ? [el("td", { class: "figure exposed" }, row.exposed > 5e-9 ? time(row.exposed * 1e6) : "-")] : [])));
  const border = (name, values) => el("div", {}, soft(`${name} `), ...values.flatMap(([label, text]) => [`${label}`, notation(text), " "]));
  const heads = ["module", "values and weights, as stored \u2192 as made", ...(plan.step ? ["compute"] : []), "received", ...(plan.step ? ["exposed"] : [])];
  return [border("given", plan.inputs), border("returns", plan.outputs),
    el("p", { class: "soft mono" }, letters, " \u2014 D_tp: dim D cut over axis tp; {U_tp}: a term of a sum over tp"),
    el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((name, i) => el("th", { class: i > 1 ? "figure" : "" }, name)))), el("tbody", {}, ...rows)),
    ...(search ? [el("h2", {}, "what else was simulated"), candidates(search)] : [])];
}

function candidates(search) {
  const us = (seconds) => el("td", { class: "figure" }, time(seconds * 1e6));
  const heads = ["candidate", "step", "compute", "exposed", "hidden", "memory", ""].map((name, i) => el("th", { class: i && i < 6 ? "figure" : "" }, name));
  return el("div", {}, el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...search.candidates.map((one) =>
    el("tr", { class: one.name === search.chosen ? "chosen" : "" }, el("td", {}, one.name), us(one.step_time), us(one.compute), us(one.exposed_comm), us(one.hidden_comm),
      el("td", { class: "figure" }, bytes(one.peak_memory)), el("td", { class: one.fits ? "" : "exposed" }, one.fits ? "fits" : "does not fit"))))),
  ...search.declined.map((line) => el("div", { class: "soft" }, line)));
}

function showTimeline() {
  if (!plan.step) return el("p", { class: "soft" }, LACKING);
  state.timeline = new Timeline(plan.step, plan.search ? plan.search.memory_limit : null, (number) => select("task", number));
  const { timeline } = state;
  if (state.picked) timeline.matches = tasksOf(state.picked.kind, state.picked.id);
  requestAnimationFrame(() => { timeline.draw(); timeline.list(); });
  return timeline.root;
}

function tensor() {
  const picked = state.picked && state.picked.kind === "value" ? valueNamed.get(state.picked.id) || valueOfNode.get(state.picked.id) : null;
  const value = picked || valueNamed.get(state.tensor) || plan.values.find((one) => one.role === "parameter" && one.shape.length > 1) || plan.values[0];
  state.tensor = value.name;
  const choose = el("input", { list: "values", value: value.name, size: 48, "aria-label": "value", onchange: (event) => valueNamed.has(event.target.value) && select("value", event.target.value) });
  return [el("div", { class: "tools" }, choose, el("datalist", { id: "values" }, ...plan.values.map((one) => el("option", { value: one.name }))), notation(value.notation),
    soft(`${value.dtype}[${value.shape.join(", ")}], per rank [${value.local.join(", ")}]`)), drawTensor(value)];
}

function collectives() {
  const groups = [...grouped(plan.collectives, (one) => [one.kind, one.axes, one.line, one.reason, (rowOf.get(one.fqn) || { name: one.fqn }).name].join("|")).values()].map((members) => ({
    first: members[0], members, kind: members[0].kind, over: members[0].axes.join("."), module: (rowOf.get(members[0].fqn) || { name: members[0].fqn }).name, line: members[0].line,
    because: members[0].reason, count: members.length, received: total(members, (one) => one.bytes), takes: total(members, (one) => (one.seconds || 0) * 1e6), exposed: total(members, (one) => (one.exposed || 0) * 1e6) }));
  const columns = [["kind", null], ["over", null], ["count", String], ["received", bytes], ...(plan.step ? [["takes", time], ["exposed", time]] : []), ["module", null], ["line", null], ["because", null]];
  const body = el("tbody", {}), filter = el("input", { type: "search", placeholder: "filter", "aria-label": "filter collectives" });
  let order = plan.step ? "exposed" : "received";
  const fill = () => {
    const wanted = filter.value.toLowerCase();
    const shown = groups.filter((group) => [group.kind, group.over, group.module, group.line, group.because].join(" ").toLowerCase().includes(wanted));
    shown.sort((a, b) => (typeof a[order] === "number" ? b[order] - a[order] : a[order].localeCompare(b[order])) || b.received - a.received);
    body.replaceChildren(...shown.map((group) => el("tr", { class: "row", onclick: () => select("collective", group.first.id) }, ...columns.map(([name, write]) =>
      el("td", { class: `${write ? "figure" : ""} ${name === "exposed" ? "exposed" : ""}` }, name === "line" && group.line ? link("line", group.line) : write ? write(group[name]) : group[name])))));
  };
  filter.addEventListener("input", fill);
  fill();
  return [el("div", { class: "tools" }, filter, soft(`${plan.collectives.length} collectives; a row is those of one line, module and reason`)),
    el("table", { id: "collectives" }, el("thead", {}, el("tr", {}, ...columns.map(([name, write]) => el("th", { class: write ? "figure" : "", onclick: () => { order = name; fill(); } }, name)))), body)];
}

function roofline() {
  return plan.step && plan.mesh.hardware ? drawRoofline((number) => select("task", number)) : el("p", { class: "soft" }, LACKING);
}

function program() {
  const lines = el("div", { class: "program mono" });
  const filter = el("input", { type: "search", placeholder: "lines that hold", "aria-label": "filter lines", value: state.lines || "" });
  const fill = () => {
    const wanted = filter.value.toLowerCase();
    state.lines = filter.value;
    lines.replaceChildren(...linesOf(state.stage).lines.flatMap((line, number) => (wanted && !line.text.toLowerCase().includes(wanted) ? [] : [programLine(line, number)])));
  };
  const choose = el("select", { "aria-label": "stage", onchange: (event) => { state.stage = event.target.value; fill(); } },
    ...Object.keys(plan.graphs).map((stage) => el("option", { value: stage, ...(stage === state.stage ? { selected: "" } : {}) }, stage)));
  filter.addEventListener("input", fill);
  fill();
  const left = plan.modules.length && plan.graphs.CAPTURED ? soft("equal layers are written once") : "";
  return [el("div", { class: "tools" }, choose, filter, left), lines];
}

function programLine({ name, text, line }, number) {
  const [code, comment] = text.split(/(?=\s{6}# )/);
  const made = el("div", { "data-number": number });
  for (const part of code.split(/(%\w+)/)) made.append(part.startsWith("%") ? link("value", part.slice(1), part) : part);
  if (comment) made.append(el("em", {}, "      # ", ...(line ? [link("line", line), comment.split(line).slice(1).join(line)] : [comment.slice(8)])));
  if (state.picked && (state.picked.id === name || state.picked.id === line)) made.className = "picked";
  return made;
}

function goTo({ stage, number }) {
  state.stage = stage;
  state.lines = "";
  show("program");
  const line = document.querySelector(`.program [data-number="${number}"]`);
  line.classList.add("picked");
  line.scrollIntoView({ block: "center" });
}

function remarks() {
  const sorted = [...plan.remarks].sort((a, b) => a.routine - b.routine);
  return sorted.length ? sorted.map((one) => el("div", { class: "remark" }, el("b", {}, one.pass_name), ` ${one.text} `, link("value", one.node, `%${one.node}`), " ",
    one.origin.file ? link("line", `${one.origin.file.split("/").at(-1)}:${one.origin.line}`) : "", soft(` ${one.origin.fqn}${one.routine ? ", routine" : ""}`))) : [soft("no pass had anything to say")];
}

header();
tree();
$("tabs").append(...Object.keys(VIEWS).map((view) => el("button", { role: "tab", "data-view": view, onclick: () => show(view) }, view)));
$("search").addEventListener("input", find);
window.addEventListener("hashchange", picked);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target.tagName !== "INPUT") { event.preventDefault(); $("search").focus(); }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(state.view));
$("details").append(soft("Pick a module, value, collective or task. / searches."));
show("overview");
picked();
