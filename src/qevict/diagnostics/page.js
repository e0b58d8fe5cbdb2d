"use strict";
// States 0-5 as in qevict.diagnostics.policy; MIXED + k: k eighths of a cell's tokens are kept.
const STATES = ["evicted", "quantized", "full", "local", "sink", "absent"];
const NAMES = { full: "full precision", quantized: "low-bit codes", evicted: "evicted", local: "recent", sink: "sinks" };
const SHORT = { full: "full", quantized: "codes", mixed: "in part", local: "recent", evicted: "evicted" };
const MIXED = 10;
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
let policy, layer = 0, lane = 0, event = 0, chosen = -1, pinned = false, timer = 0;

async function unpacked(packed) {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// A step is a logarithm between the two ends of a scale; 0 is nothing.
const value = (step, [low, high]) => (step ? low * (high / low) ** ((step - 1) / 65534) : 0);
const state = (e, w) => policy.states[((layer * policy.lanes + lane) * policy.events.length + e) * policy.windows + w];
const stateName = (s) => (s >= MIXED ? "mixed" : STATES[s]);
const cell = (array, e, w) => array[(layer * policy.events.length + e) * policy.windows + w];
const laneCell = (array, e, w) => array[((layer * policy.scoreLanes + Math.min(lane, policy.scoreLanes - 1))
  * policy.events.length + e) * policy.windows + w];
const promoted = (e, w) => e > 0 && state(e - 1, w) === 1 && state(e, w) === 2;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const range = (w) => [policy.sinks + w * policy.window, Math.min(policy.sinks + (w + 1) * policy.window, data.pieces.length)];
const textOf = (w) => data.pieces.slice(...range(w)).join("");

function fillSelect(select, names) {
  select.replaceChildren(...names.map((name, index) => new Option(name, index)));
}

async function choosePolicy(index) {
  const next = data.policies[index];
  for (const [key, Numbers] of [["states", Uint8Array], ["attention", Uint8Array], ["reference", Uint16Array], ["scores", Uint16Array]]) {
    if (typeof next[key] === "string") next[key] = new Numbers(await unpacked(next[key]));
  }
  policy = next;
  lane = Math.min(lane, policy.lanes - 1);
  fillSelect(at("lane"), Array.from({ length: policy.lanes }, (_, i) => i));
  at("lane").value = lane;
  at("lane-label").hidden = policy.lanes === 1;
  at("event").max = policy.events.length - 1;
  event = Math.min(event, policy.events.length - 1);
  chosen = -1;
  pinned = false;
  at("about").textContent = `${data.model}, ${data.prefill} tokens of prompt, ${data.steps} decode steps. `
    + `${policy.name}: ${policy.about}`;
  writeText();
  draw();
}

function drawMap(canvas, ...layers) {
  const width = canvas.clientWidth, height = Math.max(380, Math.min(1400, policy.windows * 6));
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const w = width / policy.events.length, h = height / policy.windows;
  for (const paint of layers) {
    for (let e = 0; e < policy.events.length; e++) {
      for (let row = 0; row < policy.windows; row++) paint(context, e, row, e * w, row * h, w, h);
    }
  }
  context.strokeStyle = colour("mark");
  context.lineWidth = 2;
  context.strokeRect(event * w + 1, 1, Math.max(2, w - 2), height - 2);
  if (chosen >= 0) context.strokeRect(1, chosen * h, width - 2, h);
}

function paintTier(context, e, row, x, y, w, h) {
  const s = state(e, row);
  if (s === 5) return;
  context.fillStyle = colours[s >= MIXED ? "evicted" : STATES[s]];
  context.fillRect(x, y, w + 0.5, h + 0.5);
  if (s >= MIXED) {
    context.globalAlpha = (s - MIXED) / 8;
    context.fillStyle = colours.full;
    context.fillRect(x, y, w + 0.5, h + 0.5);
    context.globalAlpha = 1;
  }
}

function paintPromotion(context, e, row, x, y, w, h) {
  if (!promoted(e, row)) return;
  context.fillStyle = colours.mark;
  context.beginPath();
  context.arc(x + w / 2, y + h / 2, Math.max(3, Math.min(w, h) / 3), 0, 7);
  context.fill();
}

function paintAttention(context, e, row, x, y, w, h) {
  if (state(e, row) === 5) return;
  const byte = cell(policy.attention, e, row);
  context.globalAlpha = byte / 255;
  context.fillStyle = colours.ink;
  context.fillRect(x, y, w + 0.5, h + 0.5);
  context.globalAlpha = 1;
}

let colours = {};
function draw() {
  colours = Object.fromEntries([...STATES, "ink", "mark"].map((name) => [name, colour(name)]));
  at("layer-name").textContent = data.layers[layer];
  at("event").value = event;
  const seen = policy.events[event];
  at("event-name").textContent = `${event + 1}/${policy.events.length}, after ${seen - data.prefill} new tokens`;
  drawMap(at("tiers"), paintTier, paintPromotion);
  drawMap(at("attention"), paintAttention);
  drawNow();
  colourText();
  drawWindow();
}

function drawNow() {
  const counts = {};
  for (let w = 0; w < policy.windows; w++) {
    const name = stateName(state(event, w));
    if (name !== "absent") counts[name] = (counts[name] || 0) + 1;
  }
  at("now").replaceChildren(...Object.keys(SHORT).filter((name) => counts[name]).map((name) => {
    const part = document.createElement("div");
    part.className = name === "mixed" ? "quantized" : name;
    part.style.flex = counts[name];
    part.textContent = `${counts[name]} ${SHORT[name]}`;
    part.title = `${counts[name]} windows: ${NAMES[name] || "kept in part"}`;
    return part;
  }));
}

function writeText() {
  const spans = [];
  const add = (start, stop, index) => {
    const span = document.createElement("span");
    span.textContent = data.pieces.slice(start, stop).join("");
    span.dataset.window = index;
    spans.push(span);
  };
  if (policy.sinks) add(0, policy.sinks, -1);
  for (let w = 0; w < policy.windows; w++) add(...range(w), w);
  at("text").replaceChildren(...spans);
}

function colourText() {
  for (const span of at("text").children) {
    const w = Number(span.dataset.window);
    const s = w < 0 ? 4 : state(event, w);
    span.className = stateName(s) + (w >= 0 && w === chosen ? " chosen" : "");
    if (s >= MIXED) span.style.setProperty("--kept", `${((s - MIXED) / 8) * 100}%`);
    span.title = w < 0 ? "sinks" : `window ${w}: ${NAMES[stateName(s)] || stateName(s)}`;
  }
}

function choose(w, pin) {
  if (pinned && !pin) return;
  pinned = pin && !(pinned && w === chosen);
  if (w === chosen && !pin) return;
  chosen = w;
  draw();
}

function drawWindow() {
  if (chosen < 0) {
    at("window-name").textContent = "Point at a window";
    at("window-state").textContent = "";
    at("history").replaceChildren();
    return;
  }
  const [start, stop] = range(chosen), s = state(event, chosen);
  at("window-name").textContent = `Window ${chosen}: tokens ${start} to ${stop - 1}${pinned ? " (kept; click again to let go)" : ""}`;
  const times = policy.events.filter((_, e) => promoted(e, chosen)).length;
  at("window-state").textContent = (s >= MIXED ? `${s - MIXED} eighths kept` : NAMES[STATES[s]] || "not there yet")
    + ` at this event; promoted ${times} time${times === 1 ? "" : "s"} in all`;
  at("window-text").textContent = textOf(chosen);
  at("history").innerHTML = history();
}

// Score lines (full KV's cumulative attention; the cache's own where it measures one) over a ribbon of tiers.
function history() {
  const count = policy.events.length, width = 360, height = 150, left = 36, bottom = 26;
  const x = (e) => left + ((width - left - 6) * e) / Math.max(1, count - 1);
  const series = [["reference", policy.events.map((_, e) => value(cell(policy.reference, e, chosen), policy.scale))]];
  if (policy.scores) series.push(["mark", policy.events.map((_, e) => value(laneCell(policy.scores, e, chosen), policy.scale))]);
  const there = policy.events.map((_, e) => state(e, chosen) !== 5);
  const most = Math.max(1e-9, ...series.flatMap(([, values]) => values.filter((_, e) => there[e])));
  const y = (v) => 8 + (height - bottom - 8) * (1 - v / most);
  const lines = series.map(([name, values]) => {
    const points = values.map((v, e) => (there[e] ? `${x(e).toFixed(1)},${y(v).toFixed(1)}` : "")).join(" ");
    return `<polyline points="${points}" fill="none" stroke="var(--${name})" stroke-width="1.6"/>`;
  });
  const step = (width - left - 6) / count;
  const ribbon = policy.events.map((_, e) => {
    const s = state(e, chosen), fill = s >= MIXED ? "full" : STATES[s], opacity = s >= MIXED ? (s - MIXED) / 8 : 1;
    return `<rect x="${(left + e * step).toFixed(1)}" y="${height - 20}" width="${(step + 0.4).toFixed(1)}" height="10" fill="var(--${fill})" opacity="${opacity}"/>`;
  });
  const now = `<line x1="${x(event)}" x2="${x(event)}" y1="4" y2="${height - 8}" stroke="var(--faint)" stroke-dasharray="2 3"/>`;
  const key = policy.scores ? `<tspan fill="var(--mark)">cache's score</tspan> · ` : "";
  return `<svg viewBox="0 0 ${width} ${height + 14}" role="img" aria-label="Score and tier history">`
    + `<text x="0" y="14">${most.toPrecision(2)}</text><text x="0" y="${height - bottom}">0</text>`
    + lines.join("") + ribbon.join("") + now
    + `<text x="${left}" y="${height + 8}">${key}full KV's score · tiers below</text></svg>`;
}

function pointed(canvas, pointer) {
  const box = canvas.getBoundingClientRect();
  const clamp = (v, most) => Math.max(0, Math.min(most - 1, Math.floor(v)));
  return [clamp(((pointer.clientX - box.left) / box.width) * policy.events.length, policy.events.length),
    clamp(((pointer.clientY - box.top) / box.height) * policy.windows, policy.windows)];
}

for (const id of ["tiers", "attention"]) {
  at(id).addEventListener("mousemove", (e) => choose(pointed(at(id), e)[1], false));
  at(id).addEventListener("click", (e) => {
    event = pointed(at(id), e)[0];
    choose(pointed(at(id), e)[1], true);
    draw();
  });
}
at("text").addEventListener("click", (e) => {
  const w = Number(e.target.dataset.window);
  if (w >= 0) choose(w, true);
});
at("policy").addEventListener("change", () => choosePolicy(Number(at("policy").value)));
at("layer").addEventListener("input", () => { layer = Number(at("layer").value); draw(); });
at("lane").addEventListener("change", () => { lane = Number(at("lane").value); draw(); });
at("event").addEventListener("input", () => { event = Number(at("event").value); draw(); });
at("play").addEventListener("click", () => {
  clearInterval(timer);
  timer = at("play").textContent === "▶" ? setInterval(() => { event = (event + 1) % policy.events.length; draw(); }, 300) : 0;
  at("play").textContent = timer ? "■" : "▶";
});
at("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  draw();
});
document.addEventListener("keydown", (e) => {
  if (/INPUT|SELECT/.test(e.target.tagName)) return;
  const by = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
  if (by) { event = Math.max(0, Math.min(policy.events.length - 1, event + by)); draw(); }
});
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

at("controls").addEventListener("submit", (e) => e.preventDefault());
fillSelect(at("policy"), data.policies.map((one) => one.name));
at("policy").value = data.first;
at("layer").max = data.layers.length - 1;
layer = Math.floor(data.layers.length / 2);
at("layer").value = layer;
at("legend").replaceChildren(...Object.entries(NAMES).map(([name, words]) => {
  const item = document.createElement("li"), swatch = document.createElement("i");
  swatch.className = name;
  item.append(swatch, words);
  return item;
}));
choosePolicy(data.first).then(() => { document.body.dataset.ready = "yes"; });
