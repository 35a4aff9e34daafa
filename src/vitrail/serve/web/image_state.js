// The state of one image: its hidden patches and the server's responses so far.

import { cosine, decodeBytes, parseLayer, parseMap, parsePartialMap } from "./attention.js";
import { imageForm, latest, request } from "./server.js";

const NUM_BARS = 5, NUM_SCORES = 50;  // classes shown as bars; classes whose baseline score is stored
const RESTORED_FIELDS = ["source", "blob", "name", "hiddenPatches", "undoStack", "image", "baselineScores", "baselineTop", "predictions", "baselineEmbedding", "similarity", "embedding", "distance", "uniformDistance", "grid", "stale", "layers", "maps"];

export class ImageState {
  constructor(model, onChange, onError) {
    Object.assign(this, { model, onChange, onError, source: null, name: "", blob: null, image: null, fill: "mean" });
    this.hiddenPatches = new Set();
    this.undoStack = [];  // earlier sets of hidden patches
    this.reset();
    this.predictTask = latest((signal) => this.predict(signal), 40);
    this.explainTask = latest((signal) => this.explain(signal), 0);
    this.fetchTask = latest((signal, needed) => this.fetchMissing(signal, needed), 30);
  }

  reset() {
    Object.assign(this, { baselineScores: null, baselineTop: null, predictions: null, baselineEmbedding: null, similarity: null, distance: [], uniformDistance: 0, grid: this.model.grid, stale: true });
    this.layers = new Map();
    this.maps = new Map();
    this.cancelFetch();
    this.failedKeys = new Set();  // layers and methods whose request failed
  }

  /** Number of patches. */
  get patches() { return this.grid ? this.grid.rows * this.grid.columns : 0; }
  /** Form fields of every request. */
  get parameters() { return { hide: this.hiddenPatches.size ? [...this.hiddenPatches].sort((a, b) => a - b) : undefined, fill: this.hiddenPatches.size ? this.fill : undefined }; }

  /** Sets another image with these hidden patches. The previous one is kept until the server has accepted this one. */
  setImage(source, blob, name, hiddenPatches = new Set()) {
    this.cancelAll();
    if (this.image || !this.previous) this.previous = Object.fromEntries(RESTORED_FIELDS.map((key) => [key, this[key]]));
    Object.assign(this, { source, blob, name, hiddenPatches: new Set(hiddenPatches), undoStack: [], image: null });
    this.reset();
    this.refresh();
  }

  cancelAll() {
    clearTimeout(this.explainTimer);
    for (const task of [this.predictTask, this.explainTask]) task.cancel();
    this.cancelFetch();
  }

  /** Sets the hidden patches and updates the prediction and the explanation. */
  setHidden(patches, undoable = true) {
    if (undoable) this.undoStack.push(this.hiddenPatches);
    this.hiddenPatches = new Set(patches);
    this.stale = true;
    this.cancelFetch();
    this.refresh(true);
    this.onChange(this);
  }

  undo() {
    if (this.undoStack.length) this.setHidden(this.undoStack.pop(), false);
  }

  /** Requests the prediction first, then the explanation. */
  refresh(delayed = false) {
    if (!this.blob) return;
    const onError = (error) => this.handleError(error);
    this.predictTask.start().catch(onError);
    this.explainTask.cancel();
    clearTimeout(this.explainTimer);
    this.explainTimer = setTimeout(() => this.explainTask.start().catch(onError), delayed ? 220 : 0);
  }

  /** Restores the previous image if the server rejects this one. */
  handleError(error) {
    if (!this.image) {
      this.cancelAll();
      Object.assign(this, this.previous);
      if (this.blob && this.stale) this.refresh();
    }
    this.onError(this, error);
  }

  async predict(signal) {
    const result = await this.requestOutput(this.parameters, signal);
    const baseline = this.hiddenPatches.size && !(this.baselineScores ?? this.baselineEmbedding) ? await this.requestOutput({}, signal) : null;  // opened from a link with hidden patches
    if (this.model.num_classes) {
      if (baseline) this.setBaseline(baseline.predictions);
      this.setPredictions(result.predictions);
    } else {
      this.wholeImagesOnly = !result;
      if (!result) return this.onChange(this);
      if (baseline || !this.hiddenPatches.size) this.baselineEmbedding = (baseline ?? result).embedding;
      this.embedding = result.embedding;
      this.similarity = this.hiddenPatches.size ? cosine(this.baselineEmbedding, result.embedding) : null;
    }
    this.onChange(this);
  }

  async requestOutput(parameters, signal) {
    const { num_classes } = this.model, top = num_classes ? Math.min(NUM_SCORES, num_classes) : undefined;
    const body = imageForm(this.blob, { ...parameters, top });
    if (num_classes) return (await request("/v1/predict", { body, description: "Running the model", signal })).results[0];
    const result = request("/v1/embed", { body, description: "Running the model", signal });
    return (await result.catch((error) => { if (error.status === 400 && parameters.hide) return null; throw error; }))?.results[0];
  }

