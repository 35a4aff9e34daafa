// The state of one image: its hidden patches and the server's responses so far.

import { bytes, cosine, layerOf, mapOf, partialOf } from "./attention.js";
import { ask, form, latest } from "./server.js";

const SHOWN = 5, KNOWN = 50;  // classes in the bars; classes whose earlier score is remembered
const KEPT = ["source", "blob", "name", "hide", "past", "image", "before", "top", "now", "whole", "kept", "embedding", "distance", "uniform", "grid", "stale", "layers", "maps"];

export class ImageState {
  constructor(model, changed, failed) {
    Object.assign(this, { model, changed, failed, source: null, name: "", blob: null, image: null, fill: "mean" });
    this.hide = new Set();
    this.past = [];  // earlier sets of hidden patches
    this.reset();
    this.predicting = latest((signal) => this.predict(signal), 40);
    this.explaining = latest((signal) => this.explain(signal), 0);
    this.fetching = latest((signal, wanted) => this.fetchMissing(signal, wanted), 30);
  }

  reset() {
    Object.assign(this, { before: null, top: null, now: null, whole: null, kept: null, distance: [], uniform: 0, grid: this.model.grid, stale: true });
    this.layers = new Map();
    this.maps = new Map();
    this.cancelFetch();
    this.failedKeys = new Set();  // what was asked for and refused
  }

  get patches() { return this.grid ? this.grid.rows * this.grid.columns : 0; }
  get values() { return { hide: this.hide.size ? [...this.hide].sort((a, b) => a - b) : undefined, fill: this.hide.size ? this.fill : undefined }; }

  /** Sets another image with these hidden patches. The previous one is kept until the server has accepted this one. */
  put(source, blob, name, hide = new Set()) {
    this.stop();
    if (this.image || !this.last) this.last = Object.fromEntries(KEPT.map((key) => [key, this[key]]));
    Object.assign(this, { source, blob, name, hide: new Set(hide), past: [], image: null });
    this.reset();
    this.send();
  }

  stop() {
    clearTimeout(this.later);
    for (const work of [this.predicting, this.explaining]) work.cancel();
    this.cancelFetch();
  }

  /** Sets the hidden patches. */
  cover(patches, remember = true) {
    if (remember) this.past.push(this.hide);
    this.hide = new Set(patches);
    this.stale = true;
    this.cancelFetch();
    this.send(true);
    this.changed(this);
  }

  undo() {
    if (this.past.length) this.cover(this.past.pop(), false);
  }

  /** Requests the prediction first, then the explanation. */
  send(soon = false) {
    if (!this.blob) return;
    const tell = (error) => this.fail(error);
    this.predicting.start().catch(tell);
    this.explaining.cancel();
    clearTimeout(this.later);
    this.later = setTimeout(() => this.explaining.start().catch(tell), soon ? 220 : 0);
  }

  /** Restores the previous image if the server rejects this one. */
  fail(error) {
    if (!this.image) {
      this.stop();
      Object.assign(this, this.last);
      if (this.blob && this.stale) this.send();
    }
    this.failed(this, error);
  }

  async predict(signal) {
    const found = await this.quick(this.values, signal);
    const whole = this.hide.size && !(this.before ?? this.whole) ? await this.quick({}, signal) : null;  // a link came with them hidden
    if (this.model.num_classes) {
      if (whole) this.remember(whole.predictions);
      this.tell(found.predictions);
    } else {
      this.wholeOnly = !found;
      if (!found) return this.changed(this);
      if (whole || !this.hide.size) this.whole = (whole ?? found).embedding;
      this.embedding = found.embedding;
      this.kept = this.hide.size ? cosine(this.whole, found.embedding) : null;
    }
    this.changed(this);
  }

  async quick(values, signal) {
    const { num_classes } = this.model, top = num_classes ? Math.min(KNOWN, num_classes) : undefined;
    const body = form(this.blob, { ...values, top });
    if (num_classes) return (await ask("/v1/predict", { body, what: "Running the model", signal })).results[0];
    const found = ask("/v1/embed", { body, what: "Running the model", signal });
    return (await found.catch((error) => { if (error.status === 400 && values.hide) return null; throw error; }))?.results[0];
  }

