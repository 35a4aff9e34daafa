// Loads images into panes: from samples, files, the clipboard, the camera and links. The latest request wins.

import { isUserImage, readPermalink, userImage } from "./permalink.js";
import { firstImage, fitToLimits, hashOf, loadImage, storeImage, takePhoto } from "./image_files.js";
import { request } from "./server.js";
import { hideBanner, setStatus, showBanner } from "./ui.js";

const $ = (id) => document.getElementById(id);
export const NO_IMAGE = "This file cannot be read as an image; expected JPEG, PNG, WebP, GIF, BMP, AVIF or TIFF.";

/** `page`: view, model, mapNames, samples; addImageState(), addPane(settings), activePane(), removeUnusedImages(), render(). */
export class ImagePicker {
  constructor(page) { Object.assign(this, { page, restoreId: 0 }); }

  get pane() { return this.page.activePane(); }

  /** The default query token of a sample; null for other images. */
  defaultQuery(source) {
    const { model, samples } = this.page, point = samples.find(({ name }) => name === source)?.query_point;
    if (!point || !model.has_attention || !model.grid) return null;
    const { rows, columns } = model.grid;
    return model.prefix_tokens.length + Math.floor(point[1] * rows) * columns + Math.floor(point[0] * columns);
  }

  /** Starts a request for a pane; returns a function that reports whether it is still the latest. */
  startRequest(pane, pendingSource = null) {
    const id = (pane.requestId = (pane.requestId ?? 0) + 1);
    pane.pendingSource = pendingSource;  // included in the URL immediately
    this.page.render();
    return () => pane.requestId === id && this.page.view.panes.includes(pane);
  }

  /** Sets the image of a pane; if both panes shared one image, this pane gets its own state. */
  setImage(pane, source, blob, name) {
    const { view, addImageState, removeUnusedImages } = this.page, previous = view.states[pane.stateIndex];
    const isShared = view.panes.some((other) => other !== pane && other.stateIndex === pane.stateIndex);
    if (isShared) pane.stateIndex = addImageState();
    const state = view.states[pane.stateIndex], restored = !previous.blob && previous.source && isUserImage(previous.source) && isUserImage(source);  // the image of a link, opened after the page
    if (isShared) state.onRejected = () => { pane.stateIndex = view.states.indexOf(previous); removeUnusedImages(); };
    if (!isShared && previous.source && view.query !== null && view.query === this.defaultQuery(previous.source)) view.query = this.defaultQuery(source);
    pane.pendingSource = null;
    hideBanner();
    state.setImage(source, blob, name, restored ? previous.hiddenPatches : new Set());
    this.page.render();
  }

  async openFile(file, pane = this.pane) {
    if (!file) return showBanner(NO_IMAGE);
    const isLatest = this.startRequest(pane), { blob, note } = await fitToLimits(file, this.page.model.limits), key = await hashOf(blob);
    const stored = await storeImage(key, blob);
    if (!isLatest()) return;
    this.setImage(pane, userImage(key), blob, file.name?.replace(/\.\w+$/, "") || "your image");
    if (note) showBanner(note);
    if (!stored) setStatus("This browser cannot store images: a link will not restore this view.");
  }

  async fetchImage(source) {
    if (isUserImage(source)) return loadImage(source.slice(4));
    const sample = this.page.samples.find(({ name }) => name === source);
    return sample ? request(sample.url, { as: "blob", description: "Loading the sample" }) : null;
  }

  async openSample(name) {
    const pane = this.pane, isLatest = this.startRequest(pane, name), blob = await this.fetchImage(name).catch(() => null);
    if (!isLatest()) return;
    if (blob) return this.setImage(pane, name, blob, name);
    pane.pendingSource = null;
    showBanner("The sample could not be loaded; try again.");
  }

