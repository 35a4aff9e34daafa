// The page: holds the view, lets the parts draw it, and hears what the person wants.

import { attended, largest, placesOf, reading } from "./attention.js";
import { savePng } from "./download.js";
import { listenKeys } from "./keys.js";
import { isOwn, own, readLink, writeLink } from "./link.js";
import { Pane } from "./pane.js";
import { fitting, keyOf, pictureIn, recall, remember, takePicture } from "./pictures.js";
import { distancePlot, placesMap } from "./plots.js";
import { capital, percent, Says, spoken } from "./says.js";
import { ask, listen, tryNow } from "./server.js";
import { Sheet } from "./sheet.js";
import { banner, hideBanner, onBanner, say, segments } from "./words.js";

const $ = (id) => document.getElementById(id);
const NAMES = { attention: "Attention", rollout: "Rollout", gradient: "Gradient", occlusion: "Occlusion", pool: "Pool", plain: "Picture" };
const MEANS = {
  rollout: "How much of each patch is in what the head reads, through all layers.",
  gradient: "Attention that speaks for the class, through all layers.",
  occlusion: "How much the class loses when the patch is covered.",
  pool: "Where the attention pool looks.",
  plain: "The picture as the model gets it.",
};
const PLAY = 850;

const view = { panes: [], sheets: [], active: 0, ask: null, hover: null, paint: "light", fill: "mean", mode: matchMedia("(hover: none)").matches ? "ask" : "hide" };
let model, shows, places = null, samples = [], playing = 0, linking = 0, speaking = 0;
const says = new Says($("says"));

const pane = () => view.panes[view.active];
const sheetOf = (one) => view.sheets[one.sheet];
const special = () => model.special.length;
const asker = () => (view.hover !== null ? view.hover + special() : view.ask);
const methodOf = (show) => (show === "pool" ? "attention" : show);

/** What a pane shows over the patches; null where it is the picture alone, or not here yet. */
function values(one, sheet) {
  if (one.show === "plain" || !sheet.image) return null;
  if (one.show !== "attention") {
    sheet.want({ method: methodOf(one.show) });
    return sheet.maps.get(methodOf(one.show)) ?? null;
  }
  sheet.want({ layer: one.layer });
  const row = rowOf(one, sheet);
  return row && row.slice(special());
}

function rowOf(one, sheet) {
  const layer = sheet.layers.get(one.layer);
  return layer ? attended(layer, one.head, asker() ?? reading(model.pool, model.special, layer.tokens)) : null;
}

function title(one) {
  if (one.show !== "attention") return NAMES[one.show];
  return `Layer ${one.layer}, ${one.head ? `head ${one.head}` : model.heads > 1 ? "all heads" : "its head"}`;
}

let drawing = 0;
function render() { drawing ||= requestAnimationFrame(draw); }

function draw() {
  drawing = 0;
  const compared = view.panes.length > 1;
  view.panes.forEach((one, i) => {
    const sheet = sheetOf(one), letter = compared ? "AB"[i] : "";
    one.view.show({
      sheet,
      values: values(one, sheet),
      asker: one.show === "attention" ? asker() : view.hover === null ? null : view.hover + special(),
      paint: view.paint,
      caption: compared ? captionOf(one, letter) : [],
      label: `${compared ? `Pane ${letter}. ` : ""}${sheet.name || "The picture"} in ${sheet.grid?.rows ?? 0} by ${sheet.grid?.columns ?? 0} patches. ${title(one)}. Arrow keys move, Space hides, Enter keeps asking.`,
      empty: sheet.blob ? "" : "Drop a picture here, paste one, or choose a sample.",
    });
    one.view.root.classList.toggle("active", compared && i === view.active);
  });
  controls();
  beside();
  linking ||= setTimeout(() => { linking = 0; link(); }, 200);
}

/** The address says what is seen; browsers allow it to change only so often, and hovering is not in it. */
function link() {
  const text = `#${writeLink(view, model)}`;
  if (location.hash !== text) history.replaceState(null, "", text);
}

function captionOf(one, letter) {
  const name = document.createElement("span"), close = document.createElement("button");
  name.textContent = `${letter}  ${title(one)}`;
  Object.assign(close, { type: "button", className: "bare", textContent: "×", title: "Close this pane", onclick: () => closePane(one) });
  close.setAttribute("aria-label", `Close pane ${letter}`);
  return [name, close];
}

