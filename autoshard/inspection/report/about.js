// Details of the selected thing, with links to everything related.

const UNKNOWN = "this plan has nothing of that name";

function title(kind, id) { return el("h2", { class: "mono" }, soft(`${kind} `), id); }

function lineLink(line) { return line ? el("div", {}, link("line", line), sources.has(line) ? el(
  "div", { class: "mono soft" }, sources.get(line)) : "") : null; }

function moduleLink(fqn) {
  const row = rowOf.get(fqn);
  return row ? link("module", row.name, fqn || row.name) : fqn || null;
}

function list(name, items, most) {
  if (!items.length) return null;
  return el("div", {}, el("h2", {}, `${name} (${items.length})`), ...items.slice(0, most).map((item) => el(
    "div", {}, item)), items.length > most ? soft(`and ${items.length - most} more`) : "");
}

function collectiveItem(one) {
  return el("span", {}, link("collective", one.id), ` ${bytes(one.bytes)}`, one.exposed > 5e-9 ? el(
  "span", { class: "exposed" }, ` ${time(one.exposed * 1e6)} exposed`) : "");
}

const byCost = (a, b) => (b.exposed || 0) - (a.exposed || 0) || b.bytes - a.bytes;

function aboutModule(name) {
  const row = moduleNamed.get(name);
  if (!row) return [title("module", name), soft(UNKNOWN)];
  const fqns = new Set(row.fqns);
  const own = plan.collectives.filter((one) => fqns.has(one.fqn)).sort(byCost);
  const held = plan.parameters.filter((group) => group.names.some((one) => fqns.has(one.split(".").slice(0, -1)
    .join("."))));
  const made = plan.values.filter((value) => value.role === "value" && fqns.has(value.fqn));
  return [title("module", name), row.notation ? el("div", {}, notation(row.notation)) : null,
    figures(["modules", row.fqns.length > 1 ? `${row.fqns.length}` : ""], ["compute", plan.step ? time(row
        .compute * 1e6) : ""],
      ["received", bytes(row.received)], ["exposed", plan.timed ? time(row.exposed * 1e6) : ""]),
    list("parameters", held.map((group) => el("span", {}, link("value", group.names[0], group.name), " ",
      notation(group.notation))), 12),
    list("collectives", own.map(collectiveItem), 14),
    list("lines", [...new Set([...own, ...made].map((one) => one.line).filter(Boolean))].map(lineLink), 8),
    list("values", made.map((value) => el("span", {}, link("value", value.name), " ", notation(value.notation))),
      14)
  ];
}

function aboutValue(name) {
  const value = valueNamed.get(name) || valueOfNode.get(name) || valueOfNode.get(bareName(name));
  const node = value ? value.node : name;
  const found = definition(bareName(node));
  const related = plan.collectives.filter((one) => operandsOf(one.id).includes(node));
  return [title(value ? value.role : "value", name),
    value ? el("div", {}, notation(value.notation)) : null,
    value ? figures(["global", `${value.dtype}[${value.shape.join(", ")}]`], ["per rank",
        `[${value.local.join(", ")}]`
      ],
      ...plan.mesh.names.map((axis, i) => [`on ${axis}`, value.placements[i]]), ["op", value.op], ["module",
        moduleLink(value.fqn)
      ], ["because", value.note]) : null,
    lineLink(value ? value.line : found && found.line),
    value ? el("p", {}, el("a", { onclick: () => { state.tensor = value.name;
        show("tensor"); } }, "show what each rank holds")) : null,
    found ? el("p", {}, el("a", { onclick: () => goTo(found) }, `in the program, ${found.stage}`)) : null,
    list("collectives that move it", related.map(collectiveItem), 14)
  ];
}

/** Return the names of a collective's operands, read from the text of its stage. */
const operandsKnown = new Map();

