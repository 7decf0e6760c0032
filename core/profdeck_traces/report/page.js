"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Tables: sort by a heading, filter by a word, copy a name.
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const cell = button.parentElement, body = cell.closest("table").tBodies[0], at = cell.cellIndex;
  const down = cell.getAttribute("aria-sort") !== "descending";
  for (const other of cell.parentElement.cells) other.removeAttribute("aria-sort");
  cell.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => { const text = row.cells[at].textContent, n = parseFloat(text.replace(/,/g, "")); return isNaN(n) ? text : n; };
  const rows = [...body.rows].map(row => [key(row), row]);
  rows.sort((a, b) => (typeof a[0] === "number" && typeof b[0] === "number" ? a[0] - b[0] : String(a[0]).localeCompare(String(b[0]))) * (down ? -1 : 1));
  body.append(...rows.map(row => row[1]));
});
for (const input of document.querySelectorAll("input.filter")) input.addEventListener("input", () => {
  const words = input.value.toLowerCase().split(/\s+/);
  for (const row of $(input.dataset.table).tBodies[0].rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
});
for (const cell of document.querySelectorAll("td.copy")) cell.addEventListener("click", () => {
  navigator.clipboard && navigator.clipboard.writeText(cell.title || cell.textContent);
});

const canvas = $("canvas");
if (!canvas || !data.ranks.length) return;
const context = canvas.getContext("2d"), tip = $("tip");
const PALETTE = ["#4e79a7","#f28e2b","#59a14f","#b07aa1","#76b7b2","#edc948","#e15759","#9c755f","#ff9da7","#86bcb6","#d37295","#a0cbe8","#8cd17d","#b6992d","#499894","#d4a6c8"];
const FIXED = {"compute":"#2e9b57","compute and communication":"#1d8f8f","communication":"#8a4fbf","copies":"#3b7dd8","memory copy":"#3b7dd8","memory set":"#7fa8e0",
"gemm":"#2e9b57","attention":"#0f766e","idle":"#b9a27a","idle: launching":"#f2a33a","idle: operators":"#d9822b","idle: Python and other host code":"#e2c04b","idle: synchronising":"#cc4b37",
"idle: allocating":"#8c564b","idle: copying":"#a3a948","idle: other runtime calls":"#c49c6b","idle: profiler overhead":"#777","idle: nothing recorded":"#9aa3ad",
"launching":"#f2a33a","operators":"#4e79a7","Python and other host code":"#c7b24a","synchronising":"#cc4b37","allocating":"#8c564b","copying":"#a3a948","other runtime calls":"#c49c6b","profiler overhead":"#777","operator":"#4e79a7","python":"#e2c04b","runtime call":"#f2a33a","allocation":"#8c564b","between":"#9aa3ad","launch latency":"#c49c6b","kernel":"#2e9b57","copy":"#3b7dd8","collective":"#8a4fbf","wait for thread":"#d8a0a0","synchronisation":"#cc4b37","queue full":"#d37295","device gap":"#b9a27a","device held":"#b6992d","data loading":"#e15759","garbage collection":"#76b7b2","checkpoint":"#499894","profiler":"#777","not recorded":"#b9bec6"};
const seen = new Map();
const colour = name => { if (!seen.has(name)) seen.set(name, FIXED[name] || PALETTE[[...name].reduce((h, c) => (h * 31 + c.codePointAt(0)) >>> 0, 7) % PALETTE.length]); return seen.get(name); };
const packed = new Map();
const pack = name => { if (!packed.has(name)) { const n = parseInt(colour(name).slice(1).padEnd(6, colour(name).slice(1)), 16); packed.set(name, (255 << 24) | ((n & 255) << 16) | (n & 0xff00) | (n >> 16)); } return packed.get(name); };

const HEIGHT = {title: 18, marks: 15, path: 26, device: 26, stream: 13, thread: 13}, LEFT = 170, AXIS = 20;
let mode = data.ranks.some(rank => rank.windows.length > 1) ? "step" : "whole";
let details = data.ranks.length <= 8, view = null, rows = [], width = 0, height = 0, frame = 0;
const windowOf = rank => rank.windows[mode === "step" && rank.windows.length > 1 ? 1 : 0];
// Whether ranks share an axis: by real time where all know theirs and overlap, else each begins at 0.
function offsets() {
  const known = data.ranks.every(rank => rank.origin !== null);
  const starts = data.ranks.map(rank => (known ? rank.origin : 0) + windowOf(rank).start);
  const ends = data.ranks.map((rank, i) => starts[i] + windowOf(rank).duration);
  const together = known && data.shared && Math.max(...starts) < Math.min(...ends);
  const zero = Math.min(...starts);
  return data.ranks.map((rank, i) => (together ? starts[i] - zero : 0) - windowOf(rank).start);
}
let shift = [];
function extent() {
  return Math.max(...data.ranks.map((rank, i) => shift[i] + windowOf(rank).start + windowOf(rank).duration));
}
function layout() {
  shift = offsets(); rows = []; let y = AXIS;
  const add = (kind, more) => { const h = more.tall ? HEIGHT.device : HEIGHT[kind]; rows.push({kind, y, h, ...more}); y += h; };
  data.ranks.forEach((rank, r) => {
    const w = windowOf(rank);
    add("title", {r, name: rank.label + (w.title === "recording" ? "" : "  " + w.title)});
    if (w.marks.some(mark => mark[1] !== 2)) add("marks", {r, w, steps: true, name: "steps"});
    if (w.marks.some(mark => mark[1] === 2)) add("marks", {r, w, steps: false, name: "stages"});
    const hasDevice = w.lanes.some(lane => lane.kind === "device");
    w.lanes.forEach((lane, l) => {
      const main = lane.kind === "path" || lane.kind === "device" || (!hasDevice && lane.main);
      if (details || main) add(lane.kind, {r, w, lane, l, name: lane.name, tall: main});
    });
    y += 6;
  });
  height = y + 4; if (!view) view = [0, extent()];
  canvas.style.height = height + "px"; resize();
}
function resize() {
  const ratio = devicePixelRatio || 1; width = canvas.clientWidth;
  canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
  context.setTransform(ratio, 0, 0, ratio, 0, 0); redraw();
}
async function unpack(lane) {
  const bytes = Uint8Array.from(atob(lane.shares), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const flat = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = lane.classes.length, buckets = flat.length / Math.max(1, count);
  // Sums up to each part, so that any range costs two look-ups a class.
  lane.sums = lane.classes.map((_, c) => { const s = new Float32Array(buckets + 1); for (let b = 0; b < buckets; b++) s[b + 1] = s[b] + flat[c * buckets + b] / 255; return s; });
  lane.buckets = buckets;
}
const x = time => LEFT + (time - view[0]) / (view[1] - view[0]) * (width - LEFT);
const timeAt = px => view[0] + (px - LEFT) / (width - LEFT) * (view[1] - view[0]);
function unit(us) { const a = Math.abs(us); return a >= 1e6 ? (us / 1e6).toFixed(3) + " s" : a >= 1000 ? (us / 1000).toFixed(a >= 1e5 ? 1 : 3) + " ms" : us.toFixed(1) + " us"; }
function range(row, px) {
  const w = row.w, n = row.lane.buckets, from = (timeAt(px) - shift[row.r] - w.start) / w.duration * n, to = (timeAt(px + 1) - shift[row.r] - w.start) / w.duration * n;
  if (to <= 0 || from >= n) return null;
  const a = Math.max(0, Math.min(n - 1, Math.floor(from))), b = Math.min(n, Math.max(a + 1, Math.ceil(to)));
  return [a, b];
}
function drawLane(row) {
  const lane = row.lane; if (!lane.sums) return;
  const ratio = devicePixelRatio || 1, left = Math.round(LEFT * ratio), w = canvas.width - left, h = Math.round((row.h - 2) * ratio);
  if (w <= 0) return;
  const image = context.createImageData(w, h), pixels = new Uint32Array(image.data.buffer), colours = lane.classes.map(pack);
  const c = lane.classes.length;
  for (let px = 0; px < w; px++) {
    const found = range(row, LEFT + px / ratio); if (!found) continue;
    const [a, b] = found; let total = 0, from = h;
    for (let k = 0; k < c; k++) {
      total += (lane.sums[k][b] - lane.sums[k][a]) / (b - a);
      const to = Math.max(0, h - Math.round(Math.min(1, total) * h));
      for (let line = to; line < from; line++) pixels[line * w + px] = colours[k];
      from = Math.min(from, to);
    }
  }
  context.putImageData(image, left, Math.round((row.y + 1) * ratio));
}
function box(row, start, duration, name, fill, line) {
  const from = Math.max(LEFT, x(shift[row.r] + start)), to = Math.min(width, x(shift[row.r] + start + duration));
  if (to - from < 1 || to < LEFT) return;
  if (fill) { context.fillStyle = fill; context.fillRect(from, row.y + 1, Math.max(1, to - from - 1), row.h - 2); }
  if (line && to - from > 3) { context.strokeStyle = line; context.strokeRect(from + .5, row.y + 1.5, to - from - 1, row.h - 3); }
  if (to - from > 44) {
    context.fillStyle = fill || row.kind !== "marks" ? "#10151c" : style("--fg"); context.save(); context.beginPath();
    context.rect(from, row.y, to - from - 3, row.h); context.clip(); context.fillText(name, from + 4, row.y + row.h - 4); context.restore();
  }
}
function draw() {
  frame = 0; const began = performance.now();
  context.fillStyle = style("--bg"); context.fillRect(0, 0, width, height);
  const top = Math.max(0, -canvas.getBoundingClientRect().top), bottom = top + innerHeight;
  const visible = rows.filter(row => row.y + row.h >= top && row.y <= bottom);
  for (const row of visible) if (row.lane) drawLane(row);
  context.font = "11px system-ui,sans-serif"; const fg = style("--fg"), dim = style("--dim"), line = style("--line");
  const steps = 8, span = view[1] - view[0];
  for (let i = 0; i <= steps; i++) { const px = LEFT + i * (width - LEFT) / steps; context.fillStyle = line; context.fillRect(px, AXIS - 4, 1, height); context.fillStyle = dim; if (i < steps) context.fillText(unit(view[0] + span * i / steps), px + 3, 12); }
  for (const row of visible) {
    context.fillStyle = row.kind === "title" ? fg : dim; context.font = (row.kind === "title" ? "600 12px" : "11px") + " system-ui,sans-serif";
    context.save(); context.beginPath(); context.rect(0, row.y, row.kind === "title" ? width : LEFT - 6, row.h + 4); context.clip();
    context.fillText(row.name, row.kind === "title" ? 4 : 14, row.y + row.h - 3); context.restore();
    context.font = "11px system-ui,sans-serif";
    if (row.kind === "marks") for (const mark of row.w.marks) if ((mark[1] !== 2) === row.steps) box(row, mark[2], mark[3], data.names[mark[0]], row.steps ? "#9db7d6" : "#b9c7a0");
    if (row.lane) {
      const own = row.w.events.filter(event => event[0] === row.l);
      // Of nested ones the innermost has room for its name.
      own.forEach((event, i) => { const inner = own[i + 1] && own[i + 1][2] < event[2] + event[3]; box(row, event[2], event[3], inner ? "" : data.names[event[1]], null, "rgba(0,0,0,.35)"); });
    }
  }
  canvas.dataset.redraw = (performance.now() - began).toFixed(1); canvas.dataset.view = view.map(Math.round).join(" ");
}
function redraw() { if (!frame) frame = requestAnimationFrame(draw); }
function zoom(factor, at) {
  const full = extent(), t = at ?? (view[0] + view[1]) / 2, span = Math.min(full, Math.max(full / 20000, (view[1] - view[0]) * factor));
  let from = t - (t - view[0]) / (view[1] - view[0]) * span; from = Math.max(0, Math.min(full - span, from));
  view = [from, from + span]; redraw();
}
function pan(part) { const span = view[1] - view[0], from = Math.max(0, Math.min(extent() - span, view[0] + part * span)); view = [from, from + span]; redraw(); }
function setMode(to) { mode = to; view = null; layout(); for (const b of document.querySelectorAll("button[data-mode]")) b.setAttribute("aria-pressed", b.dataset.mode === mode); legend(); }
function legend() {
  const make = (tag, ...content) => { const made = document.createElement(tag); made.append(...content); return made; };
  const entry = name => { const mark = make("i"); mark.style.background = colour(name); return make("span", mark, name); };
  $("legend").replaceChildren(...[["path", "critical path"], ["device", "devices"], ["stream", "streams"], ["thread", "host threads"]].flatMap(([kind, title]) => {
    const names = new Set(rows.filter(row => row.lane && row.kind === kind).flatMap(row => row.lane.classes));
    return names.size ? [make("p", make("b", title), ...[...names].map(entry))] : [];
  }));
}
const ACTIONS = {"ArrowLeft": () => pan(-.2), "a": () => pan(-.2), "ArrowRight": () => pan(.2), "d": () => pan(.2), "+": () => zoom(.6), "=": () => zoom(.6), "w": () => zoom(.6), "-": () => zoom(1.6), "s": () => zoom(1.6),
"0": () => { view = null; layout(); }, "Home": () => { view = null; layout(); }, "r": () => setMode("whole"), "t": () => setMode("step"), "l": () => { details = !details; layout(); legend(); }};
canvas.addEventListener("keydown", event => { const act = ACTIONS[event.key]; if (act && !event.ctrlKey && !event.metaKey) { event.preventDefault(); act(); } });
for (const button of document.querySelectorAll("#tools button")) button.addEventListener("click", () => { const act = {in: () => zoom(.5), out: () => zoom(2), all: ACTIONS["0"], lanes: ACTIONS.l}[button.dataset.do]; act ? act() : setMode(button.dataset.mode); });
canvas.addEventListener("wheel", event => { if (!event.ctrlKey && !event.shiftKey && !event.altKey) return; event.preventDefault(); zoom(event.deltaY + event.deltaX > 0 ? 1.25 : .8, timeAt(event.offsetX)); }, {passive: false});
let held = null;
canvas.addEventListener("pointerdown", event => { held = [event.offsetX, view.slice()]; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointerup", () => { held = null; });
canvas.addEventListener("dblclick", event => zoom(.4, timeAt(event.offsetX)));
canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
canvas.addEventListener("pointermove", event => {
  if (held) { const span = held[1][1] - held[1][0]; let from = held[1][0] - (event.offsetX - held[0]) / (width - LEFT) * span; from = Math.max(0, Math.min(extent() - span, from)); view = [from, from + span]; redraw(); return; }
  const row = rows.find(one => event.offsetY >= one.y && event.offsetY < one.y + one.h), time = timeAt(event.offsetX), lines = [];
  if (row && event.offsetX >= LEFT) {
    const own = time - shift[row.r];
    lines.push(data.ranks[row.r].label + (row.kind === "title" ? "" : ", " + row.name), unit(own - (mode === "step" ? row.w ? row.w.start : own : 0)));
    if (row.kind === "marks") for (const mark of row.w.marks) if ((mark[1] !== 2) === row.steps && own >= mark[2] && own <= mark[2] + mark[3]) lines.push(data.names[mark[0]] + ": " + unit(mark[3]));
    if (row.lane) {
      for (const e of row.w.events) if (e[0] === row.l && own >= e[2] && own <= e[2] + e[3]) lines.push(data.names[e[1]] + ": " + unit(e[3]));
      const found = row.lane.sums && range(row, event.offsetX);
      if (found) row.lane.classes.map((name, k) => [name, (row.lane.sums[k][found[1]] - row.lane.sums[k][found[0]]) / (found[1] - found[0])]).filter(one => one[1] > .005).sort((a, b) => b[1] - a[1]).slice(0, 6).forEach(one => lines.push(one[0] + " " + (100 * one[1]).toFixed(0) + "%"));
    }
  }
  tip.style.display = lines.length ? "block" : "none"; tip.textContent = lines.join("\n");
  tip.style.left = Math.min(innerWidth - 300, event.clientX + 14) + "px"; tip.style.top = Math.min(innerHeight - 120, event.clientY + 14) + "px";
});
for (const link of document.querySelectorAll("a[data-start]")) link.addEventListener("click", () => {
  const r = +link.dataset.rank, start = +link.dataset.start, duration = +link.dataset.duration;
  const inStep = data.ranks[r].windows[1]; const fits = inStep && start >= inStep.start - 1 && start + duration <= inStep.start + inStep.duration + 1;
  setMode(fits ? "step" : "whole"); const span = Math.min(extent(), duration * 1.2), from = Math.max(0, Math.min(extent() - span, start + shift[r] - duration * .1)); view = [from, from + span]; redraw(); canvas.focus();
});
addEventListener("resize", resize); addEventListener("scroll", redraw, {passive: true});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
if (typeof DecompressionStream === "undefined") { $("legend").textContent = "This browser cannot unpack the timeline: it needs DecompressionStream."; return; }
const lanes = data.ranks.flatMap(rank => rank.windows.flatMap(w => w.lanes));
Promise.all(lanes.map(unpack)).then(() => { setMode(mode); canvas.dataset.ready = performance.now().toFixed(0); });
})();