function controls() {
  const one = pane(), sheet = sheetOf(one), heads = model.heads ?? 0;
  segments($("shows"), shows.map((show) => [show, NAMES[show]]), one.show, (show) => set({ show }));
  segments($("paints"), null, view.paint, (paint) => { view.paint = paint; render(); }, "paint");
  const touch = matchMedia("(hover: none)").matches, click = touch ? "Tap" : "Click";
  segments($("modes"), [["hide", `${click} hides`], ["ask", `${click} asks`]], view.mode, (mode) => { view.mode = mode; render(); });
  $("panes").dataset.mode = view.mode;
  $("paints").hidden = one.show === "plain";
  $("layer-row").hidden = one.show !== "attention";
  if (model.depth) Object.assign($("layer"), { max: model.depth, value: one.layer });
  $("layer").style.setProperty("--part", model.depth > 1 ? (one.layer - 1) / (model.depth - 1) : 0);
  $("layer-out").textContent = `${one.layer} of ${model.depth}`;
  $("layer").setAttribute("aria-valuetext", `${one.layer} of ${model.depth}`);
  segments($("heads"), [["0", "all"], ...Array.from({ length: heads }, (_, i) => [String(i + 1), String(i + 1)])], String(one.head), (head) => set({ head: Number(head) }));
  $("heads").parentElement.hidden = heads < 2;
  $("play").setAttribute("aria-pressed", String(Boolean(playing)));
  $("play").setAttribute("aria-label", playing ? "Stop playing" : "Play through the layers");
  const count = sheet.hide.size;
  const dragging = view.mode === "hide" ? `${click} patches, or drag over an area.` : touch ? "Press long to hide a patch." : "Shift and click hides.";
  $("hidden-count").textContent = count ? `${count} of ${sheet.patches} hidden` : dragging;
  $("hide-row").classList.toggle("some", count > 0);
  $("undo").disabled = !sheet.past.length;
  $("clear").disabled = !count;
  $("fill").value = view.fill;
  $("compare").setAttribute("aria-pressed", String(view.panes.length > 1));
  chips(one, sheet);
  $("words").textContent = sentence(one, sheet);
  for (const button of $("samples").children) chosenSample(button, button.dataset.name === sheet.source);
  const sample = samples.find(({ name }) => name === sheet.source);
  $("credit").textContent = sample ? `Sample “${sample.name}”: ${sample.credit}` : "";
}

function chosenSample(button, chosen) {
  if (chosen && button.getAttribute("aria-pressed") !== "true") {
    const strip = document.querySelector(".sources");
    strip.scrollLeft = button.offsetLeft - strip.offsetLeft - strip.clientWidth / 2 + button.offsetWidth / 2;
  }
  button.setAttribute("aria-pressed", String(chosen));
}

/** The tokens that are no patches: asked and looked at like them. */
function chips(one, sheet) {
  const shown = one.show === "attention" && model.attention, row = shown ? rowOf(one, sheet) : null;
  const readers = model.special.length === 1 && model.pool === "token" ? [] : [[null, model.pool === "token" ? "what the head reads" : "all patches"]];
  const names = shown ? [...readers, ...model.special.map((name, i) => [i, name])] : [];
  const box = $("chips");
  while (box.children.length > names.length) box.lastChild.remove();
  while (box.children.length < names.length) {
    const chip = Object.assign(document.createElement("button"), { type: "button", className: "chip" });
    chip.append(document.createElement("i"), document.createElement("span"), document.createElement("b"));
    box.append(chip);
  }
  const current = asker() ?? (readers.length ? null : 0);
  names.forEach(([token, name], i) => {
    const chip = box.children[i], [light, label, much] = chip.children, share = row && token !== null ? row[token] : null;
    label.textContent = name;
    much.textContent = share === null ? "" : percent(share);
    light.style.opacity = share === null ? 0 : Math.min(1, 0.15 + Math.sqrt(share));
    light.hidden = share === null;
    chip.setAttribute("aria-pressed", String(current === token));
    chip.title = token === null ? "Ask for what the head reads" : `Ask from the ${name} token; it gets ${share === null ? "…" : percent(share)} of the attention shown`;
    chip.onclick = () => { before = undefined; view.ask = token; render(); };
    chip.onpointerenter = (event) => { if (event.pointerType === "mouse" && token !== null) peek(token); };
    chip.onpointerleave = (event) => { if (event.pointerType === "mouse") peek(null); };
  });
}

let before;
function peek(token) {
  if (token !== null) { before ??= { ask: view.ask }; view.ask = token; }
  else if (before) { view.ask = before.ask; before = undefined; }
  render();
}

