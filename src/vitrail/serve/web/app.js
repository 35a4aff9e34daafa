// The explorer: holds the view state, draws it and handles input.

import { attended, placesOf, reading } from "./attention.js";
import { drawChips } from "./chips.js";
import { ImagePicker, NO_IMAGE } from "./image_picker.js";
import { savePng } from "./download.js";
import { capital, minus, short } from "./formatting.js";
import { listenKeys } from "./keyboard.js";
import { isOwn, writeLink } from "./permalink.js";
import { Pane } from "./pane.js";
import { distancePlot, placesMap } from "./charts.js";
import { drawVerdict, Predictions, spoken } from "./predictions.js";
import { ask, listen, tryNow } from "./server.js";
import { ImageState } from "./image_state.js";
import { invitation, legend, meaning, NAMES, place, sentence, TIPS, titleOf } from "./captions.js";
import { askToken } from "./token.js";
import { banner, onBanner, say, segments } from "./ui.js";

const $ = (id) => document.getElementById(id);
const PLAY = 850;  // milliseconds for a layer
const touch = matchMedia("(hover: none)");

const view = { panes: [], sheets: [], active: 0, ask: null, hover: null, paint: "light", fill: "mean", mode: touch.matches ? "ask" : "hide" };
let model, shows, imagePicker, places = null, playing = 0, linking = 0, speaking = 0, toSay = "";
const predictions = new Predictions($("says"));

const pane = () => view.panes[view.active];
const sheetOf = (one) => view.sheets[one.sheet];
const special = () => model.prefix_tokens.length;
/** The query token of an image: the patch under the pointer, else the selected one. A hidden patch is never the query. */
const asker = (sheet) => [view.hover === null ? null : view.hover + special(), view.ask].find((token) => token !== null && !sheet.hide.has(token - special())) ?? null;
const methodOf = (show) => (show === "pool" ? "attention" : show);
const letterOf = (one) => (view.panes.length > 1 ? "AB"[view.panes.indexOf(one)] : "");

/** The value of each patch in a pane; null for the plain image, or before the values have arrived. */
function values(one, sheet) {
  if (one.show === "plain" || !sheet.image) return null;
  if (one.show !== "attention") return sheet.map(methodOf(one.show));
  const row = rowOf(one, sheet);
  return row && row.slice(special());
}

const wantOf = ({ show, layer }) => (show === "attention" ? { layer } : { method: methodOf(show) });

function rowOf(one, sheet) {
  const layer = sheet.layers.get(one.layer);
  return layer ? attended(layer, one.head, asker(sheet) ?? reading(model.pool, model.prefix_tokens, layer.tokens)) : null;
}

let drawing = 0;
function render() { drawing ||= requestAnimationFrame(draw); }

function draw() {
  drawing = 0;
  let waiting = "";
  view.sheets.forEach((sheet, i) => sheet.want(view.panes.filter((one) => one.sheet === i && one.show !== "plain").map(wantOf)));
  for (const one of view.panes) {
    const sheet = sheetOf(one), letter = letterOf(one), found = values(one, sheet), attending = one.show === "attention";
    if (!found && sheet.image && one.show !== "plain" && !sheet.failedKeys.size) waiting = attending ? `Loading layer ${one.layer}…` : `Computing ${NAMES[one.show].toLowerCase()}…`;
    one.view.show({
      sheet,
      values: found,
      squares: one.show === "occlusion",
      asker: attending ? asker(sheet) : view.hover === null ? null : view.hover + special(),
      pointed: view.hover,
      paint: view.paint,
      caption: captionOf(one, sheet, letter, found),
      label: `${letter ? `Pane ${letter}. ` : ""}${short(sheet.name, 60) || "The image"} in ${sheet.grid?.rows ?? 0} by ${sheet.grid?.columns ?? 0} patches. ${titleOf(one, model)}. Arrow keys move, Space hides, Enter sets the query.`,
      pending: !found && one.show !== "plain",
      empty: sheet.blob || one.wanted ? "" : "Drop an image here, paste one, or choose a sample.",
    });
    one.view.root.classList.toggle("active", Boolean(letter) && one === pane());
  }
  if (waiting && !$("doing").textContent) say(waiting);
  $("stop").hidden = !view.sheets.some(({ wanted }) => wanted?.method);
  controls();
  beside();
  linking ||= setTimeout(() => { linking = 0; link(); }, 200);
}

/** Writes the view to the URL, without the hovered patch. Browsers limit how often the URL may change. */
function link() {
  const text = `#${writeLink(view, model)}`;
  if (location.hash !== text) history.replaceState(null, "", text);
}

