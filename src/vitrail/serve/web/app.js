// The explorer page: holds the view state, draws it and handles input.

import { attentionRow, parsePositions, poolingWeights } from "./attention.js";
import { drawChips } from "./chips.js";
import { ImagePicker, NO_IMAGE } from "./image_picker.js";
import { savePng } from "./download.js";
import { capitalize, minus, truncate } from "./formatting.js";
import { addShortcuts } from "./keyboard.js";
import { isUserImage, writePermalink } from "./permalink.js";
import { Pane } from "./pane.js";
import { drawDistancePlot, drawPositionMap } from "./charts.js";
import { describePredictions, drawCompactPredictions, Predictions } from "./predictions.js";
import { drawModelName } from "./model_select.js";
import { chosenModel, ofModel, request, retryNow, setListeners } from "./server.js";
import { ImageState } from "./image_state.js";
import { colorScaleLabels, MAP_TITLES, MAP_TOOLTIPS, paneCaption, paneTitle, patchName, queryCaption, usageHint } from "./captions.js";
import { requestToken } from "./token.js";
import { drawSegments, initBanner, setStatus, showBanner } from "./ui.js";

const $ = (id) => document.getElementById(id);
const PLAY_INTERVAL = 850;  // milliseconds per layer
const touchScreen = matchMedia("(hover: none)");

const view = { panes: [], states: [], active: 0, query: null, hovered: null, colorScale: "light", fill: "mean", mode: touchScreen.matches ? "query" : "hide" };
let model, mapNames, imagePicker, positions = null, playTimer = 0, urlTimer = 0, announceTimer = 0, pendingAnnouncement = "";
const predictions = new Predictions($("predictions"));

const activePane = () => view.panes[view.active];
const stateOf = (pane) => view.states[pane.stateIndex];
const numPrefix = () => model.prefix_tokens.length;
/** The query token of an image: the patch under the pointer, else the selected one. A hidden patch is never the query. */
const queryToken = (state) => [view.hovered === null ? null : view.hovered + numPrefix(), view.query].find((token) => token !== null && !state.hiddenPatches.has(token - numPrefix())) ?? null;
const methodOf = (mapName) => (mapName === "pool" ? "attention" : mapName);
const paneLetter = (pane) => (view.panes.length > 1 ? "AB"[view.panes.indexOf(pane)] : "");

/** The value of each patch in a pane; null for the plain image, or before the values have arrived. */
function paneValues(pane, state) {
  if (pane.mapName === "plain" || !state.image) return null;
  if (pane.mapName !== "attention") return state.mapValues(methodOf(pane.mapName));
  const row = attentionOf(pane, state);
  return row && row.slice(numPrefix());
}

const neededData = ({ mapName, layer }) => (mapName === "attention" ? { layer } : { method: methodOf(mapName) });

function attentionOf(pane, state) {
  const layer = state.layers.get(pane.layer);
  return layer ? attentionRow(layer, pane.head, queryToken(state) ?? poolingWeights(model.pool, model.prefix_tokens, layer.tokens)) : null;
}

let frameRequest = 0;
function render() { frameRequest ||= requestAnimationFrame(draw); }

function draw() {
  frameRequest = 0;
  let status = "";
  view.states.forEach((state, i) => state.fetchNeeded(view.panes.filter((pane) => pane.stateIndex === i && pane.mapName !== "plain").map(neededData)));
  for (const pane of view.panes) {
    const state = stateOf(pane), letter = paneLetter(pane), values = paneValues(pane, state), isAttention = pane.mapName === "attention";
    if (!values && state.image && pane.mapName !== "plain" && !state.failedKeys.size) status = isAttention ? `Loading layer ${pane.layer}…` : `Computing ${MAP_TITLES[pane.mapName].toLowerCase()}…`;
    pane.widget.update({
      state,
      values,
      bySquares: pane.mapName === "occlusion",
      queryToken: isAttention ? queryToken(state) : view.hovered === null ? null : view.hovered + numPrefix(),
      pointed: view.hovered,
      colorScale: view.colorScale,
      caption: captionElements(pane, state, letter, values),
      label: `${letter ? `Pane ${letter}. ` : ""}${truncate(state.name, 60) || "The image"} in ${state.grid?.rows ?? 0} by ${state.grid?.columns ?? 0} patches. ${paneTitle(pane, model)}. Arrow keys move, Space hides, Enter sets the query.`,
      pending: !values && pane.mapName !== "plain",
      emptyMessage: state.blob || pane.pendingSource ? "" : "Drop an image here, paste one, or choose a sample.",
    });
    pane.widget.root.classList.toggle("active", Boolean(letter) && pane === activePane());
  }
  if (status && !$("status-text").textContent) setStatus(status);
  $("stop").hidden = !view.states.some(({ currentFetch }) => currentFetch?.method);
  drawControls();
  drawSidePanel();
  urlTimer ||= setTimeout(() => { urlTimer = 0; updateUrl(); }, 200);
}