function place(patch, { columns }) { return `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`; }

function sentence(one, sheet) {
  if (!sheet.image || !sheet.grid) return "";
  const found = values(one, sheet);
  if (!model.methods.length) return "This server runs an exported graph: it predicts, and cannot be looked into.";
  if (!model.attention && one.show === "plain") return "This model has convolutions and no attention to look at; occlusion shows what it needs.";
  if (one.show !== "attention") {
    const here = view.hover;
    if (!found || here === null) return MEANS[one.show];
    return `${capital(place(here, sheet.grid))}: ${(found[here] / Math.max(...found)).toFixed(2)} of the most.`;
  }
  const row = rowOf(one, sheet);
  if (!row) return `Layer ${one.layer} is on its way.`;
  const from = asker(), best = largest(found);
  const who = from === null ? (model.pool === "token" && special() === 1 ? "The class token" : "What the head reads") : from < special() ? `The ${model.special[from]} token` : capital(place(from - special(), sheet.grid));
  const where = from !== null && best === from - special() ? "itself" : place(best, sheet.grid);
  return `${who} looks most at ${where} (${percent(found[best])}).`;
}

function beside() {
  const one = pane(), sheet = sheetOf(one), used = [...new Set(view.panes.map(sheetOf))];
  says.show(used, model);
  clearTimeout(speaking);
  speaking = setTimeout(() => { const text = spoken(sheet); if (text && $("live").textContent !== text) $("live").textContent = text; }, 700);
  $("distance").hidden = !sheet.distance.length;
  if (sheet.distance.length) {
    const attending = one.show === "attention";
    distancePlot($("distance-plot"), $("distance-note"), { ...sheet, layer: attending ? one.layer : 0, head: one.head }, (layer, head) => set({ show: "attention", layer, head }));
  }
  $("places").hidden = !places;
  if (places) {
    const from = asker(), { rows, columns } = places.grid, middle = Math.floor(rows / 2) * columns + Math.floor(columns / 2);
    const patch = from !== null && from >= special() ? from - special() : middle;
    placesMap($("places-map"), places, patch);
    $("places-map").setAttribute("aria-label", `Similarity of the position of ${place(patch, places.grid)} to all others`);
    $("places-note").textContent = `${capital(place(patch, places.grid))}: ${places.meaning}.`;
    [$("places-low").textContent, $("places-high").textContent] = [places.low.toFixed(2), "1"];
  }
}

function set(changes) {
  if (changes.layer) changes.layer = Math.min(Math.max(changes.layer, 1), model.depth);
  Object.assign(pane(), changes);
  render();
}

function newSheet() {
  const sheet = new Sheet(model, render, (failing, error) => { say(""); banner(error.message); render(); });
  sheet.fill = view.fill;
  view.sheets.push(sheet);
  return view.sheets.length - 1;
}

function newPane(words) {
  const made = { sheet: 0, show: shows[0], layer: 1, head: 0, ...words };
  made.view = new Pane({
    ask: (patch) => { if (view.hover !== patch) { view.hover = patch; render(); } },
    pin: (patch) => { const token = patch + special(); view.ask = view.ask === token ? null : token; view.hover = null; render(); },
    toggle: (sheet, patches, first = patches[0]) => toggle(sheet, patches, !sheet.hide.has(first)),
    active: () => { const at = view.panes.indexOf(made); if (at !== view.active && at >= 0) { view.active = at; render(); } },
    mode: () => view.mode,
  });
  view.panes.push(made);
  $("panes").append(made.view.root);
  document.body.classList.toggle("two", view.panes.length > 1);
  return made;
}

function toggle(sheet, patches, hide) {
  const next = new Set(sheet.hide);
  for (const patch of patches) if (hide) next.add(patch); else next.delete(patch);
  if (next.size < sheet.patches) sheet.cover(next);
  else banner("One patch at least has to stay: with all of them hidden there is nothing to look at.");
}

/** Another picture into the active pane; a second pane that shared the first one's gets a sheet of its own. */
async function choose(source, blob, name) {
  const one = pane();
  const shared = view.panes.some((other) => other !== one && other.sheet === one.sheet);
  if (shared) one.sheet = newSheet();
  const sheet = sheetOf(one), missing = sheet.blob ? new Set() : sheet.hide;
  hideBanner();
  sheet.put(source, blob, name, missing);
  render();
}

