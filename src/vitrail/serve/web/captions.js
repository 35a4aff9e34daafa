// The texts around a pane: title, caption, hint, values in a sentence, ends of the color scale.

import { covered, isPartial, largest, positivePart, scale, sideOf } from "./attention.js";
import { capital, percent, points, short, tidy } from "./formatting.js";

export const NAMES = { attention: "Attention", rollout: "Rollout", gradient: "Gradient", occlusion: "Occlusion", pool: "Pool", plain: "Image" };

/** Tooltips of the buttons. */
export const TIPS = {
  attention: "Attention weights of one query patch in one layer",
  rollout: "Attention rollout: attention multiplied through all layers",
  gradient: "Gradient-weighted attention for the top class, through all layers",
  occlusion: "Drop in the top class's probability when a square is occluded",
  pool: "Attention weights of the pooling head",
  plain: "The image as the model receives it",
};

export const place = (patch, { columns }) => `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;

/** The occluded square that contains a patch; the patch itself where squares overlap, because its value is their mean. */
export function squareAt(patch, grid) {
  const { down, right, count } = covered(patch, grid), span = (name, [first, last]) => (first === last ? `${name} ${first + 1}` : `${name}s ${first + 1} and ${last + 1}`);
  return count > 1 ? place(patch, grid) : `${span("row", down)}, ${span("column", right)}`;
}

export function titleOf({ show, layer, head }, model) {
  if (show !== "attention") return NAMES[show];
  return `Layer ${layer}, ${head ? `head ${head}` : model.num_heads > 1 ? "all heads" : "its head"}`;
}

/** Describes the query: a token's index, or null for the input of the head. */
export function describeQuery(from, model, grid) {
  if (from === null) return model.pool === "token" ? (model.prefix_tokens.length === 1 ? "the class token" : "the head input") : "the mean of all patches";
  return from < model.prefix_tokens.length ? `the ${model.prefix_tokens[from]} token` : place(from - model.prefix_tokens.length, grid);
}

/** The caption below the image: what is shown. Class names are cut to `most` characters. */
export function meaning({ show, head }, sheet, model, from, most = 28) {
  const [best] = sheet.now ?? [], named = best ? `“${short(tidy(best.label), most)}”` : "the class", side = sideOf(model.grid);
  if (show === "attention") {
    const who = from !== null && from >= model.prefix_tokens.length ? "the framed patch" : describeQuery(from, model, model.grid);
    return `Attention of ${who}${head ? `, head ${head}` : ""}.`;
  }
  return {
    rollout: "Contribution of each patch to the output.",
    gradient: `Gradient-weighted attention for ${named}.`,
    occlusion: `Drop in ${named} when ${side > 1 ? `${side} × ${side} patches are` : "a patch is"} occluded.`,
    pool: "Attention of the pooling head.",
    plain: "The image as the model receives it.",
  }[show];
}

/** The labels at both ends of the color scale; null without values. */
export function legend(show, values) {
  if (!values) return null;
  const { low, high, most } = scale(show === "occlusion" ? positivePart(values) : values), share = (value) => (value <= 0 ? "0" : percent(value)), more = most > high ? "≥ " : "";
  if (show === "gradient") return ["min", "max"];
  if (show === "occlusion") return [low > 0 ? points(low) : "≤ 0", more + points(high)];
  return [share(low), more + share(high)];
}

/** The values at the query, the pointer or the maximum, in a sentence. */
export function sentence({ show }, sheet, model, { values, row, from, hover }) {
  if (!sheet.image || !sheet.grid) return "";
  if (!model.methods.length) return "This is an exported model: it gives predictions but no explanations.";
  if (show === "plain") return model.has_attention ? `${model.image_size.width} × ${model.image_size.height} pixels.` : "This model is convolutional and has no attention; use occlusion.";
  const stopped = sheet.stopped === show ? `Stopped${sheet.partial ? ` at ${sheet.partial.done} of ${sheet.partial.total} squares` : ""}; choose ${NAMES[show]} to start again. ` : "";
  if (!values) return stopped;
  if (show !== "attention") return stopped + valueOf(show, values, hover ?? largest(values), hover === null, sheet.grid);
  const special = model.prefix_tokens.length, best = largest(values), token = largest(row.subarray(0, special)), me = from ?? (describeQuery(null, model, sheet.grid) === "the class token" ? 0 : null);
  const where = me === best + special ? "itself" : place(best, sheet.grid), much = (at) => `(${percent(row[at])})`;
  const corner = me === best + special ? "" : cornered(best, sheet.grid);
  const who = capital(describeQuery(from, model, sheet.grid));
  if (special && row[token] > values[best]) {
    const whom = me === token ? "itself" : `the ${model.prefix_tokens[token]} token`;
    return `${who} attends most to ${whom} ${much(token)}, then to ${where} ${much(best + special)}.${corner}`;
  }
  return `${who} attends most to ${where} ${much(best + special)}.${corner}`;
}

/** A remark for corner patches: in late layers of many models they receive high attention in every image. */
function cornered(patch, { rows, columns }) {
  const [row, column] = [Math.floor(patch / columns), patch % columns];
  const corner = (row === 0 || row === rows - 1) && (column === 0 || column === columns - 1);
  return corner ? " Corners often receive high attention, whatever they show." : "";
}

function valueOf(show, values, patch, best, grid) {
  const value = values[patch], top = largest(values), most = values[top];
  if (show === "occlusion") {
    const where = squareAt(patch, grid), { count } = covered(patch, grid), much = `probability ${value < 0 ? "rises" : "drops"} ${points(Math.abs(value))} points`;
    if (Number.isNaN(value)) return `${capital(where)}: not computed yet.`;
    return `${best ? `Maximum ${isPartial(values) ? "so far " : ""}at ${where}` : capital(where)}: ${much} ${count > 1 ? `on average when one of the ${count} squares with it is` : "when"} occluded.`;
  }
  const where = place(patch, grid), corner = patch === top && most > 0 ? cornered(patch, grid) : "";
  if (show !== "gradient") return `${best ? `Maximum at ${where}` : capital(where)}: ${percent(Math.max(value, 0))}.${corner}`;
  if (best) return most > 0 ? `Maximum at ${where}.${corner}` : "No patch has a positive value.";
  if (patch === top && most > 0) return `${capital(where)}: the maximum.${corner}`;
  return `${capital(where)}: ${most > 0 ? (value / most).toFixed(2) : "0"} of the maximum.`;
}

/** What pointing at a patch shows, by map. */
const POINTING = {
  attention: "see what it attends to",
  rollout: "see its contribution",
  gradient: "see its value",
  occlusion: "see the drop",
  pool: "see its weight",
};

/** The hint above the image: what can be done in this view. */
export function invitation({ show, model, mode, touch, compared }) {
  if (compared) return `The controls apply to ${compared}: choose its layer, map or image.`;
  const watch = `, and watch the ${model.num_classes ? "prediction" : "features"} change.`, square = show === "occlusion" && sideOf(model.grid) > 1;
  const what = POINTING[show], one = square ? "a square" : "a patch", it = square ? "a patch" : "it";
  if (mode === "hide" && (touch || !what)) return `${touch ? "Tap" : "Click"} patches to hide them${watch}`;
  if (!what) return touch ? `Long-press a patch to hide it${watch}` : `Shift-click a patch to hide it${watch}`;
  if (touch) return `Tap ${one} to ${what}. Long-press to hide ${it}.`;
  if (mode === "hide") return `Point at ${one} to ${what}. Click to hide ${it}.`;
  return show === "attention" ? "Click a patch to make it the query. Shift-click to hide it." : `Point at ${one} to ${what}. Shift-click to hide ${it}.`;
}
