// Two pictures: what each rank holds of a tensor, and the roofline of the ops.

const MOST_CELLS = 4096; // drawn of a mesh

/** The placement of a value on each axis, as what it does to a dim: {dim, outer} of a shard, else null. */
function shards(value) {
  return value.placements.map((text) => {
    const found = /^S\((\d+)(?:\/(\d+))?\)$/.exec(text);
    return found ? { dim: +found[1], outer: +(found[2] || 1) } : null;
  });
}

/** Into how many blocks a dim is cut, and which of them a rank holds. */
function blocksOf(value, dim) {
  const { sizes } = plan.mesh;
  const here = shards(value).flatMap((shard, axis) => (shard && shard.dim === dim ? [{ ...shard, axis, size: sizes[
      axis] }] : []));
  const count = Math.max(1, ...here.map((shard) => shard.outer * shard.size));
  const holds = (coordinate, block) => here.every(({ outer, size, axis }) =>
    Math.floor((block * outer * size) / count) % size === coordinate[axis]);
  return { count, holds };
}

function coordinateOf(place) {
  const found = [];
  for (let axis = plan.mesh.sizes.length - 1; axis >= 0; axis--) {
    found.unshift(place % plan.mesh.sizes[axis]);
    place = Math.floor(place / plan.mesh.sizes[axis]);
  }
  return found;
}

/** Blocks of a dim that a rank holds, as runs: [[first, last], ...]. */
function runsOf(blocks, coordinate) {
  const runs = [];
  for (let block = 0; block < blocks.count; block++) {
    if (!blocks.holds(coordinate, block)) continue;
    if (runs.length && runs[runs.length - 1][1] === block - 1) runs[runs.length - 1][1] = block;
    else runs.push([block, block]);
  }
  return runs;
}

function heldText(value, coordinate) {
  return value.shape.map((size, dim) => {
    const blocks = blocksOf(value, dim),
      runs = runsOf(blocks, coordinate),
      each = Math.ceil(size / blocks.count);
    if (blocks.count === 1) return `dim ${dim}: all ${size}`;
    const [first, last] = runs[0];
    const range = `${first * each} to ${Math.min((last + 1) * each, size) - 1}`;
    return runs.length === 1 ? `dim ${dim}: ${range} of ${size}` :
      `dim ${dim}: ${runs.length} stripes of ${(last - first + 1) * each}, from ${range}`;
  });
}