  setPredictions(predictions) {
    if (!this.hiddenPatches.size) this.setBaseline(predictions);
    this.predictions = predictions.slice(0, NUM_BARS);
  }

  /** Stores the predictions without hidden patches. */
  setBaseline(predictions) { Object.assign(this, { baselineScores: scores(predictions), baselineTop: predictions[0] }); }

  async explain(signal) {
    if (!this.model.methods.length) return this.loadInput(signal);
    const { blob } = this, methods = this.model.methods.includes("rollout") ? ["rollout"] : this.model.methods.slice(0, 1);
    const response = await request("/v1/explain", { body: imageForm(blob, { ...this.parameters, methods }), description: "Running the model", signal });
    const image = this.image ?? (await decodeImage(response.image));
    if (signal.aborted) return;
    this.layers = new Map();
    this.maps = new Map();
    this.cancelFetch();
    this.failedKeys = new Set();
    if (!this.predictions && response.predictions.length) this.setPredictions(response.predictions);
    Object.assign(this, { image, stale: false, grid: response.grid ?? this.grid, distance: response.attention_distance ?? [], uniformDistance: response.uniform_attention_distance });
    this.addResults(response);
    this.onChange(this);
  }

  /** For models without explanations: shows the image as the model receives it. */
  async loadInput(signal) {
    const fetchInput = async () => decodeImage((await request("/v1/preprocess", { body: imageForm(this.blob, {}), description: "Running the model", signal })).image);
    const image = this.image ?? (await fetchInput());
    if (signal.aborted) return;
    Object.assign(this, { image, stale: false });
    this.onChange(this);
  }

  /** Stores the layers and maps of a response. */
  addResults(response) {
    for (const layer of response.attention) this.layers.set(layer.layer, parseLayer(layer));
    for (const [name, map] of Object.entries(response.maps)) this.maps.set(name, parseMap(map));
  }

  mapValues(method) { return this.maps.get(method) ?? (this.partial?.method === method ? this.partial.values : null); }

  /** Requests missing layers and maps, one at a time; cancels a request that is no longer needed. */
  fetchNeeded(needs) {
    const key = ({ layer, method }) => layer ?? method, isLoaded = ({ layer, method }) => (layer ? this.layers.has(layer) : this.maps.has(method));
    if (this.currentFetch && !needs.some((need) => key(need) === key(this.currentFetch))) this.cancelFetch();
    const next = needs.find((need) => !isLoaded(need) && !this.failedKeys.has(key(need)));
    if (!next || this.currentFetch || !this.image || this.stale) return;
    this.cancelFetch();
    const current = (this.currentFetch = next), onEnd = () => { if (this.currentFetch === current) this.currentFetch = null; };
    this.fetchTask.start(current).finally(onEnd).catch((error) => { this.failedKeys.add(key(current)); this.partial = null; this.handleError(error); });
  }

  /** Cancels the running request and drops its partial result. */
  cancelFetch() {
    this.fetchTask?.cancel();
    Object.assign(this, { currentFetch: null, partial: null, stoppedMethod: null });
  }

  /** Stops the running request but keeps its partial result, until resume(). */
  stopFetch() {
    if (!this.currentFetch) return;
    const { currentFetch: { method }, partial } = this;
    this.cancelFetch();
    Object.assign(this, { partial, stoppedMethod: method });
    this.failedKeys.add(method);
    this.onChange(this);
  }

  /** Allows a map that was stopped or failed to be requested again. */
  resume(method) {
    if (this.failedKeys.delete(method) && this.stoppedMethod === method) this.cancelFetch();
  }

  async fetchMissing(signal, { layer, method }) {
    const parameters = { ...this.parameters, layers: layer ? [layer] : [], methods: method ? [method] : [] };
    const description = method ? `Computing ${method}` : `Loading layer ${layer}`;
    const partial = method && ((result) => this.addPartialMap(signal, method, result[method]));
    const response = await request("/v1/explain", { body: imageForm(this.blob, parameters), description, signal, partial });
    if (signal.aborted || this.stale) return;
    this.addResults(response);
    this.partial = this.currentFetch = null;
    this.onChange(this);
  }

  /** Stores a partial map. */
  addPartialMap(signal, method, map) {
    const { done, total } = map;
    if (signal.aborted || this.stale) return null;
    this.partial = { method, values: parsePartialMap(map), done, total };
    this.onChange(this);
    return { done, total };
  }
}

const scores = (predictions) => new Map(predictions.map((p) => [p.index, p.score]));

async function decodeImage(url) {
  const [kind, data] = url.split(";base64,");
  return createImageBitmap(new Blob([decodeBytes(data)], { type: kind.replace("data:", "") }));
}