/** Writes the view to the URL, without the hovered patch. Browsers limit how often the URL may change. */
function updateUrl() {
  const text = `#${writePermalink(view, model)}`;
  if (location.hash !== text) history.replaceState(null, "", text);
}

/** The caption below a pane: what it shows, and the color scale. */
function captionElements(pane, state, letter, values) {
  const element = (tag, className, text = "") => Object.assign(document.createElement(tag), { className, textContent: text });
  const caption = state.image ? paneCaption(pane, state, model, queryToken(state)) : "", name = element("span", "caption-text", letter ? paneTitle(pane, model) : caption);
  const parts = [name], labels = colorScaleLabels(pane.mapName, values);
  name.title = state.image ? paneCaption(pane, state, model, queryToken(state), 10000) : "";
  if (letter) name.prepend(element("b", "", letter));
  if (labels) {
    const scale = element("span", `color-scale ${view.colorScale}`), [low, high] = labels.map((text) => element("span", "", text));
    scale.append(low, element("i", ""), high);
    scale.title = "Color scale";
    parts.push(scale);
  }
  if (letter) {
    const close = Object.assign(element("button", "borderless", "×"), { type: "button", title: "Close this pane", onclick: () => closePane(pane) });
    close.setAttribute("aria-label", `Close pane ${letter}`);
    parts.push(close);
  }
  return parts;
}

function drawControls() {
  const pane = activePane(), state = stateOf(pane), heads = model.num_heads ?? 0, letter = paneLetter(pane), isAttention = pane.mapName === "attention";
  drawSegments($("map-select"), mapNames.map((mapName) => [mapName, MAP_TITLES[mapName], MAP_TOOLTIPS[mapName]]), pane.mapName, (mapName) => updatePane({ mapName }));
  $("map-select").hidden = mapNames.length < 2;
  drawSegments($("color-scale-select"), null, view.colorScale, (colorScale) => { view.colorScale = colorScale; render(); }, "colorScale");
  const clickVerb = touchScreen.matches ? "Tap" : "Click";
  drawSegments($("click-action"), [["hide", `${clickVerb}: hide`], ["query", `${clickVerb}: query`]], view.mode, (mode) => { view.mode = mode; render(); });
  $("click-action").hidden = !model.has_attention;
  $("panes").dataset.mode = view.mode;
  $("color-scale-select").hidden = pane.mapName === "plain";
  $("layer-row").hidden = !isAttention;
  if (model.depth) Object.assign($("layer"), { max: model.depth, value: pane.layer });
  $("layer").style.setProperty("--progress", model.depth > 1 ? (pane.layer - 1) / (model.depth - 1) : 0);
  $("layer-value").textContent = `${pane.layer} of ${model.depth}`;
  $("layer").setAttribute("aria-valuetext", `${pane.layer} of ${model.depth}`);
  drawSegments($("head-select"), [["0", "all"], ...Array.from({ length: heads }, (_, i) => [String(i + 1), String(i + 1)])], String(pane.head), (head) => updatePane({ head: Number(head) }));
  $("head-select").parentElement.hidden = heads < 2;
  $("play").setAttribute("aria-pressed", String(Boolean(playTimer)));
  $("play").setAttribute("aria-label", playTimer ? "Stop playing" : "Play through the layers");
  const count = state.hiddenPatches.size;
  const hint = view.mode === "hide" ? "Nothing hidden; drag to hide an area." : touchScreen.matches ? "Long-press to hide a patch." : "Shift-click to hide.";
  $("hidden-number").textContent = count ? `${count}` : hint;
  $("hidden-total").textContent = count ? ` of ${state.patches}` : "";
  $("hidden-suffix").textContent = count ? " hidden" : "";
  $("hide-row").classList.toggle("has-hidden", count > 0);
  $("undo").disabled = !state.undoStack.length;
  $("clear").disabled = !count;
  $("fill").value = view.fill;
  $("compare").setAttribute("aria-pressed", String(Boolean(letter)));
  const row = isAttention ? attentionOf(pane, state) : null;
  drawChips($("token-chips"), { model, view, row, visible: isAttention && model.has_attention, queryToken: queryToken(state), render });
  const caption = queryCaption(pane, state, model, { values: row ? row.slice(numPrefix()) : paneValues(pane, state), row, query: queryToken(state), hovered: view.hovered });
  $("query-caption").textContent = letter && caption ? `${letter}: ${caption}` : caption;
  $("hint").textContent = usageHint({ mapName: pane.mapName, model, mode: view.mode, touch: touchScreen.matches, activeLetter: letter });
  imagePicker.markSample(pane, state);
}