function operandsOf(id) {
  if (!operandsKnown.has(id)) {
    const text = plan.graphs.COLLECTIVE || "",
      node = bareName(id);
    const number = text ? linesOf("COLLECTIVE").numbers.get(node) : undefined;
    const call = number === undefined ? "" : linesOf("COLLECTIVE").lines[number].text.split("      # ")[0].split(
      " = ").slice(1).join(" = ");
    operandsKnown.set(id, [...call.matchAll(/%(\w+)/g)].map((found) => found[1]));
  }
  return operandsKnown.get(id);
}

function aboutCollective(id) {
  const one = collectiveNamed.get(id);
  if (!one) return [title("collective", id), soft(UNKNOWN)];
  const found = definition(bareName(id));
  return [title(one.kind, id),
    figures(["over", one.axes.join(", ")], ["receives", bytes(one.bytes)], ["takes", one.seconds === null ? "" :
        time(one.seconds * 1e6)
      ],
      ["exposed", one.exposed === null ? "" : el("span", { class: one.exposed > 5e-9 ? "exposed" : "" }, time(one
        .exposed * 1e6))], ["hidden behind", one.behind.join(", ")],
      ["runs in",
        `${one.backward ? "backward" : "forward"}${one.recomputed ? ", and again in the backward" : ""}`], [
        "because", one.reason
      ], ["sent", one.way], ["module", moduleLink(one.fqn)],
      ["message", taskOf.has(id) ? link("task", taskOf.get(id), one.bucket ? `${one.bucket}, with others` : plan
        .step.tasks.name[taskOf.get(id)]) : ""]),
    lineLink(one.line),
    list("moves", operandsOf(id).map((name) => link("value", (valueOfNode.get(name) || { name }).name)), 8),
    found ? el("p", {}, el("a", { onclick: () => goTo(found) }, `in the program, ${found.stage}`)) : null
  ];
}

function aboutLine(line) {
  const own = plan.collectives.filter((one) => one.line === line).sort(byCost);
  const values = plan.values.filter((value) => value.line === line);
  const modules = [...new Set([...own, ...values].map((one) => rowOf.get(one.fqn)).filter(Boolean))];
  return [title("line", line), sources.has(line) ? el("pre", {}, sources.get(line)) : null,
    figures(["collectives", `${own.length}`], ["received", bytes(total(own, (one) => one.bytes))], ["exposed",
      plan.timed ? time(total(own, (one) => one.exposed || 0) * 1e6) : ""
    ]),
    list("modules", modules.map((row) => link("module", row.name)), 10), list("collectives", own.map(
      collectiveItem), 20),
    list("values", values.map((value) => el("span", {}, link("value", value.name), " ", notation(value
      .notation))), 20)
  ];
}

function aboutTask(id) {
  const number = +id,
    { tasks, buffers } = plan.step,
    us = tasks.end[number] - tasks.start[number],
    isLink = tasks.stream[number] > 0;
  const names = (text) => (text ? text.split(" ") : []);
  return [title(tasks.kind[number], tasks.name[number]),
    figures(["on", LANES[plan.step.streams[tasks.stream[number]]]], ["starts", time(tasks.start[number])], [
        "takes", time(us)
      ],
      ["exposed", isLink ? el("span", { class: "exposed" }, time(exposedOf.get(number) || 0)) : ""],
      [isLink ? "size" : "reads and writes", bytes(tasks.bytes[number])], ["computes", tasks.flops[number] ?
        `${rate(tasks.flops[number], "FLOP")}, ${rate(tasks.flops[number] / (us * 1e-6), "FLOP/s")}` : ""
      ],
      ["module", moduleLink(tasks.fqn[number])], ["in", tasks.backward[number] ? "backward" : "forward"]),
    list("collectives of the plan", names(tasks.steps[number]).filter((step) => collectiveNamed.has(step))
      .map((step) => collectiveItem(collectiveNamed.get(step))), 20),
    list("calls", names(tasks.nodes[number]).map((node) => link("value", node)), 20),
    list("reads", tasks.inputs[number].map((i) => `${buffers.name[i]}, ${bytes(buffers.bytes[i])}`), 10),
    list("makes", tasks.outputs[number].map((i) => `${buffers.name[i]}, ${bytes(buffers.bytes[i])}`), 10)
  ];
}