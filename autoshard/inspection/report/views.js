// The views of the tabs; each returns its elements.

const LACKING =
  "This plan has no simulated step: its hardware is unknown, or it was made by passes of your own. " +
  "Plan it with plan(model, Mesh('dp=8', hardware='h100'), args), or run with Options(hardware='cpu').";

function overview() {
  const { search } = plan;
  const letters = Object.entries(plan.letters).map(([letter, size]) => `${letter}=${size}`).join("  ");
  const rows = plan.modules.map((row) => el("tr", { class: "row", onclick: () => select("module", row.name) }, el(
      "td", {}, row.name), el("td", {}, notation(row.notation)),
    ...(plan.step ? [el("td", { class: "figure" }, time(row.compute * 1e6))] : []), el(
    "td", { class: "figure" }, row.received ? bytes(row.received) : "-"),
    ...(plan.timed ? [el("td", { class: "figure exposed" }, row.exposed > 5e-9 ? time(row.exposed * 1e6) :
      "-")] : [])));
  const border = (name, values) => el("div", {}, soft(`${name} `), ...values.flatMap(([label, text]) => [`${label}`,
    notation(text), " "
  ]));
  const heads = ["module", "values and weights, as stored \u2192 as made", ...(plan.step ? ["compute"] : []),
    "received", ...(plan.timed ? ["exposed"] : [])
  ];
  return [border("given", plan.inputs), border("returns", plan.outputs),
    el("p", { class: "soft mono" }, letters, ` \u2014 ${plan.legend}`),
    el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((name, i) => el("th", { class: i > 1 ? "figure" :
        "" }, name)))), el("tbody", {}, ...rows)),
    ...(search ? [el("h2", {}, "candidates"), candidates(search)] : [])
  ];
}

function candidates(search) {
  const us = (seconds) => el("td", { class: "figure" }, time(seconds * 1e6));
  const heads = ["candidate", "step", "compute", "exposed", "hidden", "memory", ""].map((name, i) => el(
  "th", { class: i && i < 6 ? "figure" : "" }, name));
  return el("div", {}, el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...search.candidates
      .map((one) =>
        el("tr", { class: one.name === search.chosen ? "chosen" : "" }, el("td", {}, one.name), us(one
            .step_time), us(one.compute), us(one.exposed_comm), us(one.hidden_comm),
          el("td", { class: "figure" }, bytes(one.peak_memory)), el("td", { class: one.fits ? "" : "exposed" },
            one.fits ? "fits" : "does not fit"))))),
    ...search.declined.map((line) => el("div", { class: "soft" }, line)));
}

function showTimeline() {
  if (!plan.step) return el("p", { class: "soft" }, LACKING);
  state.timeline = new Timeline(plan.step, plan.search ? plan.search.memory_limit : null, (number) => select("task",
    number));
  const { timeline } = state;
  if (state.picked) timeline.matches = tasksOf(state.picked.kind, state.picked.id);
  requestAnimationFrame(() => { timeline.draw();
    timeline.list(); });
  return timeline.root;
}

function tensor() {
  const picked = state.picked && state.picked.kind === "value" ? valueNamed.get(state.picked.id) || valueOfNode.get(
    state.picked.id) : null;
  const value = picked || valueNamed.get(state.tensor) || plan.values.find((one) => one.role === "parameter" && one
    .shape.length > 1) || plan.values[0];
  state.tensor = value.name;
  const choose = el("input", { list: "values", value: value.name, size: 48, "aria-label": "value", onchange: (
      event) => valueNamed.has(event.target.value) && select("value", event.target.value) });
  return [el("div", { class: "tools" }, choose, el("datalist", { id: "values" }, ...plan.values.map((one) => el(
      "option", { value: one.name }))), notation(value.notation),
    soft(`${value.dtype}[${value.shape.join(", ")}], per rank [${value.local.join(", ")}]`)), drawTensor(value)];
}

