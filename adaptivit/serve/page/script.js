// The page asks the service that it comes from, and nobody else.
"use strict";

const $ = (id) => document.getElementById(id);
const root = document.documentElement;
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
const SECONDS = 0.55; // a block, while playing
const FADE = 260; // milliseconds

let info = null; // of the model
let token = ""; // where the service asks for one
let chosen = null; // the file that is sent
let picture = null; // {file, image}: the file of the latest answer, and what the model sees of it
let look = null; // the latest answer
let block = 0; // shown, from 0
let fade = 1; // how far the way from the block before is
let timer = 0;

// -- light and dark: the system's choice, until somebody presses the button
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const theme = document.querySelector(".theme");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
theme.hidden = false;
theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); });
dark.addEventListener("change", nameTheme);
nameTheme();

// -- the service
class Problem extends Error {}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: token ? { Authorization: "Bearer " + token } : {} });
  } catch {
    throw new Problem("The service does not answer. Is it still running?");
  }
  if (answer.ok) return answer;
  if (answer.status === 401) { $("token").hidden = false; $("secret").focus(); }
  let line = "The service answered with " + answer.status + ".";
  try { line = (await answer.json()).error || line; } catch { /* no JSON: the number has to do */ }
  throw new Problem(line);
}

function complain(error) {
  if (!(error instanceof Problem)) throw error;
  $("problem").textContent = error.message;
  $("problem").hidden = false;
}

$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("secret").value.trim();
  $("token").hidden = true;
  $("problem").hidden = true;
  start();
});

// -- one question at a time; while one is under way the newest wish waits
let asking = false;
let wish = null;

async function wanted(fresh, time) {
  // a new picture is asked for with what the model sees of it; time is measured when the budget has come to rest
  wish = { file: chosen, fresh: fresh || (wish !== null && wish.fresh), time };
  if (asking) return;
  asking = true;
  while (wish) {
    const now = wish;
    wish = null;
    try {
      await see(now);
    } catch (error) {
      if (now.file === chosen) chosen = picture && picture.file; // back to the one that is shown
      complain(error);
    }
  }
  asking = false;
}

async function see({ file, fresh, time }) {
  if (file.size > info.megabytes * 1e6) {
    const size = (file.size / 1e6).toFixed(0);
    throw new Problem(`The file has ${size} MB; at most ${info.megabytes} MB are taken.`);
  }
  const form = new FormData();
  form.append("images", file, "picture");
  if (info.dial) form.append("budget", `-${$("budget").value}%`);
  if (fresh) form.append("picture", "1");
  if (time) form.append("time", "1");
  const found = await (await ask("/demo/look", { method: "POST", body: form })).json();
  if (fresh) {
    const image = new Image();
    image.src = found.picture;
    await image.decode();
    picture = { file, image };
  }
  $("problem").hidden = true;
  show(found, fresh);
}

// -- what is shown
const percent = (share, digits = 0) => (100 * share).toFixed(digits) + "\u00a0%";
const macs = (g) => (g >= 0.1 ? [g.toFixed(2), "GMACs"] : [(1e3 * g).toFixed(1), "MMACs"]);

function show(found, fresh) {
  look = found;
  look.rows = found.attended.map((row) => Array.from(row, (c) => c === "1"));
  look.depth = look.rows[0].map((_, p) => look.rows.reduce((sum, row) => sum + row[p], 0));
  look.skips = look.rows.some((row, l) => l > 0 && row.some((on, p) => on && !look.rows[l - 1][p]));
  const best = (found.classes || [])[0];  // of a task without classes: its words
  $("answer").textContent = best ? best.name : found.caption;
  $("sure").textContent = best ? percent(best.probability, 1) + " sure" : "";
  classes(found.classes || []);
  const [work, unit] = macs(found.gmacs);
  $("macs").textContent = `${work} ${unit}`;
  $("macs-of").textContent = `of ${macs(found.static_gmacs)[0]} · ${signed(-found.saved)}`;
  $("macs-bar").style.width = 100 * Math.min(1, 1 - found.saved) + "%";
  times(found);
  $("said").textContent = `${best ? `${best.name}, ${percent(best.probability)} sure` : found.caption}, with ${percent(1 - found.saved)} of static's work.`;
  bars();
  legend();
  for (const id of ["play", "back", "next", "block"]) $(id).disabled = false;
  if (fresh) { stop(); block = 0; if (calm.matches) turn(info.layers - 1); else play(); } else turn(block);
}