  tell(predictions) {
    if (!this.hide.size) this.remember(predictions);
    this.now = predictions.slice(0, SHOWN);
  }

  /** Stores the predictions without hidden patches. */
  remember(predictions) { Object.assign(this, { before: scores(predictions), top: predictions[0] }); }

  async explain(signal) {
    if (!this.model.methods.length) return this.show(signal);
    const { blob } = this, methods = this.model.methods.includes("rollout") ? ["rollout"] : this.model.methods.slice(0, 1);
    const answer = await ask("/v1/explain", { body: form(blob, { ...this.values, methods }), what: "Running the model", signal });
    const image = this.image ?? (await decodeImage(answer.image));
    if (signal.aborted) return;
    this.layers = new Map();
    this.maps = new Map();
    this.cancelFetch();
    this.failedKeys = new Set();
    if (!this.now && answer.predictions.length) this.tell(answer.predictions);
    Object.assign(this, { image, stale: false, grid: answer.grid ?? this.grid, distance: answer.attention_distance ?? [], uniform: answer.uniform_attention_distance });
    this.take(answer);
    this.changed(this);
  }

  /** For models without explanations: shows the image as the model receives it. */
  async show(signal) {
    const seen = async () => decodeImage((await ask("/v1/preprocess", { body: form(this.blob, {}), what: "Running the model", signal })).image);
    const image = this.image ?? (await seen());
    if (signal.aborted) return;
    Object.assign(this, { image, stale: false });
    this.changed(this);
  }

  take(answer) {
    for (const layer of answer.attention) this.layers.set(layer.layer, layerOf(layer));
    for (const [name, map] of Object.entries(answer.maps)) this.maps.set(name, mapOf(map));
  }

  map(method) { return this.maps.get(method) ?? (this.partial?.method === method ? this.partial.values : null); }

  /** Requests missing layers and maps, one at a time; cancels a request that is no longer needed. */
  want(wants) {
    const key = ({ layer, method }) => layer ?? method, has = ({ layer, method }) => (layer ? this.layers.has(layer) : this.maps.has(method));
    if (this.wanted && !wants.some((one) => key(one) === key(this.wanted))) this.cancelFetch();
    const next = wants.find((one) => !has(one) && !this.failedKeys.has(key(one)));
    if (!next || this.wanted || !this.image || this.stale) return;
    this.cancelFetch();
    const mine = (this.wanted = next), ended = () => { if (this.wanted === mine) this.wanted = null; };
    this.fetching.start(mine).finally(ended).catch((error) => { this.failedKeys.add(key(mine)); this.partial = null; this.fail(error); });
  }

  /** Cancels the running request and drops its partial result. */
  cancelFetch() {
    this.fetching?.cancel();
    Object.assign(this, { wanted: null, partial: null, stopped: null });
  }

  /** Stops the running request but keeps its partial result, until resume(). */
  stopFetching() {
    if (!this.wanted) return;
    const { wanted: { method }, partial } = this;
    this.cancelFetch();
    Object.assign(this, { partial, stopped: method });
    this.failedKeys.add(method);
    this.changed(this);
  }

  /** Allows a map that was stopped or failed to be requested again. */
  resume(method) {
    if (this.failedKeys.delete(method) && this.stopped === method) this.cancelFetch();
  }

  async fetchMissing(signal, { layer, method }) {
    const values = { ...this.values, layers: layer ? [layer] : [], methods: method ? [method] : [] };
    const what = method ? `Computing ${method}` : `Loading layer ${layer}`;
    const partial = method && ((found) => this.grow(signal, method, found[method]));
    const answer = await ask("/v1/explain", { body: form(this.blob, values), what, signal, partial });
    if (signal.aborted || this.stale) return;
    this.take(answer);
    this.partial = this.wanted = null;
    this.changed(this);
  }

  /** Stores a partial map. */
  grow(signal, method, map) {
    const { done, total } = map;
    if (signal.aborted || this.stale) return null;
    this.partial = { method, values: partialOf(map), done, total };
    this.changed(this);
    return { done, total };
  }
}

const scores = (predictions) => new Map(predictions.map((p) => [p.index, p.score]));

async function decodeImage(url) {
  const [kind, data] = url.split(";base64,");
  return createImageBitmap(new Blob([bytes(data)], { type: kind.replace("data:", "") }));
}