function drawSidePanel() {
  const pane = activePane(), state = stateOf(pane), states = [...new Set(view.panes.map(stateOf))];
  predictions.update(states, model);
  drawCompactPredictions($("compact-predictions"), states, model);
  $("compact-predictions").style.setProperty("--aspect-ratio", state.image ? state.image.width / state.image.height : 1);  // the width of the image below it
  announce(describePredictions(state));
  $("attention-distance").hidden = !state.distance.length;
  $("distance-pane").textContent = states.length > 1 ? `, in ${paneLetter(pane)}` : "";
  if (state.distance.length) {
    const isAttention = pane.mapName === "attention";
    drawDistancePlot($("distance-plot"), $("distance-note"), { ...state, layer: isAttention ? pane.layer : 0, head: pane.head }, (layer, head) => updatePane({ mapName: "attention", layer, head }));
  }
  $("position-similarity").hidden = !positions;
  if (positions) {
    const query = view.panes.some(({ mapName }) => mapName === "attention") ? queryToken(state) : null, { rows, columns } = positions.grid;
    const selected = view.hovered ?? (query !== null && query >= numPrefix() ? query - numPrefix() : null), patch = selected ?? Math.floor(rows / 2) * columns + Math.floor(columns / 2);
    drawPositionMap($("position-map"), positions, patch);
    $("position-map").setAttribute("aria-label", `Similarity of the position embedding of ${patchName(patch, positions.grid)} to all others`);
    $("position-note").textContent = `${selected === null ? "The center patch, framed" : capitalize(patchName(patch, positions.grid))}: ${positions.description}.`;
    [$("position-min").textContent, $("position-max").textContent] = [minus(positions.min.toFixed(2)), "1"];
  }
}

/** Announces a text to screen readers after 0.7 s; redrawing does not restart the delay. */
function announce(text) {
  if (!text || text === pendingAnnouncement) return;
  pendingAnnouncement = text;
  clearTimeout(announceTimer);
  announceTimer = setTimeout(() => { $("announcement").textContent = pendingAnnouncement; }, 700);
}

function updatePane(changes) {
  if (changes.layer) changes.layer = Math.min(Math.max(changes.layer, 1), model.depth);
  if (changes.mapName) stateOf(activePane()).resume(methodOf(changes.mapName));
  Object.assign(activePane(), changes);
  render();
}

function addImageState() {
  const state = new ImageState(model, render, (failedState, error) => {
    setStatus("");
    if (!failedState.image) failedState.onRejected?.();
    showBanner(error.code === "image_unreadable" ? NO_IMAGE : capitalize(error.message));
    render();
  });
  state.fill = view.fill;
  view.states.push(state);
  return view.states.length - 1;
}

function addPane(settings) {
  const pane = { stateIndex: 0, mapName: mapNames[0], layer: 1, head: 0, ...settings };
  pane.widget = new Pane({
    onHover: (patch) => { if (view.hovered !== patch) { view.hovered = patch; render(); } },
    onSelect: (patch) => {
      const token = patch + numPrefix();
      if (pane.mapName === "attention" && stateOf(pane).hiddenPatches.has(patch) && view.query !== token) return showBanner("This patch is hidden; show it again to use it as the query.", 4000);
      if (view.panes.some(({ mapName }) => mapName === "attention")) { view.query = view.query === token ? null : token; view.hovered = null; }
      else view.hovered = patch;  // maps have no query: a tap shows the value
      render();
    },
    onToggle: (state, patches, first = patches[0]) => setPatchesHidden(state, patches, !state.hiddenPatches.has(first)),
    onActivate: () => { const index = view.panes.indexOf(pane); if (index !== view.active && index >= 0) { view.active = index; render(); } },
    getMode: () => view.mode,
  });
  view.panes.push(pane);
  $("panes").append(pane.widget.root);
  document.body.classList.toggle("comparing", view.panes.length > 1);
  return pane;
}