async function chooseFile(file) {
  if (!file) return banner("That is no picture; JPEG, PNG, WebP, GIF, BMP and TIFF will do.");
  const { blob, note } = await fitting(file, model.limits), key = await keyOf(blob);
  const kept = await remember(key, blob);
  await choose(own(key), blob, file.name?.replace(/\.\w+$/, "") || "your picture");
  if (note) banner(note);
  if (!kept) say("This browser keeps no pictures: a link to this view will not restore it.");
}

async function fetchSource(source) {
  if (isOwn(source)) return recall(source.slice(4));
  const sample = samples.find(({ name }) => name === source);
  if (!sample) return null;
  return ask(sample.url, { as: "blob" });
}

let choosing = 0;
async function chooseSample(name) {
  const mine = ++choosing, blob = await fetchSource(name).catch(() => null);
  if (mine !== choosing) return;  // another was chosen meanwhile
  if (blob) await choose(name, blob, name);
  else banner("The sample could not be fetched; try again in a moment.");
}

/** The view an address stands for. */
async function restore(text) {
  const wanted = readLink(text, model, shows);
  hideBanner();
  view.sheets.forEach((sheet) => sheet.stop());
  document.body.classList.remove("two");
  Object.assign(view, { panes: [], sheets: [], active: 0, hover: null, ask: wanted.ask, paint: wanted.paint, fill: wanted.fill });
  $("panes").replaceChildren();
  for (let i = 0; i < wanted.sources.length; i++) newSheet();
  wanted.panes.forEach(newPane);
  render();
  await Promise.all(wanted.sources.map(async ({ source, hide }, i) => {
    const first = source ?? samples[0]?.name;
    if (!first) return;
    const blob = await fetchSource(first).catch(() => null), sheet = view.sheets[i];
    sheet.hide = hide;
    if (blob) sheet.put(first, blob, isOwn(first) ? "your picture" : first, hide);
    else banner(isOwn(first) ? "This link shows a picture that stayed in the browser it was opened in. Drop the same picture here and the view is restored." : `There is no sample called “${first}” here; choose another or drop a picture.`);
  }));
  render();
}

function compare() {
  if (view.panes.length > 1) return closePane(view.panes[1]);
  const { sheet, show, layer, head } = view.panes[0];
  newPane({ sheet, show, head, layer: layer > 1 ? Math.max(1, Math.ceil(layer / 2)) : model.depth ?? 1 });
  view.active = 1;
  render();
}

function closePane(one) {
  one.view.root.remove();
  view.panes = view.panes.filter((other) => other !== one);
  view.active = 0;
  const used = view.sheets.filter((sheet, i) => view.panes.some((other) => other.sheet === i) || void sheet.stop());
  view.panes.forEach((other) => { other.sheet = used.indexOf(view.sheets[other.sheet]); });
  view.sheets = used;
  document.body.classList.remove("two");
  render();
}

function play() {
  clearInterval(playing);
  if (playing) playing = 0;
  else if (model.attention) {
    const on = () => set({ show: "attention", layer: (pane().layer % model.depth) + 1 });
    playing = setInterval(on, PLAY);
    on();
  }
  render();
}

async function copyLink() {
  link();
  const only = view.sheets.some(({ source }) => source && isOwn(source)) ? " Your own picture stays in this browser: the link restores it here only." : "";
  try {
    await navigator.clipboard.writeText(location.href);
    banner(`The link is copied.${only}`, 4000);
  } catch { banner(`The link is in the address bar.${only}`, 6000); }
}

function dark() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches, root = document.documentElement;
  const now = root.dataset.theme ? root.dataset.theme === "dark" : system, next = now ? "light" : "dark";
  root.dataset.theme = next;
  try { localStorage.setItem("vitrail-theme", next); } catch { /* a private window */ }
  $("theme").setAttribute("aria-pressed", String(next === "dark"));
}

async function camera() {
  if (!navigator.mediaDevices?.getUserMedia) return $("snap").click();
  try {
    const blob = await takePicture($("camera-box"));
    if (blob) await chooseFile(new File([blob], "camera.jpg", { type: blob.type }));
  } catch { banner("The camera cannot be used: it is not there, or this page may not use it."); }
}

