// The step over time: compute and links, exposed time in red, and memory below.

const LANES = { compute: "compute", inside: "links in a node", across: "links between nodes" };

class Timeline {
  /** `pick(number)` is called with the clicked task. */
  constructor(step, limit, pick) {
    this.step = step;
    this.limit = limit;
    this.pick = pick;
    this.tasks = step.tasks;
    this.end = Math.max(...this.chunks(this.tasks.end), 1);
    this.from = 0;
    this.to = this.end;
    this.cursor = this.tasks.turn[this.peak()];
    this.matches = null; // Set of numbers, or null: all
    this.lanes = step.streams
      .map((name, stream) => ({ name, tasks: this.tasks.stream.flatMap((s, number) => (s === stream ? [number] :
        [])) }))
      .filter((lane) => lane.tasks.length);
    this.spans = grouped(step.exposed, (span) => this.tasks.stream[span[0]]);
    this.build();
  }

  /** Return maxima of slices: Math.max takes a limited number of arguments. */
  * chunks(values) {
    for (let i = 0; i < values.length; i += 4096) yield Math.max(...values.slice(i, i + 4096));
  }

  /** Return bytes by kind at each turn, and their sum. */
  memory() {
    if (this.held) return this.held;
    const { buffers, kinds } = this.step;
    const count = this.tasks.turn.length;
    const byKind = kinds.map(() => new Float64Array(count + 1));
    buffers.bytes.forEach((size, i) => {
      if (buffers.first[i] > buffers.last[i]) return;
      byKind[buffers.kind[i]][buffers.first[i]] += size;
      byKind[buffers.kind[i]][buffers.last[i] + 1] -= size;
    });
    byKind.forEach((sizes) => { for (let i = 1; i < sizes.length; i++) sizes[i] += sizes[i - 1]; });
    this.tasks.workspace.forEach((size, i) => { byKind[kinds.indexOf("workspace")][i] += size; });
    const all = new Float64Array(count);
    for (let i = 0; i < count; i++) all[i] = total(byKind, (sizes) => sizes[i]);
    this.held = { byKind, all };
    return this.held;
  }

  peak() {
    const { all } = this.memory();
    let best = 0;
    for (let i = 1; i < all.length; i++)
      if (all[i] > all[best]) best = i;
    return best;
  }

