// Loads images into panes: samples, files, the clipboard, the camera and links. The latest request wins.

import { isOwn, own, readLink } from "./permalink.js";
import { fitting, keyOf, imageIn, recall, remember, takeImage } from "./image_files.js";
import { ask } from "./server.js";
import { banner, hideBanner, say } from "./ui.js";

const $ = (id) => document.getElementById(id);
export const NO_IMAGE = "This file cannot be read as an image; expected JPEG, PNG, WebP, GIF, BMP, AVIF or TIFF.";

/** `page`: view, model, shows, samples; newImageState(), newPane(words), pane(), removeUnusedImages(), render(). */
export class ImagePicker {
  constructor(page) { Object.assign(this, { page, restoring: 0 }); }

  get pane() { return this.page.pane(); }

  /** The default query token of a sample; null for other images. */
  point(source) {
    const { model, samples } = this.page, found = samples.find(({ name }) => name === source)?.query_point;
    if (!found || !model.has_attention || !model.grid) return null;
    const { rows, columns } = model.grid;
    return model.prefix_tokens.length + Math.floor(found[1] * rows) * columns + Math.floor(found[0] * columns);
  }

  /** Starts a request for a pane; returns a function that tells whether it is still the latest. */
  request(one, wanted = null) {
    const mine = (one.turn = (one.turn ?? 0) + 1);
    one.wanted = wanted;  // the address has it already
    this.page.render();
    return () => one.turn === mine && this.page.view.panes.includes(one);
  }

  /** Sets the image of a pane; if both panes shared one image, this pane gets its own state. */
  put(one, source, blob, name) {
    const { view, newImageState, removeUnusedImages } = this.page, before = view.sheets[one.sheet];
    const shared = view.panes.some((other) => other !== one && other.sheet === one.sheet);
    if (shared) one.sheet = newImageState();
    const sheet = view.sheets[one.sheet], awaited = !before.blob && before.source && isOwn(before.source) && isOwn(source);  // a link came without it
    if (shared) sheet.refused = () => { one.sheet = view.sheets.indexOf(before); removeUnusedImages(); };
    if (!shared && before.source && view.ask !== null && view.ask === this.point(before.source)) view.ask = this.point(source);
    one.wanted = null;
    hideBanner();
    sheet.put(source, blob, name, awaited ? before.hide : new Set());
    this.page.render();
  }

  async file(file, one = this.pane) {
    if (!file) return banner(NO_IMAGE);
    const latest = this.request(one), { blob, note } = await fitting(file, this.page.model.limits), key = await keyOf(blob);
    const kept = await remember(key, blob);
    if (!latest()) return;
    this.put(one, own(key), blob, file.name?.replace(/\.\w+$/, "") || "your image");
    if (note) banner(note);
    if (!kept) say("This browser cannot store images: a link will not restore this view.");
  }

  async fetched(source) {
    if (isOwn(source)) return recall(source.slice(4));
    const sample = this.page.samples.find(({ name }) => name === source);
    return sample ? ask(sample.url, { as: "blob", what: "Loading the sample" }) : null;
  }

  async sample(name) {
    const one = this.pane, latest = this.request(one, name), blob = await this.fetched(name).catch(() => null);
    if (!latest()) return;
    if (blob) return this.put(one, name, blob, name);
    one.wanted = null;
    banner("The sample could not be loaded; try again.");
  }

  /** Restores the view of a URL fragment; if it is empty, opens the first sample with its default query. */
  async restore(text) {
    const { view, model, shows, samples, newImageState, newPane, render } = this.page;
    const wanted = readLink(text, model, shows), mine = ++this.restoring;
    if (text.length < 2) wanted.ask = this.point(samples[0]?.name);
    hideBanner();
    view.sheets.forEach((sheet) => sheet.stop());
    document.body.classList.remove("two");
    Object.assign(view, { panes: [], sheets: [], active: 0, hover: null, ask: wanted.ask, paint: wanted.paint, fill: wanted.fill });
    $("panes").replaceChildren();
    for (let i = 0; i < wanted.sources.length; i++) newImageState();
    wanted.panes.forEach(newPane);
    const sheets = [...view.sheets], panes = [...view.panes];
    wanted.sources.forEach(({ source, hide }, i) => Object.assign(sheets[i], { source: source ?? samples[0]?.name ?? null, hide }));
    render();
    await Promise.all(sheets.map(async (sheet, i) => {
      const { source, hide } = sheet;
      if (!source) return;
      const blob = await this.fetched(source).catch(() => null);
      if (mine !== this.restoring || panes.some((one) => one.sheet === i && one.turn)) return;  // a newer request has started
      if (blob) sheet.put(source, blob, isOwn(source) ? "your image" : source, hide);
      else banner(isOwn(source) ? "This link needs an image that is stored in another browser only. Drop the same image here to restore the view." : `There is no sample named “${source}”; choose another or drop an image.`);
    }));
    if (mine === this.restoring) render();
  }

  async camera() {
    if (!navigator.mediaDevices?.getUserMedia) return $("snap").click();
    const one = this.pane;
    try {
      const blob = await takeImage($("camera-box"));
      if (blob) await this.file(new File([blob], "camera.jpg", { type: blob.type }), one);
    } catch { banner("The camera is missing or not permitted for this page."); }
  }

  listen() {
    const { view } = this.page;
    $("open").onclick = () => $("file").click();
    $("camera").onclick = () => this.camera();
    for (const id of ["file", "snap"]) $(id).onchange = ({ target }) => { if (target.files.length) this.file(imageIn(target)); target.value = ""; };
    addEventListener("paste", (event) => { const file = imageIn(event.clipboardData); if (file) { event.preventDefault(); this.file(file); } });
    addEventListener("hashchange", () => this.restore(location.hash));
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
      this.file(imageIn(event.dataTransfer));
    });
    $("samples").replaceChildren(...this.page.samples.map(({ name, url, alt }) => {
      const button = Object.assign(document.createElement("button"), { type: "button", className: "sample", title: alt, onclick: () => this.sample(name) });
      button.dataset.name = name;
      button.append(Object.assign(document.createElement("img"), { src: url, alt, loading: "lazy", width: 64, height: 64 }));
      return button;
    }));
  }

  /** Marks the sample that the active pane shows or is loading. */
  mark(one, sheet) {
    for (const button of $("samples").children) {
      const chosen = button.dataset.name === (one.wanted ?? sheet.source);
      if (chosen && button.getAttribute("aria-pressed") !== "true") {
        const strip = document.querySelector(".sources");
        strip.scrollLeft = button.offsetLeft - strip.offsetLeft - strip.clientWidth / 2 + button.offsetWidth / 2;
      }
      button.setAttribute("aria-pressed", String(chosen));
    }
    const { samples, view } = this.page, seen = samples.filter(({ name }) => view.panes.some((other) => view.sheets[other.sheet].source === name));
    $("credit").textContent = seen.map(({ name, credit }, i) => `${i ? "sample" : "Sample"} “${name}”: ${credit}`).join("; ");
  }
}