/** The caption below a pane: what it shows, and the color scale. */
function captionOf(one, sheet, letter, found) {
  const make = (tag, className, text = "") => Object.assign(document.createElement(tag), { className, textContent: text });
  const means = sheet.image ? meaning(one, sheet, model, asker(sheet)) : "", name = make("span", "means", letter ? titleOf(one, model) : means);
  const parts = [name], ends = legend(one.show, found);
  name.title = sheet.image ? meaning(one, sheet, model, asker(sheet), 10000) : "";
  if (letter) name.prepend(make("b", "", letter));
  if (ends) {
    const ramp = make("span", `ramp ${view.paint}`), [low, high] = ends.map((text) => make("span", "", text));
    ramp.append(low, make("i", ""), high);
    ramp.title = "Color scale";
    parts.push(ramp);
  }
  if (letter) {
    const close = Object.assign(make("button", "bare", "×"), { type: "button", title: "Close this pane", onclick: () => closePane(one) });
    close.setAttribute("aria-label", `Close pane ${letter}`);
    parts.push(close);
  }
  return parts;
}

function controls() {
  const one = pane(), sheet = sheetOf(one), heads = model.num_heads ?? 0, letter = letterOf(one), attending = one.show === "attention";
  segments($("shows"), shows.map((show) => [show, NAMES[show], TIPS[show]]), one.show, (show) => set({ show }));
  $("shows").hidden = shows.length < 2;
  segments($("paints"), null, view.paint, (paint) => { view.paint = paint; render(); }, "paint");
  const click = touch.matches ? "Tap" : "Click";
  segments($("modes"), [["hide", `${click}: hide`], ["ask", `${click}: query`]], view.mode, (mode) => { view.mode = mode; render(); });
  $("modes").hidden = !model.has_attention;
  $("panes").dataset.mode = view.mode;
  $("paints").hidden = one.show === "plain";
  $("layer-row").hidden = !attending;
  if (model.depth) Object.assign($("layer"), { max: model.depth, value: one.layer });
  $("layer").style.setProperty("--part", model.depth > 1 ? (one.layer - 1) / (model.depth - 1) : 0);
  $("layer-out").textContent = `${one.layer} of ${model.depth}`;
  $("layer").setAttribute("aria-valuetext", `${one.layer} of ${model.depth}`);
  segments($("heads"), [["0", "all"], ...Array.from({ length: heads }, (_, i) => [String(i + 1), String(i + 1)])], String(one.head), (head) => set({ head: Number(head) }));
  $("heads").parentElement.hidden = heads < 2;
  $("play").setAttribute("aria-pressed", String(Boolean(playing)));
  $("play").setAttribute("aria-label", playing ? "Stop playing" : "Play through the layers");
  const count = sheet.hide.size;
  const hint = view.mode === "hide" ? "Nothing hidden; drag to hide an area." : touch.matches ? "Long-press to hide a patch." : "Shift-click to hide.";
  $("hidden-some").textContent = count ? `${count}` : hint;
  $("hidden-of").textContent = count ? ` of ${sheet.patches}` : "";
  $("hidden-rest").textContent = count ? " hidden" : "";
  $("hide-row").classList.toggle("some", count > 0);
  $("undo").disabled = !sheet.past.length;
  $("clear").disabled = !count;
  $("fill").value = view.fill;
  $("compare").setAttribute("aria-pressed", String(Boolean(letter)));
  const row = attending ? rowOf(one, sheet) : null;
  drawChips($("chips"), { model, view, row, shown: attending && model.has_attention, asker: asker(sheet), render });
  const told = sentence(one, sheet, model, { values: row ? row.slice(special()) : values(one, sheet), row, from: asker(sheet), hover: view.hover });
  $("words").textContent = letter && told ? `${letter}: ${told}` : told;
  $("invite").textContent = invitation({ show: one.show, model, mode: view.mode, touch: touch.matches, compared: letter });
  imagePicker.mark(one, sheet);
}