function times(found) {
  $("time").classList.toggle("old", !found.ms);
  if (!found.ms) return;
  const digits = found.static_ms < 10 ? 2 : 1;
  $("ms").textContent = found.ms.toFixed(digits) + "\u00a0ms";
  $("ms-of").textContent = `of ${found.static_ms.toFixed(digits)} · ${(found.static_ms / found.ms).toFixed(2)}× the speed`;
  $("ms-bar").style.width = 100 * Math.min(1, found.ms / found.static_ms) + "%";
  const together = found.copies > 1 ? `in a batch of ${found.copies}` : "one at a time";
  $("how").textContent = `Work in multiply-accumulates. Time an image ${together}, measured here just now, in turns with the static model.`;
}

const signed = (share) => (Math.abs(share) < 0.005 ? "±" : share < 0 ? "−" : "+") + percent(Math.abs(share));

function classes(found) {
  $("classes").classList.toggle("short", found.every((c) => c.name.length <= 2));
  $("classes").replaceChildren(...found.map((c) => {
    const item = document.createElement("li");
    const [name, meter, inner, share] = ["span", "i", "i", "b"].map((tag) => document.createElement(tag));
    name.textContent = c.name;
    name.title = c.name;
    meter.className = "meter";
    inner.style.width = 100 * c.probability + "%";
    share.textContent = percent(c.probability, 1);
    meter.append(inner);
    item.append(name, meter, share);
    return item;
  }));
}

function bars() {
  $("bars").replaceChildren(...look.live.map((live) => {
    const item = document.createElement("li");
    const bar = document.createElement("i");
    bar.style.height = (100 * live) / info.tokens + "%";
    item.append(bar);
    return item;
  }));
}

function legend() {
  $("key").hidden = false;
  $("means").textContent = look.skips ? "Pale patches sit out this block." : "Patches that left or merged, by the blocks that computed them";
  $("colours").hidden = look.skips;
  $("colours").replaceChildren(...info.colours.map((colour, depth) => {
    const item = document.createElement("li");
    const swatch = document.createElement("i");
    swatch.style.background = `rgb(${colour.map((c) => 0.6 * c).join(" ")})`;
    item.append(swatch, info.colours.length <= 14 || depth % 2 === 0 ? String(depth) : "");
    return item;
  }));
}

// -- the picture, block by block
function turn(to) {
  const before = block;
  block = Math.max(0, Math.min(info.layers - 1, to));
  const count = look.rows[block].filter(Boolean).length;
  const words = `Block ${block + 1} of ${info.layers} · ${count} of ${look.depth.length} patches`;
  $("block").value = block + 1;
  $("block").setAttribute("aria-valuetext", words);
  $("now").textContent = words;
  $("canvas").setAttribute("aria-label", `The picture, ${words}`);
  $("bars").querySelectorAll("li").forEach((item, i) => item.classList.toggle("on", i === block));
  if (block === before || calm.matches) { fade = 1; draw(block); return; }
  const begun = performance.now();
  const frame = (now) => {
    fade = Math.max(0, Math.min(1, (now - begun) / FADE));
    draw(before);
    if (fade < 1) requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}

function cover(layer, patch) {
  // [r, g, b, opacity] over a patch while a block runs
  if (look.rows[layer][patch]) return null;
  if (look.skips) return [206, 213, 223, 0.88];
  return [...info.colours[look.depth[patch]].map((c) => 0.6 * c), 0.7];
}

function draw(before) {
  if (!picture) return;
  const canvas = $("canvas");
  const [high, wide] = info.grid;
  const width = Math.round(canvas.clientWidth * (window.devicePixelRatio || 1));
  const height = Math.round((width * info.size[0]) / info.size[1]);
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  const brush = canvas.getContext("2d");
  brush.imageSmoothingEnabled = info.size[0] > 100;
  brush.drawImage(picture.image, 0, 0, width, height);
  for (let patch = 0; patch < look.depth.length; patch++) {
    const row = Math.floor(patch / wide);
    const column = patch % wide;
    const [x, y] = [Math.round((column * width) / wide), Math.round((row * height) / high)];
    const [w, h] = [Math.round(((column + 1) * width) / wide) - x, Math.round(((row + 1) * height) / high) - y];
    const [now, past] = [cover(block, patch), cover(before, patch)];
    const colour = now || past;
    if (!colour) continue;
    const opacity = (now ? now[3] : 0) * fade + (past ? past[3] : 0) * (1 - fade);
    brush.fillStyle = `rgb(${colour[0]} ${colour[1]} ${colour[2]} / ${opacity})`;
    brush.fillRect(x, y, w, h);
  }
  canvas.dataset.block = block + 1; // for who reads the page by program
}

function stop() {
  window.clearInterval(timer);
  timer = 0;
  $("play").textContent = "Play";
}

function play() {
  if (timer) { stop(); return; }
  turn(block >= info.layers - 1 ? 0 : block);
  $("play").textContent = "Stop";
  timer = window.setInterval(() => {
    turn(block + 1);
    if (block >= info.layers - 1) stop();
  }, 1e3 * Math.min(SECONDS, 5 / info.layers));
}

$("play").addEventListener("click", play);
$("back").addEventListener("click", () => { stop(); turn(block - 1); });
$("next").addEventListener("click", () => { stop(); turn(block + 1); });
$("block").addEventListener("input", () => { stop(); turn($("block").value - 1); });
new ResizeObserver(() => { if (look) { fade = 1; draw(block); } }).observe($("canvas"));

// -- pictures: an example, a file, a drop, a paste
function choose(file, button = null) {
  document.querySelectorAll(".examples button").forEach((b) => b.setAttribute("aria-pressed", b === button));
  chosen = file;
  wanted(true, true);
}

$("file").addEventListener("change", () => {
  if ($("file").files.length) choose($("file").files[0]);
  $("file").value = ""; // so that the same file can be chosen again
});
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); $("stage").classList.add("over"); });
}
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("stage").classList.remove("over"); });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("stage").classList.remove("over");
  if (info && event.dataTransfer.files.length) choose(event.dataTransfer.files[0]);
});
document.addEventListener("paste", (event) => {
  if (info && event.clipboardData.files.length) choose(event.clipboardData.files[0]);
});

