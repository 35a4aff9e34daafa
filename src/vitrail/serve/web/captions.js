// What a pane shows, in words: its name, what it means, who looks where, how bright is how much.

import { covered, isPartial, largest, lost, scale, sideOf } from "./attention.js";
import { capital, percent, points, short, tidy } from "./formatting.js";

export const NAMES = { attention: "Attention", rollout: "Rollout", gradient: "Gradient", occlusion: "Occlusion", pool: "Pool", plain: "Image" };

/** For those who rest on a button. */
export const TIPS = {
  attention: "What one patch gathers from, in one layer",
  rollout: "Attention through all layers: how much of each patch reaches the answer",
  gradient: "Attention through all layers, weighed by what speaks for the class",
  occlusion: "Squares are covered in turn: what does the class lose?",
  pool: "Where the attention pool looks",
  plain: "The image as the model gets it",
};

export const place = (patch, { columns }) => `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;

/** What occlusion covers with a patch; where squares overlap, the patch alone, for its value is that of none of them. */
export function squareAt(patch, grid) {
  const { down, right, count } = covered(patch, grid), span = (name, [first, last]) => (first === last ? `${name} ${first + 1}` : `${name}s ${first + 1} and ${last + 1}`);
  return count > 1 ? place(patch, grid) : `${span("row", down)}, ${span("column", right)}`;
}

export function titleOf({ show, layer, head }, model) {
  if (show !== "attention") return NAMES[show];
  return `Layer ${layer}, ${head ? `head ${head}` : model.num_heads > 1 ? "all heads" : "its head"}`;
}

/** Who asks: a token's number, or null for whatever the head reads. */
export function whoAsks(from, model, grid) {
  if (from === null) return model.pool === "token" ? (model.prefix_tokens.length === 1 ? "the class token" : "what the head reads") : "the mean of all patches";
  return from < model.prefix_tokens.length ? `the ${model.prefix_tokens[from]} token` : place(from - model.prefix_tokens.length, grid);
}

/** One line below the image: what light means here; names have `most` letters. */
export function meaning({ show, head }, sheet, model, from, most = 28) {
  const [best] = sheet.now ?? [], named = best ? `“${short(tidy(best.label), most)}”` : "the class", side = sideOf(model.grid);
  if (show === "attention") {
    const who = from !== null && from >= model.prefix_tokens.length ? "the framed patch" : whoAsks(from, model, model.grid);
    return `What ${who} attends to${head ? ` in head ${head}` : ""}.`;
  }
  return {
    rollout: "How much of each patch reaches the answer.",
    gradient: `Attention through all layers, for ${named}.`,
    occlusion: `What ${named} loses by covering ${side > 1 ? `${side} × ${side} patches` : "a patch"}.`,
    pool: "Where the attention pool looks.",
    plain: "The image as the model gets it.",
  }[show];
}

/** What is dark and what is full light, for the scale beside it; null where there is none. */
export function legend(show, values) {
  if (!values) return null;
  const { low, high, most } = scale(show === "occlusion" ? lost(values) : values), share = (value) => (value <= 0 ? "0" : percent(value)), more = most > high ? "≥ " : "";
  if (show === "gradient") return ["least", "most"];
  if (show === "occlusion") return [low > 0 ? points(low) : "≤ 0", more + points(high)];
  return [share(low), more + share(high)];
}

/** The numbers behind what is seen, in a sentence. */
export function sentence({ show }, sheet, model, { values, row, from, hover }) {
  if (!sheet.image || !sheet.grid) return "";
  if (!model.methods.length) return "This server runs an exported file: it predicts, and cannot be looked into.";
  if (show === "plain") return model.has_attention ? `${model.image_size.width} × ${model.image_size.height} pixels.` : "This model has convolutions and no attention to look at; occlusion shows what it needs.";
  const stopped = sheet.stopped === show ? `Stopped${sheet.partial ? ` at ${sheet.partial.done} of ${sheet.partial.total} squares` : ""}; choose ${NAMES[show]} to start again. ` : "";
  if (!values) return stopped;
  if (show !== "attention") return stopped + valueOf(show, values, hover ?? largest(values), hover === null, sheet.grid);
  const special = model.prefix_tokens.length, best = largest(values), token = largest(row.subarray(0, special)), me = from ?? (whoAsks(null, model, sheet.grid) === "the class token" ? 0 : null);
  const where = me === best + special ? "itself" : place(best, sheet.grid), much = (at) => `(${percent(row[at])})`;
  const corner = me === best + special ? "" : cornered(best, sheet.grid);
  const who = capital(whoAsks(from, model, sheet.grid));
  if (special && row[token] > values[best]) {
    const whom = me === token ? "itself" : `the ${model.prefix_tokens[token]} token`;
    return `${who} looks most at ${whom} ${much(token)}, then at ${where} ${much(best + special)}.${corner}`;
  }
  return `${who} looks most at ${where} ${much(best + special)}.${corner}`;
}

/** Seen with many networks: in late layers a corner gets more than its due in every image. */
function cornered(patch, { rows, columns }) {
  const [row, column] = [Math.floor(patch / columns), patch % columns];
  const corner = (row === 0 || row === rows - 1) && (column === 0 || column === columns - 1);
  return corner ? " Corners often draw attention, whatever is on them." : "";
}

function valueOf(show, values, patch, best, grid) {
  const value = values[patch], top = largest(values), most = values[top];
  if (show === "occlusion") {
    const where = squareAt(patch, grid), { count } = covered(patch, grid), much = `${points(Math.abs(value))} points ${value < 0 ? "won" : "lost"}`;
    if (Number.isNaN(value)) return `${capital(where)}: not computed yet.`;
    return `${best ? `Most ${isPartial(values) ? "so far " : ""}at ${where}` : capital(where)}: ${much} ${count > 1 ? `on average when one of the ${count} squares with it is` : "when"} covered.`;
  }
  const where = place(patch, grid), corner = patch === top && most > 0 ? cornered(patch, grid) : "";
  if (show !== "gradient") return `${best ? `Most at ${where}` : capital(where)}: ${percent(Math.max(value, 0))}.${corner}`;
  if (best) return most > 0 ? `Most at ${where}.${corner}` : "Nothing speaks for it anywhere.";
  if (patch === top && most > 0) return `${capital(where)}: the most of all.${corner}`;
  return `${capital(where)}: ${most > 0 ? (value / most).toFixed(2) : "0"} of the most.`;
}

/** What pointing tells. */
const POINTING = {
  attention: "see what it attends to",
  rollout: "see its share",
  gradient: "see its weight",
  occlusion: "see its worth",
  pool: "see its share",
};

/** What can be done here, above the image. */
export function invitation({ show, model, mode, touch, compared }) {
  if (compared) return `The controls are for ${compared}: give it another layer, map or image.`;
  const watch = `, and watch the ${model.num_classes ? "prediction" : "features"} change.`, square = show === "occlusion" && sideOf(model.grid) > 1;
  const what = POINTING[show], one = square ? "a square" : "a patch", it = square ? "a patch" : "it";
  if (mode === "hide" && (touch || !what)) return `${touch ? "Tap" : "Click"} patches to hide them${watch}`;
  if (!what) return touch ? `Press long on a patch to hide it${watch}` : `Shift and click a patch to hide it${watch}`;
  if (touch) return `Tap ${one} to ${what}. Press long to hide ${it}.`;
  if (mode === "hide") return `Point at ${one} to ${what}. Click to hide ${it}.`;
  return show === "attention" ? "Click a patch to keep seeing what it attends to. Shift and click hides it." : `Point at ${one} to ${what}. Shift and click hides ${it}.`;
}