function setPatchesHidden(state, patches, hide) {
  const hiddenPatches = new Set(state.hiddenPatches);
  for (const patch of patches) if (hide) hiddenPatches.add(patch); else hiddenPatches.delete(patch);
  if (hiddenPatches.size < state.patches) state.setHidden(hiddenPatches);
  else showBanner("At least one patch must stay visible.");
}

/** Opens a second pane as a copy of the first, or closes it. */
function compare() {
  if (view.panes.length > 1) return closePane(view.panes[1]);
  const { stateIndex, mapName, layer, head } = view.panes[0];
  addPane({ stateIndex, mapName, layer, head });
  view.active = 1;
  render();
}

function closePane(pane) {
  pane.widget.root.remove();
  view.panes = view.panes.filter((other) => other !== pane);
  view.active = 0;
  removeUnusedImages();
  document.body.classList.remove("comparing");
  render();
}

/** Removes the states of images that no pane shows. */
function removeUnusedImages() {
  const states = view.states.filter((state, i) => view.panes.some((pane) => pane.stateIndex === i) || void state.cancelAll());
  view.panes.forEach((pane) => { pane.stateIndex = states.indexOf(view.states[pane.stateIndex]); });
  view.states = states;
}

function togglePlay() {
  clearInterval(playTimer);
  if (playTimer) playTimer = 0;
  else if (model.has_attention) {
    const nextLayer = () => updatePane({ mapName: "attention", layer: (activePane().layer % model.depth) + 1 });
    playTimer = setInterval(nextLayer, PLAY_INTERVAL);
    nextLayer();
  }
  render();
}

async function copyLink() {
  updateUrl();
  const warning = view.states.some(({ source }) => source && isUserImage(source)) ? " Your image is stored in this browser only: the link does not work elsewhere." : "";
  try {
    await navigator.clipboard.writeText(location.href);
    showBanner(`Link copied.${warning}`, 4000);
  } catch { showBanner(`The link is in the address bar.${warning}`, 6000); }
}

function download() {
  if (!stateOf(activePane()).image) return;
  const panes = view.panes.map((pane) => ({ widget: pane.widget, title: `${paneLetter(pane) && `${paneLetter(pane)}: `}${paneTitle(pane, model)}`, caption: paneCaption(pane, stateOf(pane), model, queryToken(stateOf(pane))), labels: colorScaleLabels(pane.mapName, pane.widget.raw) }));
  savePng({ panes, states: [...new Set(view.panes.map(stateOf))], model, queryCaption: $("query-caption").textContent, credit: $("credit").textContent });
}

function toggleTheme() {
  const systemIsDark = matchMedia("(prefers-color-scheme: dark)").matches, root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : systemIsDark, next = isDark ? "light" : "dark";
  root.dataset.theme = next;
  try { localStorage.setItem("vitrail-theme", next); } catch { /* a private window */ }
  $("theme").setAttribute("aria-pressed", String(next === "dark"));
}

function addListeners() {
  $("layer").oninput = ({ target }) => updatePane({ layer: Number(target.value) });
  $("play").onclick = togglePlay;
  $("compare").onclick = compare;
  $("link").onclick = copyLink;
  $("save").onclick = download;
  $("theme").onclick = toggleTheme;
  $("help").onclick = () => $("help-dialog").showModal();
  $("stop").onclick = () => view.states.forEach((state) => state.stopFetch());
  $("undo").onclick = () => stateOf(activePane()).undo();
  $("clear").onclick = () => stateOf(activePane()).setHidden([]);
  $("fill").onchange = ({ target }) => { view.fill = target.value; for (const state of view.states) { state.fill = view.fill; if (state.hiddenPatches.size) state.refresh(); } render(); };
  addShortcuts({ updatePane, activePane, togglePlay, compare, copyLink, toggleTheme, model, mapNames, view, render, undo: () => stateOf(activePane()).undo(), clear: () => stateOf(activePane()).hiddenPatches.size && stateOf(activePane()).setHidden([]) });
}