/** The mesh and one value: point at a rank to see its part, at a part to see who holds it. */
function drawTensor(value) {
  const ranks = plan.mesh.sizes.reduce((product, size) => product * size, 1);
  const shown = Math.min(ranks, MOST_CELLS),
    coordinates = Array.from({ length: shown }, (_, place) => coordinateOf(place));
  const mesh = el("div", { class: "card", id: "mesh" }),
    tensor = el("div", { class: "card", id: "tensor" });
  const words = el("p", { class: "soft", id: "held" });
  const dims = value.shape.map((_, dim) => blocksOf(value, dim));
  const order = value.shape.map((_, dim) => dim).sort((a, b) => dims[b].count - dims[a].count || value.shape[b] -
    value.shape[a]);
  const [vertical, horizontal] = order.slice(0, 2).sort((a, b) => a - b);
  const cutting = shards(value).flatMap((shard, axis) => (shard ? [axis] : []));
  const partOf = (place) => cutting.map((axis) => coordinates[place][axis]).join(" ");
  const cells = [];

  function point(place) {
    const mine = partOf(place);
    cells.forEach((cell, other) => {
      const isSame = partOf(other) === mine;
      cell.setAttribute("fill", other === place ? color("accent") : isSame ? color("link") : color("line"));
    });
    const alike = cells.filter((_, other) => partOf(other) === mine).length;
    const partial = value.placements.flatMap((text, axis) => (text.startsWith("P") ? [
      `a term of a ${text.slice(2, -1)} over ${plan.mesh.names[axis]}`
    ] : []));
    const where = coordinates[place].map((c, axis) => `${plan.mesh.names[axis]}=${c}`).join(", ");
    const held = [...(value.shape.length ? heldText(value, coordinates[place]) : ["the scalar"]), ...partial];
    words.replaceChildren(el("b", {}, `rank ${place} (${where}) `), `holds ${held.join("; ")}. ` +
      (alike > 1 ? `${alike} ranks hold the same part.` : "No other rank holds it."));
    drawPart(coordinates[place]);
  }

  function drawPart(coordinate) {
    const width = 380,
      height = vertical === undefined ? 60 : 300,
      left = 46,
      top = 22;
    const rows = vertical === undefined ? { count: 1, holds: () => true } : dims[vertical];
    const columns = horizontal === undefined ? { count: 1, holds: () => true } : dims[horizontal];
    const frame = svg("svg", { viewBox: `0 0 ${width + left + 4} ${height + top + 4}`, width: "100%",
    role: "img" });
    frame.append(svg("rect", { x: left, y: top, width, height, fill: color("line") }));
    for (const [a, b] of runsOf(rows, coordinate)) {
      for (const [c, d] of runsOf(columns, coordinate)) {
        frame.append(svg("rect", {
          x: left + (c / columns.count) * width,
          y: top + (a / rows.count) * height,
          fill: color("accent"),
          width: ((d - c + 1) / columns.count) * width,
          height: Math.max(((b - a + 1) / rows.count) * height, 1)
        }));
      }
    }
    const lines = (count, draw) => { if (count <= 64)
        for (let i = 1; i < count; i++) draw(i / count); };
    const stroke = { stroke: color("card"), "stroke-width": 0.7 };
    lines(rows.count, (f) => frame.append(svg("line", { x1: left, x2: left + width, y1: top + f * height, y2: top +
        f * height, ...stroke })));
    lines(columns.count, (f) => frame.append(svg("line", { y1: top, y2: top + height, x1: left + f * width,
      x2: left + f * width, ...stroke })));
    if (vertical !== undefined) frame.append(svg("text", { x: 2, y: top + height / 2 },
    `${value.shape[vertical]}`));
    if (horizontal !== undefined) frame.append(svg("text", { x: left + width / 2, y: 14 },
      `${value.shape[horizontal]}`));
    frame.addEventListener("click", (event) => {
      const box = frame.getBoundingClientRect(),
        unit = (width + left + 4) / box.width;
      const x = ((event.clientX - box.left) * unit - left) / width,
        y = ((event.clientY - box.top) * unit - top) / height;
      const holder = coordinates.findIndex((one) => rows.holds(one, Math.floor(y * rows.count)) && columns
        .holds(one, Math.floor(x * columns.count)));
      if (holder >= 0) point(holder);
    });
    tensor.replaceChildren(el("h2", {}, `what it holds of ${value.name}`), frame,
      el("div", { class: "soft" }, order.length > 2 ?
        `drawn: dims ${vertical} and ${horizontal} of ${value.shape.length}` : ""));
  }

  const names = plan.mesh.names,
    columns = plan.mesh.sizes[names.length - 1],
    rows = Math.ceil(shown / columns);
  const cell = Math.max(5, Math.min(34, 380 / columns, 420 / rows)),
    node = plan.mesh.hardware ? plan.mesh.hardware.node_size : ranks;
  const frame = svg("svg", { width: columns * cell + 4, height: rows * cell + 4, role: "img" });
  coordinates.forEach((_, place) => {
    const row = Math.floor(place / columns),
      x = 2 + (place % columns) * cell,
      y = 2 + row * cell;
    cells.push(svg("rect", { x, y, width: cell - 1.5, height: cell - 1.5, rx: 2, class: "rank",
      onpointerenter: () => point(place), onclick: () => point(place) }));
    frame.append(cells[place]);
    if (cell >= 22) frame.append(svg("text", { x: x + 4, y: y + cell / 2 + 3, "pointer-events": "none" },
      `${place}`));
  });
  const place = { inside: " (in a node)", across: " (between nodes)" };
  const axes = names.map((name, axis) =>
    `${name}=${plan.mesh.sizes[axis]}${plan.mesh.links ? place[plan.mesh.links[axis]] : ""}`);
  const rest = shown < ranks ? `; the first ${shown} of ${ranks}` : "";
  mesh.append(el("h2", {}, "the mesh"), el("div", { class: "soft" },
    `a row is ${names[names.length - 1]}; ${axes.join(", ")}; ${node} ranks to a node${rest}`), frame);
  point(0);
  return el("div", {}, words, el("div", { class: "columns" }, mesh, tensor));
}

/** Kernels of equal layers and equal ops together: {name, module, numbers, seconds, flops, bytes}. */
function bigOps() {
  const { tasks } = plan.step;
  const kernels = tasks.kind.flatMap((kind, number) => (kind === "compute" || kind === "optimizer" ? [number] :
[]));
  const stem = (number) => bareName(tasks.name[number]).replace(/^backward\./, "").replace(/(_\d+)?(\.\d+)?$/, "");
  const moduleOf = (n) => (rowOf.has(tasks.fqn[n]) ? rowOf.get(tasks.fqn[n]).name : pattern(tasks.fqn[n]));
  const groups = grouped(kernels, (n) =>
    [moduleOf(n), stem(n), tasks.flops[n], tasks.bytes[n], tasks.backward[n]].join(" "));
  return [...groups.values()].map((numbers) => ({
    name: stem(numbers[0]),
    module: moduleOf(numbers[0]),
    numbers,
    us: total(numbers, (n) => tasks.end[n] - tasks.start[n]),
    flops: total(numbers, (n) => tasks.flops[n]),
    bytes: total(numbers, (n) => tasks.bytes[n]),
    backward: tasks.backward[numbers[0]],
  })).sort((a, b) => b.us - a.us);
}