  build() {
    this.canvas = el("canvas", { tabindex: "0", "aria-label": "timeline", id: "timeline" });
    this.live = el("div", { class: "card", id: "live" });
    this.tip = el("div", { class: "tip" });
    const zoom = (factor) => () => this.zoom(factor, (this.from + this.to) / 2);
    const legend = [
      ["forward", "forward"],
      ["backward", "backward"],
      ["optimizer", "optimizer"],
      ["link", "communication"],
      ["exposed", "exposed"]
    ].map(([name, label]) => el("span", {}, el("i", { style: `background:var(--${name})` }), label));
    this.root = el("div", {},
      el("div", { class: "tools" },
        el("button", { class: "button", onclick: zoom(0.5), "aria-label": "zoom in", id: "zoom-in" }, "+"),
        el("button", { class: "button", onclick: zoom(2), "aria-label": "zoom out" }, "\u2212"),
        el("button", { class: "button", onclick: () => this.show(0, this.end) }, "whole step"),
        el("button", { class: "button", onclick: () => this.toPeak() }, "memory peak"),
        el("span", { class: "legend" }, ...legend),
        el("span", { class: "soft" }, "scroll to zoom, drag to move, click to select")),
      el("div", { class: "plot" }, this.canvas), this.tip, el("h2", {}, "live at the cursor"), this.live);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  listen() {
    const at = (event) => this.from + ((event.offsetX / this.canvas.clientWidth) * (this.to - this.from));
    let grabbed = null;
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.move(((event.deltaX || event.deltaY) / this.canvas.clientWidth) * (this.to - this.from));
      } else this.zoom(Math.exp(event.deltaY * 0.002), at(event));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      grabbed = { x: event.offsetX, from: this.from, moved: false };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (grabbed && Math.abs(event.offsetX - grabbed.x) > 3) grabbed.moved = true;
      if (grabbed && grabbed.moved) {
        const width = this.to - this.from;
        const from = grabbed.from - ((event.offsetX - grabbed.x) / this.canvas.clientWidth) * width;
        this.show(from, from + width);
      }
      this.hover(event, at(event));
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const number = this.taskAt(event.offsetY, at(event));
      if (grabbed && !grabbed.moved && number !== null) this.pick(number);
      grabbed = null;
    });
    this.canvas.addEventListener("pointerleave", () => { this.tip.style.display = "none"; });
    this.canvas.addEventListener("dblclick", () => this.show(0, this.end));
    this.canvas.addEventListener("keydown", (event) => {
      const width = this.to - this.from;
      const keys = {
        ArrowLeft: () => this.move(-width / 8),
        ArrowRight: () => this.move(width / 8),
        "+": () => this.zoom(0.5, this.cursor),
        "-": () => this.zoom(2, this.cursor),
        0: () => this.show(0, this.end)
      };
      if (keys[event.key]) { event.preventDefault();
        keys[event.key](); }
    });
  }

  show(from, to) {
    const width = Math.min(Math.max(to - from, this.end / 1e6), this.end);
    this.from = Math.min(Math.max(from, 0), this.end - width);
    this.to = this.from + width;
    this.draw();
  }

  zoom(factor, around) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  move(by) { this.show(this.from + by, this.to + by); }

  toPeak() {
    this.cursor = this.tasks.turn[this.peak()];
    this.show(this.cursor - this.end / 40, this.cursor + this.end / 40);
    this.list();
  }

  /** Highlight the tasks of `numbers` (null: all) and fade the others; scroll to the first unless it is visible. */
  highlight(numbers) {
    this.matches = numbers && numbers.size ? numbers : null;
    const first = this.matches && Math.min(...[...this.matches].slice(0, 1000));
    if (this.matches && (this.tasks.end[first] < this.from || this.tasks.start[first] > this.to)) {
      const width = this.to - this.from;
      this.show(this.tasks.start[first] - width / 2, this.tasks.start[first] + width / 2);
    } else this.draw();
  }

  layout() {
    const lane = 34,
      top = 22,
      memoryTop = top + this.lanes.length * (lane + 16) + 18;
    return { lane, top, memoryTop, memoryHeight: 150, height: memoryTop + 150 + 8 };
  }

  laneTop(number) { const { top, lane } = this.layout(); return top + number * (lane + 16) + 14; }

  draw() {
    const { height } = this.layout();
    const width = this.canvas.clientWidth,
      ratio = window.devicePixelRatio || 1;
    if (!width) return;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const pen = this.pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    this.scale = width / (this.to - this.from);
    this.drawAxis(width, height);
    this.lanes.forEach((lane, number) => this.drawLane(lane, number, width));
    this.drawMemory(width);
    pen.fillStyle = color("accent");
    pen.fillRect((this.cursor - this.from) * this.scale, 0, 1, height);
  }

  drawAxis(width, height) {
    const span = this.to - this.from,
      raw = (span / width) * 110,
      power = 10 ** Math.floor(Math.log10(raw));
    const unit = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
    this.pen.fillStyle = color("soft");
    for (let t = Math.ceil(this.from / unit) * unit; t <= this.to; t += unit) {
      const x = (t - this.from) * this.scale;
      this.pen.fillText(time(t), x + 3, 11);
      this.pen.globalAlpha = 0.15;
      this.pen.fillRect(x, 0, 1, height);
      this.pen.globalAlpha = 1;
    }
  }

  drawLane(lane, number, width) {
    const { lane: height } = this.layout(), y = this.laneTop(number), pen = this.pen;
    const colors = { link: color("link"), forward: color("forward"), backward: color("backward"),
      optimizer: color("optimizer") };
    pen.fillStyle = color("soft");
    pen.fillText(LANES[lane.name] || lane.name, 4, y - 3);
    let drawnTo = -1;
    for (let i = this.firstIn(lane.tasks); i < lane.tasks.length; i++) {
      const task = lane.tasks[i];
      const left = (this.tasks.start[task] - this.from) * this.scale,
        right = (this.tasks.end[task] - this.from) * this.scale;
      if (left > width) break;
      if (right - left < 0.5 && right < drawnTo && !this.matches) continue;
      const isFaint = this.matches && !this.matches.has(task);
      const kind = lane.name !== "compute" ? "link" : this.tasks.kind[task] === "optimizer" ? "optimizer" :
        this.tasks.backward[task] ? "backward" : "forward";
      pen.globalAlpha = isFaint ? 0.18 : 1;
      pen.fillStyle = colors[kind];
      pen.fillRect(left, y, Math.max(right - left - (right - left > 3 ? 0.5 : 0), 0.6), height);
      drawnTo = left + 0.5;
      if (right - left > 46) this.label(this.tasks.name[task], Math.max(left, 0), y, Math.min(right, width) - Math
        .max(left, 0));
    }
    pen.globalAlpha = 1;
    this.drawExposed(this.spans.get(this.step.streams.indexOf(lane.name)) || [], y + height - 9, width);
    pen.globalAlpha = 1;
  }

  /** Colour a pixel red by its exposed part, so that zoomed out, much red is much exposed time. */
  drawExposed(spans, y, width) {
    const parts = new Float32Array(Math.ceil(width) + 1);
    for (const [task, start, end] of spans) {
      if (end < this.from || start > this.to) continue;
      const weight = this.matches && !this.matches.has(task) ? 0.25 : 1;
      const left = Math.max((start - this.from) * this.scale, 0), right = Math.min((end - this.from) * this.scale, width);
      for (let x = Math.floor(left); x < right; x++) parts[x] += weight * (Math.min(right, x + 1) - Math.max(left, x));
    }
    this.pen.fillStyle = color("exposed");
    parts.forEach((part, x) => {
      this.pen.globalAlpha = Math.min(part, 1);
      if (part > 0.01) this.pen.fillRect(x, y, 1, 9);
    });
  }

  label(text, x, y, width) {
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(x, y, width - 3, 30);
    this.pen.clip();
    this.pen.fillStyle = "#fff";
    this.pen.fillText(text, x + 4, y + 15);
    this.pen.restore();
  }

  /** Return the first task of a lane, in order of time, that ends in view. */
  firstIn(tasks) {
    let low = 0,
      high = tasks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.tasks.end[tasks[middle]] < this.from) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  turnAt(t) {
    let low = 0,
      high = this.tasks.turn.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.tasks.turn[middle] <= t) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  drawMemory(width) {
    const { memoryTop, memoryHeight } = this.layout(), { byKind, all } = this.memory(), pen = this.pen;
    const peak = all[this.peak()],
      most = Math.max(peak, this.limit && this.limit < 2 * peak ? this.limit : 0) * 1.05;
    const y = (size) => memoryTop + memoryHeight - (size / most) * memoryHeight;
    const fills = this.step.kinds.map((_, kind) => color(`k${kind}`));
    for (let x = 0; x < width; x++) {
      const last = this.turnAt(this.from + (x + 1) / this.scale);
      let shown = this.turnAt(this.from + x / this.scale);
      for (let i = shown + 1; i <= last; i++)
        if (all[i] > all[shown]) shown = i;
      let below = 0;
      byKind.forEach((sizes, kind) => {
        if (!sizes[shown]) return;
        pen.fillStyle = fills[kind];
        pen.fillRect(x, y(below + sizes[shown]), 1, y(below) - y(below + sizes[shown]) + 0.3);
        below += sizes[shown];
      });
    }
    pen.fillStyle = color("text");
    pen.fillText(`memory, peak ${bytes(peak)}${this.limit ? ` of ${bytes(this.limit)}` : ""}`, 4, memoryTop - 4);
    if (this.limit && this.limit <= most) { pen.fillStyle = color("exposed");
      pen.fillRect(0, y(this.limit), width, 1); }
  }

  taskAt(y, t) {
    const { lane: height } = this.layout();
    const number = this.lanes.findIndex((_, i) => y >= this.laneTop(i) && y <= this.laneTop(i) + height);
    if (number < 0) return null;
    const slack = 2 / this.scale,
      tasks = this.lanes[number].tasks;
    let best = null;
    for (let i = this.firstIn(tasks); i < tasks.length && this.tasks.start[tasks[i]] <= t + slack; i++) {
      if (this.tasks.end[tasks[i]] + slack >= t) best = tasks[i];
      if (this.tasks.start[tasks[i]] <= t && this.tasks.end[tasks[i]] >= t) return tasks[i];
    }
    return best;
  }

  hover(event, t) {
    this.cursor = Math.min(Math.max(t, 0), this.end);
    const number = this.taskAt(event.offsetY, t);
    this.tip.style.display = number === null ? "none" : "block";
    if (number !== null) {
      const exposed = exposedOf.get(number);
      this.tip.replaceChildren(el("b", {}, this.tasks.name[number]), el("div", { class: "soft" }, this.tasks.fqn[
          number]),
        el("div", {}, `${this.tasks.kind[number]}, ${time(this.tasks.end[number] - this.tasks.start[number])}`,
          exposed ? el("span", { class: "exposed" }, `, ${time(exposed)} exposed`) : ""));
      this.tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 430)}px`;
      this.tip.style.top = `${event.clientY + 14}px`;
    }
    this.draw();
    this.list();
  }

  /** List what is live at the cursor: by kind, and the largest buffers. */
  list() {
    const turn = this.turnAt(this.cursor),
      { byKind, all } = this.memory(),
      { buffers, kinds } = this.step;
    const held = [];
    buffers.bytes.forEach((size, i) => { if (size && buffers.first[i] <= turn && turn <= buffers.last[i]) held
        .push(i); });
    const alike = [...grouped(held, (i) =>
        `${pattern(buffers.fqn[i])} ${pattern(bareName(buffers.name[i]))} ${buffers.bytes[i]}`)
      .values()
    ].sort((a, b) => b.length * buffers.bytes[b[0]] - a.length * buffers.bytes[a[0]]);
    const legend = kinds.flatMap((kind, k) => (byKind[k][turn] ? [el("span", {},
      el("i", { style: `background:var(--k${k})` }), `${kind} ${bytes(byKind[k][turn])}`)] : []));
    const rows = alike.slice(0, 14).map((same) => el("tr", { class: "row", onclick: () => select("value", buffers
          .node[same[0]]) },
      el("td", { class: "figure" }, bytes(same.length * buffers.bytes[same[0]])),
      el("td", {}, kinds[buffers.kind[same[0]]]),
      el("td", { class: "mono" }, same.length > 1 ? `${same.length} like ${buffers.name[same[0]]}` : buffers
        .name[same[0]]),
      el("td", { class: "soft" }, buffers.fqn[same[0]])));
    this.live.replaceChildren(
      el("div", { class: "legend" }, el("b", {}, `${bytes(all[turn])} at ${time(this.cursor)}`), ...legend),
      el("table", {}, el("tbody", {}, ...rows)));
  }
}