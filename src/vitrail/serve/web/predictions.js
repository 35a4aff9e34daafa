// The predictions panel: the most likely classes as bars, updated while patches are hidden.

import { cosine } from "./attention.js";
import { change, percent, short, tidy } from "./formatting.js";

const ROW = 44;  // pixels between two bars
const MANY = 5, FEW = 3;  // bars for one image, and for each of two

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function named(tag, className, label) {
  const made = element(tag, className, tidy(label));
  return Object.assign(made, { title: label, dir: "auto" });
}

/** One line per image for small screens: the top class, its probability and the change caused by the hidden patches. */
export function drawVerdict(root, sheets, model) {
  root.replaceChildren(...sheets.map((sheet, i) => {
    const line = element("p", "line"), [best] = sheet.now ?? [], before = sheet.hide.size && best ? sheet.before?.get(best.index) : undefined;
    if (sheets.length > 1) line.append(element("b", "letter", "AB"[i]));
    if (!model.num_classes) line.append(element("span", "best", sheet.kept === null ? "Features" : `Cosine ${sheet.kept.toFixed(3)}`));
    if (!best) return line;
    line.append(named("span", "best", best.label), element("span", "share", percent(best.score)));
    if (before !== undefined) {
      line.append(element("span", "shift", change(best.score, before) || "±0"));
      line.lastChild.append(element("span", "unit", " points"));
    }
    if (before !== undefined && sheet.top && sheet.top.index !== best.index) line.append(element("span", "was", "was"), named("span", "best was", sheet.top.label));
    return line;
  }));
}

/** One block of predictions per image. */
export class Predictions {
  constructor(root) { this.root = root; this.blocks = []; }

  show(sheets, model) {
    while (this.blocks.length > sheets.length) this.blocks.pop().root.remove();
    while (this.blocks.length < sheets.length) {
      const block = new Block();
      this.blocks.push(block);
      this.root.append(block.root);
    }
    sheets.forEach((sheet, i) => this.blocks[i].show(sheet, model, sheets.length > 1 ? "AB"[i] : "", sheets[0]));
  }
}

class Block {
  constructor() {
    this.root = element("div", "block");
    this.letter = element("p", "letter");
    this.label = Object.assign(element("h2", "label"), { dir: "auto" });
    this.score = element("p", "score");
    this.bars = element("ol", "bars");
    this.note = element("p", "note");
    this.rows = new Map();
    this.root.append(this.letter, this.label, this.score, this.bars, this.note);
  }

  show(sheet, model, letter, first) {
    this.letter.textContent = letter;
    this.letter.hidden = !letter;
    this.root.classList.toggle("old", sheet.now === null && Boolean(model.num_classes));
    this.bars.hidden = !model.num_classes;
    if (!model.num_classes) return this.features(sheet, letter, first);
    const best = sheet.now?.[0];
    this.label.textContent = best ? tidy(best.label) : sheet.blob ? "…" : "";
    this.label.title = best?.label ?? "";
    this.score.textContent = best ? percent(best.score) : "";
    this.draw(sheet, letter ? FEW : MANY);
    this.note.textContent = sheet.hide.size ? "Ticks: scores with no patch hidden." : best && !letter ? known(model) : "";
  }

  draw(sheet, count) {
    const now = (sheet.now ?? []).slice(0, count), seen = new Set();
    now.forEach((prediction, place) => {
      seen.add(prediction.index);
      const row = this.rows.get(prediction.index) ?? this.row(prediction, place);
      const before = sheet.hide.size ? sheet.before?.get(prediction.index) : undefined;
      row.root.style.transform = `translateY(${place * ROW}px)`;
      row.fill.style.transform = `scaleX(${prediction.score})`;
      row.much.textContent = percent(prediction.score);
      row.tick.hidden = before === undefined;
      row.tick.style.left = `${100 * (before ?? 0)}%`;
      row.change.textContent = before === undefined ? "" : change(prediction.score, before);
      row.root.classList.toggle("first", place === 0);
      this.bars.append(row.root);
    });
    for (const [index, row] of this.rows) {
      if (seen.has(index)) continue;
      row.root.remove();
      this.rows.delete(index);
    }
    this.bars.style.height = `${now.length * ROW}px`;
  }

  row({ label, index }, place) {
    const root = element("li", "bar"), who = named("span", "who", label), track = element("span", "track");
    const fill = element("span", "fill"), tick = element("span", "tick"), much = element("span", "much"), change = element("span", "change");
    track.append(fill, tick);
    root.append(who, change, much, track);
    root.style.transform = `translateY(${place * ROW}px)`;
    const row = { root, fill, tick, much, change };
    this.rows.set(index, row);
    return row;
  }

  /** A model without classes: the cosine similarity of its features. */
  features(sheet, letter, first) {
    const pair = letter === "B" && first.embedding && sheet.embedding;
    const alike = pair ? cosine(first.embedding, sheet.embedding) : sheet.kept;
    this.label.textContent = alike === null ? "Features" : `Cosine ${alike.toFixed(3)}`;
    this.score.textContent = "";
    const whole = "This model has no classification head: it outputs features. Hide patches or compare two images to see how they change.";
    this.note.textContent = sheet.wholeOnly && sheet.hide.size ? "This server computes features of whole images only." : alike === null ? whole : `Cosine similarity of the features ${pair ? "of both images" : "with and without the hidden patches"}.`;
  }
}

/** The note below the bars: the number of classes, with their names if there are at most 12. */
function known({ num_classes, labels, multi_label }) {
  if (multi_label) return "Multi-label: each class has its own probability.";
  const names = labels && num_classes <= 12 ? `: ${labels.map((label) => short(label.split(",")[0] || tidy(label), 24)).join(", ")}` : "";
  return `Most likely of the ${num_classes.toLocaleString("en")} classes${names}.`;
}

/** One sentence for a screen reader. */
export function spoken(sheet) {
  if (!sheet.now) return "";
  const [best, next] = sheet.now, part = (p) => `${short(tidy(p.label))}, ${Math.round(100 * p.score)} percent`;
  const hidden = sheet.hide.size ? `With ${sheet.hide.size} ${sheet.hide.size === 1 ? "patch" : "patches"} hidden: ` : "";
  return `${hidden}${part(best)}${next ? `; then ${part(next)}` : ""}.`;
}