function collectives() {
  const groups = [...grouped(plan.collectives, (one) => [one.kind, one.axes, one.line, one.reason, (rowOf.get(one
    .fqn) || { name: one.fqn }).name].join("|")).values()].map((members) => ({
    first: members[0],
    members,
    kind: members[0].kind,
    over: members[0].axes.join("."),
    module: (rowOf.get(members[0].fqn) || { name: members[0].fqn }).name,
    line: members[0].line,
    because: members[0].reason,
    count: members.length,
    received: total(members, (one) => one.bytes),
    takes: total(members, (one) => (one.seconds || 0) * 1e6),
    exposed: total(members, (one) => (one.exposed || 0) * 1e6)
  }));
  const columns = [
    ["kind", null],
    ["over", null],
    ["count", String],
    ["received", bytes], ...(plan.timed ? [
      ["takes", time],
      ["exposed", time]
    ] : []), ["module", null],
    ["line", null],
    ["because", null]
  ];
  const body = el("tbody", {}),
    filter = el("input", { type: "search", placeholder: "filter", "aria-label": "filter collectives" });
  let order = plan.timed ? "exposed" : "received";
  const fill = () => {
    const wanted = filter.value.toLowerCase();
    const shown = groups.filter((group) => [group.kind, group.over, group.module, group.line, group.because].join(
      " ").toLowerCase().includes(wanted));
    shown.sort((a, b) => (typeof a[order] === "number" ? b[order] - a[order] : a[order].localeCompare(b[
      order])) || b.received - a.received);
    body.replaceChildren(...shown.map((group) => el("tr", { class: "row", onclick: () => select("collective",
        group.first.id) }, ...columns.map(([name, write]) =>
      el("td", { class: `${write ? "figure" : ""} ${name === "exposed" ? "exposed" : ""}` }, name ===
        "line" && group.line ? link("line", group.line) : write ? write(group[name]) : group[name])))));
  };
  filter.addEventListener("input", fill);
  fill();
  return [el("div", { class: "tools" }, filter, soft(
      `${plan.collectives.length} collectives; a row joins those of one line, module and reason`)),
    el("table", { id: "collectives" }, el("thead", {}, el("tr", {}, ...columns.map(([name, write]) => el(
    "th", { class: write ? "figure" : "", onclick: () => { order = name;
        fill(); } }, name)))), body)
  ];
}

function roofline() {
  return plan.step && plan.mesh.hardware ? drawRoofline((number) => select("task", number)) : el(
  "p", { class: "soft" }, LACKING);
}

function program() {
  const lines = el("div", { class: "program mono" });
  const filter = el("input", { type: "search", placeholder: "filter lines", "aria-label": "filter lines",
    value: state.lines || "" });
  const fill = () => {
    const wanted = filter.value.toLowerCase();
    state.lines = filter.value;
    const found = linesOf(state.stage).lines.map((line, number) => ({ line, number }))
      .filter(({ line }) => !wanted || line.text.toLowerCase().includes(wanted));
    const chunks = [];
    for (let first = 0; first < found.length; first += CHUNK) chunks.push(chunkOf(found.slice(first, first + CHUNK)));
    lines.replaceChildren(...chunks);
    if (chunks.length) chunks[0].fill();
  };
  const choose = el("select", { "aria-label": "stage", onchange: (event) => { state.stage = event.target.value;
        fill(); } },
    ...Object.keys(plan.graphs).map((stage) => el("option", { value: stage, ...(stage === state.stage ?
      { selected: "" } : {}) }, stage)));
  filter.addEventListener("input", fill);
  fill();
  const left = plan.modules.length && plan.graphs.CAPTURED ? soft("equal layers are shown once") : "";
  return [el("div", { class: "tools" }, choose, filter, left), lines];
}

const CHUNK = 400; // lines rendered at once, when they scroll near: a program may have tens of thousands
const coming = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) entry.target.fill();
}, { rootMargin: "400px" });

function chunkOf(found) {
  const made = el("section", { "data-first": found[0].number, style: `min-height: ${1.5 * found.length}em` });
  made.fill = () => {
    if (!made.firstChild) made.append(...found.map(({ line, number }) => programLine(line, number)));
  };
  coming.observe(made);
  return made;
}

function programLine({ name, text, line }, number) {
  const [code, comment] = text.split(/(?=\s{6}# )/);
  const made = el("div", { "data-number": number });
  for (const part of code.split(/(%\w+)/)) made.append(part.startsWith("%") ? link("value", part.slice(1), part) :
    part);
  if (comment) made.append(el("em", {}, "      # ", ...(line ? [link("line", line), comment.split(line).slice(1)
    .join(line)
  ] : [comment.slice(8)])));
  if (state.picked && (state.picked.id === name || state.picked.id === line)) made.className = "picked";
  return made;
}

function goTo({ stage, number }) {
  state.stage = stage;
  state.lines = "";
  show("program");
  [...document.querySelectorAll(".program section")].findLast((one) => Number(one.dataset.first) <= number).fill();
  const line = document.querySelector(`.program [data-number="${number}"]`);
  line.classList.add("picked");
  line.scrollIntoView({ block: "center" });
}

function remarks() {
  const sorted = [...plan.remarks].sort((a, b) => a.routine - b.routine);
  return sorted.length ? sorted.map((one) => el("div", { class: "remark" }, el("b", {}, one.pass_name),
    ` ${one.text} `, link("value", one.node, `%${one.node}`), " ",
    one.origin.file ? link("line", `${one.origin.file.split("/").at(-1)}:${one.origin.line}`) : "", soft(
      ` ${one.origin.fqn}${one.routine ? ", routine" : ""}`))) : [soft("there are no remarks")];
}