function drawModelSummary(names) {
  const { num_parameters, grid, depth, num_heads, image_size } = model, parts = [];
  if (num_parameters) parts.push(`${(num_parameters / 1e6).toFixed(1)} M parameters`);
  if (grid) parts.push(`${grid.rows} × ${grid.columns} patches`);
  if (depth) parts.push(num_heads ? `${depth} layers × ${num_heads} heads` : `${depth} layers`);
  parts.push(`${image_size.width} × ${image_size.height} px`);
  const nameElement = drawModelName(model, names, showModel);
  $("model-summary").replaceChildren(nameElement, ...parts.map((text) => Object.assign(document.createElement("span"), { textContent: text })));
  document.title = `vitrail: inside ${truncate(model.name, 60)}`;
}

function showProgress(description, ms, progress) {
  if (progress) setStatus(`${description}…`, ` ${progress.done} of ${progress.total}`, progress.done / progress.total);
  else setStatus(description && `${description}…`, ms ? ` ${Math.round(ms / 1000)} s so far` : "");
}

async function start() {
  setListeners({ onServerState: handleServerState, onProgress: showProgress, onAnswer: ({ version }) => version === model?.version || reloadIfChanged().catch(() => {}), requestToken });
  initBanner(retryNow);
  model = await request(ofModel("/v1/model"), { description: "Waiting for the model" });
  const { data: models } = await request("/v1/models").catch(() => ({ data: [] }));
  mapNames = [...(model.has_attention ? ["attention"] : []), ...model.methods.filter((m) => m !== "attention"), ...(model.pool === "map" ? ["pool"] : []), "plain"];
  drawModelSummary(models.filter((one) => one.default !== null).map(({ name }) => name));
  $("theme").setAttribute("aria-pressed", String((document.documentElement.dataset.theme ?? "") === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches)));
  if (!model.has_attention) view.mode = "hide";
  const samples = await request("/v1/samples").catch(() => []);
  imagePicker = new ImagePicker({ view, model, mapNames, samples, addImageState, addPane, activePane, removeUnusedImages, render });
  imagePicker.addListeners();
  addListeners();
  document.body.classList.add("ready");
  await imagePicker.restore(location.hash);
  const modelChanged = sessionStorage.getItem("vitrail-other");
  if (modelChanged) { sessionStorage.removeItem("vitrail-other"); showBanner(modelChanged === "version" ? `The server has another version of the model now: ${truncate(model.version, 60)}.` : `The server is back with another model: ${truncate(model.name, 60)}.`, 6000); }
  if (model.has_attention) request(ofModel("/v1/positions")).then((response) => { positions = parsePositions(response); render(); }, () => {});
}

/** Shows that the server is unreachable, busy or back; reloads if it serves another model. */
async function handleServerState(status, seconds) {
  const countdown = ` Retrying in ${Math.max(seconds, 1)} s.`;
  if (status === "unreachable") return showBanner("The server is unreachable; your view is kept.", 0, "Try now", countdown);
  if (status === "busy") return showBanner("The server is busy.", 0, "Try now", countdown);
  showBanner("The server is back.", 2500);
  await reloadIfChanged();
}

/** Reloads the page if the server has another model or version now, because its results would not fit together. */
async function reloadIfChanged() {
  const newModel = await request(ofModel("/v1/model")), same = (key) => JSON.stringify(newModel[key]) === JSON.stringify(model[key]);
  if (!model || Object.keys(newModel).every(same)) return;
  keepView(["grid", "prefix_tokens", "depth", "num_heads"].every(same));
  sessionStorage.setItem("vitrail-other", newModel.name === model.name && newModel.version !== model.version ? "version" : "model");
  location.reload();
}

/** Writes the view to the URL for another model. With another grid, hidden patches and the query do not apply to it. */
function keepView(sameGrid) {
  updateUrl();
  if (sameGrid) return;
  const parameters = new URLSearchParams(location.hash.slice(1)), keptParameters = ["image", "image2", "show", "show2", "paint", "fill"];
  for (const name of [...parameters.keys()]) if (!keptParameters.includes(name)) parameters.delete(name);
  history.replaceState(null, "", `#${parameters}`);
}

function showModel(name) {
  if (name === (chosenModel ?? model.name)) return;
  keepView(false);
  location.assign(`?${new URLSearchParams({ model: name })}${location.hash}`);
}

start().catch((error) => showBanner(capitalize(error.message)));