function beside() {
  const one = pane(), sheet = sheetOf(one), used = [...new Set(view.panes.map(sheetOf))];
  predictions.show(used, model);
  drawVerdict($("verdict"), used, model);
  $("verdict").style.setProperty("--ratio", sheet.image ? sheet.image.width / sheet.image.height : 1);  // as wide as the image below
  speak(spoken(sheet));
  $("distance").hidden = !sheet.distance.length;
  $("distance-of").textContent = used.length > 1 ? `, in ${letterOf(one)}` : "";
  if (sheet.distance.length) {
    const attending = one.show === "attention";
    distancePlot($("distance-plot"), $("distance-note"), { ...sheet, layer: attending ? one.layer : 0, head: one.head }, (layer, head) => set({ show: "attention", layer, head }));
  }
  $("places").hidden = !places;
  if (places) {
    const asked = view.panes.some(({ show }) => show === "attention") ? asker(sheet) : null, { rows, columns } = places.grid;
    const chosen = view.hover ?? (asked !== null && asked >= special() ? asked - special() : null), patch = chosen ?? Math.floor(rows / 2) * columns + Math.floor(columns / 2);
    placesMap($("places-map"), places, patch);
    $("places-map").setAttribute("aria-label", `Similarity of the position embedding of ${place(patch, places.grid)} to all others`);
    $("places-note").textContent = `${chosen === null ? "The center patch, framed" : capital(place(patch, places.grid))}: ${places.description}.`;
    [$("places-low").textContent, $("places-high").textContent] = [minus(places.low.toFixed(2)), "1"];
  }
}

/** Announces a text to screen readers after 0.7 s; redrawing does not restart the delay. */
function speak(text) {
  if (!text || text === toSay) return;
  toSay = text;
  clearTimeout(speaking);
  speaking = setTimeout(() => { $("live").textContent = toSay; }, 700);
}

function set(changes) {
  if (changes.layer) changes.layer = Math.min(Math.max(changes.layer, 1), model.depth);
  if (changes.show) sheetOf(pane()).resume(methodOf(changes.show));
  Object.assign(pane(), changes);
  render();
}

function newImageState() {
  const sheet = new ImageState(model, render, (failing, error) => {
    say("");
    if (!failing.image) failing.refused?.();
    banner(error.code === "image_unreadable" ? NO_IMAGE : capital(error.message));
    render();
  });
  sheet.fill = view.fill;
  view.sheets.push(sheet);
  return view.sheets.length - 1;
}