function drawRoofline(pickTask) {
  const ops = bigOps(),
    width = 900,
    height = 400,
    left = 62,
    bottom = 34;
  const { hardware } = plan.mesh;
  const peaks = [...grouped(Object.entries(hardware.flops), ([, peak]) => peak)].map(([peak, same]) => [same.map(([
    dtype
  ]) => dtype).join(", "), peak]);
  const most = Math.max(...peaks.map(([, peak]) => peak));
  const points = ops.filter((op) => op.flops && op.bytes && op.us).slice(0, 80)
    .map((op) => ({ ...op, x: op.flops / op.bytes, y: op.flops / (op.us * 1e-6) })).filter((op) => op.y > most /
      1e5);
  const xs = [Math.min(0.05, ...points.map((p) => p.x)), Math.max(2e4, ...points.map((p) => p.x))];
  const ys = [most / 1e5, most * 2];
  const scale = (value, [low, high]) => (Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low));
  const X = (value) => left + scale(value, xs) * (width - left - 10),
    Y = (value) => (height - bottom) * (1 - scale(value, ys)) + 6;
  const frame = svg("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", id: "roofline", role: "img" });
  const line = (x1, y1, x2, y2) => svg("line", { x1: X(x1), y1: Y(y1), x2: X(x2), y2: Y(y2), stroke: color(
    "soft"), "stroke-width": 1.2 });
  for (let x = 10 ** Math.ceil(Math.log10(xs[0])); x < xs[1]; x *= 10) frame.append(svg("text", { x: X(x) - 8,
    y: height - 14 }, `${+x.toPrecision(1)}`));
  for (let y = 10 ** Math.ceil(Math.log10(ys[0])); y < ys[1]; y *= 10) frame.append(svg("text", { x: 2, y: Y(y) +
      4 }, rate(y, "F/s")));
  frame.append(svg("text", { x: width - 10, y: height - 2, "text-anchor": "end" },
    "FLOP per byte of memory read or written"));
  for (const [dtype, peak] of peaks) {
    const ridge = peak / hardware.memory_bandwidth;
    frame.append(line(ridge, peak, xs[1], peak), svg("text", { x: width - 12, y: Y(peak) -
      4, "text-anchor": "end" }, `${dtype} ${rate(peak, "FLOP/s")}`));
  }
  const top = most / hardware.memory_bandwidth,
    start = Math.max(xs[0], ys[0] / hardware.memory_bandwidth);
  frame.append(line(start, start * hardware.memory_bandwidth, top, most), svg("text", { x: X(start * 3) - 8, y: Y(
        start * 3 * hardware.memory_bandwidth) - 12, "text-anchor": "end" },
    `memory ${rate(hardware.memory_bandwidth, "B/s")}`));
  for (const op of points) {
    const radius = 3 + 16 * Math.sqrt(op.us / ops[0].us);
    frame.append(svg("circle", {
        cx: X(op.x),
        cy: Y(op.y),
        r: radius,
        fill: color(op.backward ? "backward" : "forward"),
        "fill-opacity": 0.55,
        stroke: color("card"),
        style: "cursor:pointer",
        onclick: () => pickTask(op.numbers[0])
      },
      svg("title", {}, `${op.module} ${op.name}: ${time(op.us)}, ${rate(op.y, "FLOP/s")}`)));
  }
  const rows = ops.slice(0, 40).map((op) => {
    const speed = op.flops / (op.us * 1e-6),
      flow = op.bytes / (op.us * 1e-6);
    return el("tr", { class: "row", onclick: () => pickTask(op.numbers[0]) }, el("td", { class: "figure" },
        time(op.us)), el("td", { class: "figure" }, `${op.numbers.length}`),
      el("td", { class: "mono" }, op.name), el("td", {}, op.module), el("td", {}, op.backward ? "backward" :
        "forward"),
      el("td", { class: "figure" }, op.flops ? rate(speed, "FLOP/s") : "-"), el("td", { class: "figure" },
        rate(flow, "B/s")),
      el("td", { class: "figure" }, `${(100 * flow / hardware.memory_bandwidth).toFixed(0)} %`));
  });
  const heads = ["time", "kernels", "op", "module", "", "computes", "moves", "of memory"].map((name, i) =>
    el("th", { class: [0, 1, 5, 6, 7].includes(i) ? "figure" : "" }, name));
  return el("div", {}, el("div", { class: "plot" }, frame), el("h2", {},
      "ops by time; those of equal layers are added up"),
    el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows)));
}