// The predictions panel: the most likely classes as bars, updated while patches are hidden.

import { cosine } from "./attention.js";
import { change, displayLabel, percent, truncate } from "./formatting.js";

const ROW_HEIGHT = 44;  // pixels from one bar to the next
const MAX_BARS = 5, MAX_BARS_COMPARED = 3;  // bars for one image, and for each of two

function element(name, className, text = "") {
  const created = document.createElement(name);
  created.className = className;
  created.textContent = text;
  return created;
}

/** An element with a class label, truncated by CSS; the tooltip has the full label. */
function classElement(tag, className, label) {
  const created = element(tag, className, displayLabel(label));
  return Object.assign(created, { title: label, dir: "auto" });
}

/** One line per image for small screens: the top class, its probability and the change caused by the hidden patches. */
export function drawCompactPredictions(root, states, model) {
  root.replaceChildren(...states.map((state, i) => {
    const line = element("p", "prediction-line"), [topClass] = state.predictions ?? [], baseline = state.hiddenPatches.size && topClass ? state.baselineScores?.get(topClass.index) : undefined;
    if (states.length > 1) line.append(element("b", "pane-letter", "AB"[i]));
    if (!model.num_classes) line.append(element("span", "top-class", state.similarity === null ? "Features" : `Cosine ${state.similarity.toFixed(3)}`));
    if (!topClass) return line;
    line.append(classElement("span", "top-class", topClass.label), element("span", "probability", percent(topClass.score)));
    if (baseline !== undefined) {
      line.append(element("span", "probability-change", change(topClass.score, baseline) || "±0"));
      line.lastChild.append(element("span", "unit", " points"));
    }
    if (baseline !== undefined && state.baselineTop && state.baselineTop.index !== topClass.index) line.append(element("span", "previous-class", "was"), classElement("span", "top-class previous-class", state.baselineTop.label));
    return line;
  }));
}

/** One block of predictions per image. */
export class Predictions {
  constructor(root) { this.root = root; this.blocks = []; }

  update(states, model) {
    while (this.blocks.length > states.length) this.blocks.pop().root.remove();
    while (this.blocks.length < states.length) {
      const block = new PredictionBlock();
      this.blocks.push(block);
      this.root.append(block.root);
    }
    states.forEach((state, i) => this.blocks[i].update(state, model, states.length > 1 ? "AB"[i] : "", states[0]));
  }
}

class PredictionBlock {
  constructor() {
    this.root = element("div", "prediction-block");
    this.letter = element("p", "pane-letter");
    this.label = Object.assign(element("h2", "label"), { dir: "auto" });
    this.score = element("p", "score");
    this.bars = element("ol", "bars");
    this.note = element("p", "note");
    this.rows = new Map();
    this.root.append(this.letter, this.label, this.score, this.bars, this.note);
  }

  update(state, model, letter, firstState) {
    this.letter.textContent = letter;
    this.letter.hidden = !letter;
    this.root.classList.toggle("outdated", state.predictions === null && Boolean(model.num_classes));
    this.bars.hidden = !model.num_classes;
    if (!model.num_classes) return this.drawFeatures(state, letter, firstState);
    const topClass = state.predictions?.[0];
    this.label.textContent = topClass ? displayLabel(topClass.label) : state.blob ? "…" : "";
    this.label.title = topClass?.label ?? "";
    this.score.textContent = topClass ? percent(topClass.score) : "";
    this.drawBars(state, letter ? MAX_BARS_COMPARED : MAX_BARS);
    this.note.textContent = state.hiddenPatches.size ? "Ticks: scores with no patch hidden." : topClass && !letter ? classesNote(model) : "";
  }

  drawBars(state, count) {
    const predictions = (state.predictions ?? []).slice(0, count), shownClasses = new Set();
    predictions.forEach((prediction, rank) => {
      shownClasses.add(prediction.index);
      const row = this.rows.get(prediction.index) ?? this.addRow(prediction, rank);
      const baseline = state.hiddenPatches.size ? state.baselineScores?.get(prediction.index) : undefined;
      row.root.style.transform = `translateY(${rank * ROW_HEIGHT}px)`;
      row.fill.style.transform = `scaleX(${prediction.score})`;
      row.probability.textContent = percent(prediction.score);
      row.tick.hidden = baseline === undefined;
      row.tick.style.left = `${100 * (baseline ?? 0)}%`;
      row.change.textContent = baseline === undefined ? "" : change(prediction.score, baseline);
      row.root.classList.toggle("highest", rank === 0);
      this.bars.append(row.root);
    });
    for (const [index, row] of this.rows) {
      if (shownClasses.has(index)) continue;
      row.root.remove();
      this.rows.delete(index);
    }
    this.bars.style.height = `${predictions.length * ROW_HEIGHT}px`;
  }

  addRow({ label, index }, rank) {
    const root = element("li", "bar"), className = classElement("span", "class-name", label), track = element("span", "track");
    const fill = element("span", "fill"), tick = element("span", "tick"), probability = element("span", "probability"), change = element("span", "change");
    track.append(fill, tick);
    root.append(className, change, probability, track);
    root.style.transform = `translateY(${rank * ROW_HEIGHT}px)`;
    const row = { root, fill, tick, probability, change };
    this.rows.set(index, row);
    return row;
  }

  /** A model without classes: the cosine similarity of its features. */
  drawFeatures(state, letter, firstState) {
    const isPair = letter === "B" && firstState.embedding && state.embedding;
    const similarity = isPair ? cosine(firstState.embedding, state.embedding) : state.similarity;
    this.label.textContent = similarity === null ? "Features" : `Cosine ${similarity.toFixed(3)}`;
    this.score.textContent = "";
    const defaultNote = "This model has no classification head: it outputs features. Hide patches or compare two images to see how they change.";
    this.note.textContent = state.wholeImagesOnly && state.hiddenPatches.size ? "This server computes features of whole images only." : similarity === null ? defaultNote : `Cosine similarity of the features ${isPair ? "of both images" : "with and without the hidden patches"}.`;
  }
}

/** The note below the bars: the number of classes, with their names if there are at most 12. */
function classesNote({ num_classes, labels, multi_label }) {
  if (multi_label) return "Multi-label: each class has its own probability.";
  const names = labels && num_classes <= 12 ? `: ${labels.map((label) => truncate(label.split(",")[0] || displayLabel(label), 24)).join(", ")}` : "";
  return `Most likely of the ${num_classes.toLocaleString("en")} classes${names}.`;
}

/** One sentence for a screen reader. */
export function describePredictions(state) {
  if (!state.predictions) return "";
  const [topClass, second] = state.predictions, formatClass = (p) => `${truncate(displayLabel(p.label))}, ${Math.round(100 * p.score)} percent`;
  const hiddenText = state.hiddenPatches.size ? `With ${state.hiddenPatches.size} ${state.hiddenPatches.size === 1 ? "patch" : "patches"} hidden: ` : "";
  return `${hiddenText}${formatClass(topClass)}${second ? `; then ${formatClass(second)}` : ""}.`;
}