function newPane(words) {
  const made = { sheet: 0, show: shows[0], layer: 1, head: 0, ...words };
  made.view = new Pane({
    ask: (patch) => { if (view.hover !== patch) { view.hover = patch; render(); } },
    pin: (patch) => {
      const token = patch + special();
      if (made.show === "attention" && sheetOf(made).hide.has(patch) && view.ask !== token) return banner("This patch is hidden; show it again to use it as the query.", 4000);
      if (view.panes.some(({ show }) => show === "attention")) { view.ask = view.ask === token ? null : token; view.hover = null; }
      else view.hover = patch;  // maps have no query: a tap shows the value
      render();
    },
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
  else banner("At least one patch must stay visible.");
}

/** Opens a second pane as a copy of the first, or closes it. */
function compare() {
  if (view.panes.length > 1) return closePane(view.panes[1]);
  const { sheet, show, layer, head } = view.panes[0];
  newPane({ sheet, show, layer, head });
  view.active = 1;
  render();
}

function closePane(one) {
  one.view.root.remove();
  view.panes = view.panes.filter((other) => other !== one);
  view.active = 0;
  removeUnusedImages();
  document.body.classList.remove("two");
  render();
}

/** Drops images that no pane shows. */
function removeUnusedImages() {
  const used = view.sheets.filter((sheet, i) => view.panes.some((other) => other.sheet === i) || void sheet.stop());
  view.panes.forEach((other) => { other.sheet = used.indexOf(view.sheets[other.sheet]); });
  view.sheets = used;
}

function play() {
  clearInterval(playing);
  if (playing) playing = 0;
  else if (model.has_attention) {
    const on = () => set({ show: "attention", layer: (pane().layer % model.depth) + 1 });
    playing = setInterval(on, PLAY);
    on();
  }
  render();
}

async function copyLink() {
  link();
  const only = view.sheets.some(({ source }) => source && isOwn(source)) ? " Your image is stored in this browser only: the link does not work elsewhere." : "";
  try {
    await navigator.clipboard.writeText(location.href);
    banner(`Link copied.${only}`, 4000);
  } catch { banner(`The link is in the address bar.${only}`, 6000); }
}

function download() {
  if (!sheetOf(pane()).image) return;
  const panes = view.panes.map((one) => ({ view: one.view, title: `${letterOf(one) && `${letterOf(one)}: `}${titleOf(one, model)}`, means: meaning(one, sheetOf(one), model, asker(sheetOf(one))), ends: legend(one.show, one.view.raw) }));
  savePng({ panes, sheets: [...new Set(view.panes.map(sheetOf))], model, words: $("words").textContent, credit: $("credit").textContent });
}

function dark() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches, root = document.documentElement;
  const now = root.dataset.theme ? root.dataset.theme === "dark" : system, next = now ? "light" : "dark";
  root.dataset.theme = next;
  try { localStorage.setItem("vitrail-theme", next); } catch { /* a private window */ }
  $("theme").setAttribute("aria-pressed", String(next === "dark"));
}

function wire() {
  $("layer").oninput = ({ target }) => set({ layer: Number(target.value) });
  $("play").onclick = play;
  $("compare").onclick = compare;
  $("link").onclick = copyLink;
  $("save").onclick = download;
  $("theme").onclick = dark;
  $("help").onclick = () => $("help-box").showModal();
  $("stop").onclick = () => view.sheets.forEach((sheet) => sheet.stopFetching());
  $("undo").onclick = () => sheetOf(pane()).undo();
  $("clear").onclick = () => sheetOf(pane()).cover([]);
  $("fill").onchange = ({ target }) => { view.fill = target.value; for (const sheet of view.sheets) { sheet.fill = view.fill; if (sheet.hide.size) sheet.send(); } render(); };
  listenKeys({ set, pane, play, compare, copyLink, dark, model, shows, view, render, undo: () => sheetOf(pane()).undo(), clear: () => sheetOf(pane()).hide.size && sheetOf(pane()).cover([]) });
}

function describe() {
  const { name, num_parameters, grid, depth, num_heads, image_size } = model, parts = [];
  if (num_parameters) parts.push(`${(num_parameters / 1e6).toFixed(1)} M parameters`);
  if (grid) parts.push(`${grid.rows} × ${grid.columns} patches`);
  if (depth) parts.push(`${depth} layers × ${num_heads} heads`);
  parts.push(`${image_size.width} × ${image_size.height} px`);
  const strong = Object.assign(document.createElement("b"), { textContent: name, title: name, dir: "auto" });
  $("model").replaceChildren(strong, ...parts.map((text) => Object.assign(document.createElement("span"), { textContent: text })));
  document.title = `vitrail: inside ${short(name, 60)}`;
}

function doing(what, ms, progress) {
  if (progress) say(`${what}…`, ` ${progress.done} of ${progress.total}`, progress.done / progress.total);
  else say(what && `${what}…`, ms ? ` ${Math.round(ms / 1000)} s so far` : "");
}

async function start() {
  listen({ state: serverState, doing, token: askToken });
  onBanner(tryNow);
  model = await ask("/v1/model", { what: "Waiting for the model" });
  shows = [...(model.has_attention ? ["attention"] : []), ...model.methods.filter((m) => m !== "attention"), ...(model.pool === "map" ? ["pool"] : []), "plain"];
  describe();
  $("theme").setAttribute("aria-pressed", String((document.documentElement.dataset.theme ?? "") === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches)));
  if (!model.has_attention) view.mode = "hide";
  const samples = await ask("/v1/samples").catch(() => []);
  imagePicker = new ImagePicker({ view, model, shows, samples, newImageState, newPane, pane, removeUnusedImages, render });
  imagePicker.listen();
  wire();
  document.body.classList.add("ready");
  await imagePicker.restore(location.hash);
  const other = sessionStorage.getItem("vitrail-other");
  if (other) { sessionStorage.removeItem("vitrail-other"); banner(`The server is back with another model: ${short(model.name, 60)}.`, 6000); }
  if (model.has_attention) ask("/v1/positions").then((answer) => { places = placesOf(answer); render(); }, () => {});
}

/** Shows that the server is unreachable, busy or back; reloads if it serves another model. */
async function serverState(kind, seconds) {
  const again = ` Retrying in ${Math.max(seconds, 1)} s.`;
  if (kind === "away") return banner("The server is unreachable; your view is kept.", 0, "Try now", again);
  if (kind === "busy") return banner("The server is busy.", 0, "Try now", again);
  banner("The server is back.", 2500);
  const now = await ask("/v1/model"), same = (key) => JSON.stringify(now[key]) === JSON.stringify(model[key]);
  if (!model || Object.keys(now).every(same)) return;
  link();
  if (!["grid", "prefix_tokens", "depth", "num_heads"].every(same)) {  // other patches: what was hidden or asked means nothing there
    const words = new URLSearchParams(location.hash.slice(1)), kept = ["image", "image2", "show", "show2", "paint", "fill"];
    for (const name of [...words.keys()]) if (!kept.includes(name)) words.delete(name);
    history.replaceState(null, "", `#${words}`);
  }
  sessionStorage.setItem("vitrail-other", "yes");
  location.reload();
}

start().catch((error) => banner(capital(error.message)));