  /** Restores the view of a URL fragment; if it is empty, opens the first sample with its default query. */
  async restore(text) {
    const { view, model, mapNames, samples, addImageState, addPane, render } = this.page;
    const link = readPermalink(text, model, mapNames), id = ++this.restoreId;
    if (text.length < 2) link.query = this.defaultQuery(samples[0]?.name);
    hideBanner();
    view.states.forEach((state) => state.cancelAll());
    document.body.classList.remove("comparing");
    Object.assign(view, { panes: [], states: [], active: 0, hovered: null, query: link.query, colorScale: link.colorScale, fill: link.fill });
    $("panes").replaceChildren();
    for (let i = 0; i < link.sources.length; i++) addImageState();
    link.panes.forEach(addPane);
    const states = [...view.states], panes = [...view.panes];
    link.sources.forEach(({ source, hiddenPatches }, i) => Object.assign(states[i], { source: source ?? samples[0]?.name ?? null, hiddenPatches }));
    render();
    await Promise.all(states.map(async (state, i) => {
      const { source, hiddenPatches } = state;
      if (!source) return;
      const blob = await this.fetchImage(source).catch(() => null);
      if (id !== this.restoreId || panes.some((pane) => pane.stateIndex === i && pane.requestId)) return;  // a newer request has started
      if (blob) state.setImage(source, blob, isUserImage(source) ? "your image" : source, hiddenPatches);
      else showBanner(isUserImage(source) ? "This link needs an image that is stored in another browser only. Drop the same image here to restore the view." : `There is no sample named “${source}”; choose another or drop an image.`);
    }));
    if (id === this.restoreId) render();
  }

  async openCamera() {
    if (!navigator.mediaDevices?.getUserMedia) return $("camera-input").click();
    const pane = this.pane;
    try {
      const blob = await takePhoto($("camera-dialog"));
      if (blob) await this.openFile(new File([blob], "camera.jpg", { type: blob.type }), pane);
    } catch { showBanner("No camera is available, or this page may not use it."); }
  }

  addListeners() {
    const { view } = this.page;
    $("open-image").onclick = () => $("file-input").click();
    $("camera").onclick = () => this.openCamera();
    for (const id of ["file-input", "camera-input"]) $(id).onchange = ({ target }) => { if (target.files.length) this.openFile(firstImage(target)); target.value = ""; };
    addEventListener("paste", (event) => { const file = firstImage(event.clipboardData); if (file) { event.preventDefault(); this.openFile(file); } });
    addEventListener("hashchange", () => this.restore(location.hash));
    let depth = 0;
    addEventListener("dragenter", (event) => { event.preventDefault(); depth++; $("drop-target").hidden = false; });
    addEventListener("dragleave", () => { depth = Math.max(0, depth - 1); $("drop-target").hidden = depth === 0; });
    addEventListener("dragover", (event) => event.preventDefault());
    addEventListener("drop", (event) => {
      event.preventDefault();
      depth = 0;
      $("drop-target").hidden = true;
      const index = view.panes.findIndex(({ widget: { root } }) => root.contains(event.target));
      if (index >= 0) view.active = index;
      this.openFile(firstImage(event.dataTransfer));
    });
    $("samples").replaceChildren(...this.page.samples.map(({ name, url, alt }) => {
      const button = Object.assign(document.createElement("button"), { type: "button", className: "sample", title: alt, onclick: () => this.openSample(name) });
      button.dataset.name = name;
      button.append(Object.assign(document.createElement("img"), { src: url, alt, loading: "lazy", width: 64, height: 64 }));
      return button;
    }));
  }

  /** Marks the sample that the active pane shows or is loading. */
  markSample(pane, state) {
    for (const button of $("samples").children) {
      const selected = button.dataset.name === (pane.pendingSource ?? state.source);
      if (selected && button.getAttribute("aria-pressed") !== "true") {
        const strip = document.querySelector(".image-strip");
        strip.scrollLeft = button.offsetLeft - strip.offsetLeft - strip.clientWidth / 2 + button.offsetWidth / 2;
      }
      button.setAttribute("aria-pressed", String(selected));
    }
    const { samples, view } = this.page, shown = samples.filter(({ name }) => view.panes.some((shownPane) => view.states[shownPane.stateIndex].source === name));
    $("credit").textContent = shown.map(({ name, credit }, i) => `${i ? "sample" : "Sample"} “${name}”: ${credit}`).join("; ");
  }
}