// -- the budget
function budget() {
  const saved = Number($("budget").value);
  const words = saved ? `${saved} % less work than static` : "static's work";
  $("wanted").textContent = saved ? `−${saved}\u00a0%` : "±0\u00a0%";
  $("budget").setAttribute("aria-valuetext", words);
}

for (const kind of ["input", "change"]) {
  $("budget").addEventListener(kind, () => {
    budget();
    if (chosen) wanted(false, kind === "change");
  });
}

// -- the beginning
async function example(name, number) {
  const file = await (await ask(`/demo/examples/${number}`)).blob();
  const item = document.createElement("li");
  const button = document.createElement("button");
  const image = document.createElement("img");
  button.type = "button";
  button.setAttribute("aria-pressed", "false");
  image.alt = `Example: ${name}`;
  image.src = URL.createObjectURL(file);
  button.append(image);
  button.addEventListener("click", () => choose(file, button));
  item.append(button);
  return item;
}

async function start() {
  try {
    info = await (await ask("/demo/info")).json();
    const patches = info.grid[0] * info.grid[1];
    $("about").textContent = `${info.method}, ${info.layers} blocks, ${patches} patches a picture. Move the budget, and see which ` +
      "patches leave when, and what the model says without them.";
    if (info.policy === "static") $("about").textContent = "This model is static: every patch goes through every block.";
    $("about").textContent += ` It knows ${info.knows}.`;
    $("block").max = info.layers;
    $("canvas").style.aspectRatio = `${info.size[1]} / ${info.size[0]}`;
    $("budget").disabled = !info.dial;
    $("hint").hidden = false;
    if (info.dial) {
      $("budget").max = info.dial.most;
      $("budget").value = info.dial.start;
      $("cheapest").textContent = `−${info.dial.most} %`;
      $("hint").textContent = info.dial.continuous
        ? "A mean over pictures: easy ones take less, hard ones more."
        : "Met by the nearest step below it, the same for every picture.";
      budget();
    } else {
      $("hint").textContent = "This checkpoint is not calibrated, so its budget is fixed. To have a dial: adaptivit calibrate CHECKPOINT --data IMAGES.";
    }
    const items = await Promise.all(info.examples.map(example));
    $("examples").replaceChildren(...items);
    const first = items[Math.min(3, items.length - 1)];
    if (first) first.querySelector("button").click();
  } catch (error) { complain(error); }
}

start();