function wire() {
  $("open").onclick = () => $("file").click();
  for (const id of ["file", "snap"]) $(id).onchange = ({ target }) => { if (target.files.length) chooseFile(pictureIn(target)); target.value = ""; };
  $("camera").onclick = camera;
  $("layer").oninput = ({ target }) => set({ layer: Number(target.value) });
  $("play").onclick = play;
  $("compare").onclick = compare;
  $("link").onclick = copyLink;
  $("save").onclick = () => { if (sheetOf(pane()).image) savePng({ panes: view.panes.map((one) => ({ view: one.view, title: title(one) })), sheets: [...new Set(view.panes.map(sheetOf))], model, words: $("words").textContent }); };
  $("theme").onclick = dark;
  $("help").onclick = () => $("help-box").showModal();
  $("undo").onclick = () => sheetOf(pane()).undo();
  $("clear").onclick = () => sheetOf(pane()).cover([]);
  $("fill").onchange = ({ target }) => { view.fill = target.value; for (const sheet of view.sheets) { sheet.fill = view.fill; if (sheet.hide.size) sheet.send(); } render(); };
  addEventListener("paste", (event) => { const file = pictureIn(event.clipboardData); if (file) { event.preventDefault(); chooseFile(file); } });
  addEventListener("hashchange", () => restore(location.hash));
  let depth = 0;
  addEventListener("dragenter", (event) => { event.preventDefault(); depth++; $("drop").hidden = false; });
  addEventListener("dragleave", () => { depth = Math.max(0, depth - 1); $("drop").hidden = depth === 0; });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    $("drop").hidden = true;
    const at = view.panes.findIndex(({ view: { root } }) => root.contains(event.target));
    if (at >= 0) view.active = at;
    chooseFile(pictureIn(event.dataTransfer));
  });
  listenKeys({ set, pane, play, compare, copyLink, dark, model, shows, view, render, undo: () => sheetOf(pane()).undo(), clear: () => sheetOf(pane()).hide.size && sheetOf(pane()).cover([]) });
}

function drawSamples() {
  $("samples").replaceChildren(...samples.map(({ name, url, alt }) => {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "sample", title: alt, onclick: () => chooseSample(name) });
    button.dataset.name = name;
    button.append(Object.assign(document.createElement("img"), { src: url, alt, loading: "lazy", width: 64, height: 64 }));
    return button;
  }));
}

function describe() {
  const { name, parameters, grid, depth, heads, image } = model, parts = [];
  if (parameters) parts.push(`${(parameters / 1e6).toFixed(1)} M parameters`);
  if (grid) parts.push(`${grid.rows} × ${grid.columns} patches`);
  if (depth) parts.push(`${depth} layers × ${heads} heads`);
  parts.push(`${image.width} × ${image.height} px`);
  const strong = Object.assign(document.createElement("b"), { textContent: name });
  $("model").replaceChildren(strong, ...parts.map((text) => Object.assign(document.createElement("span"), { textContent: text })));
  document.title = `vitrail: inside ${name}`;
}

function askToken(wrong) {
  return new Promise((resolve) => {
    $("token-note").textContent = wrong ? "That token was not accepted; it is kept until this tab is closed." : "It is kept until this tab is closed.";
    $("token-box").oncancel = (event) => event.preventDefault();
    $("token-form").onsubmit = (event) => { event.preventDefault(); $("token-box").close(); resolve($("token").value); };
    $("token-box").showModal();
  });
}

async function start() {
  listen({ state: serverState, doing: (what, ms) => say(what && `${what}…`, ms ? ` ${Math.round(ms / 1000)} s so far` : ""), token: askToken });
  onBanner(tryNow);
  model = await ask("/v1/model", { what: "Waiting for the model" });
  shows = [...(model.attention ? ["attention"] : []), ...model.methods.filter((m) => m !== "attention"), ...(model.pool === "map" ? ["pool"] : []), "plain"];
  describe();
  $("theme").setAttribute("aria-pressed", String((document.documentElement.dataset.theme ?? "") === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches)));
  samples = await ask("/v1/samples").catch(() => []);
  drawSamples();
  wire();
  await restore(location.hash);
  if (model.attention) ask("/v1/positions").then((answer) => { places = placesOf(answer); render(); }, () => {});
}

/** The server went away, has too much to do, or is back; perhaps with another model. */
async function serverState(kind, seconds) {
  const again = ` Trying again in ${Math.max(seconds, 1)} s.`;
  if (kind === "away") return banner("The server is away; nothing here is lost.", 0, "Try now", again);
  if (kind === "busy") return banner("The server is busy.", 0, "Try now", again);
  banner("The server is back.", 2500);
  const now = await ask("/v1/model");
  if (model && JSON.stringify(now) !== JSON.stringify(model)) location.reload();
}

start().catch((error) => banner(error.message));
