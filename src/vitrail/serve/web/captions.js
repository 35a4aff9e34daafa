// The texts around a pane: title, caption, usage hint, values in a sentence, labels of the color scale.

import { argmax, colorRange, coveringSquares, isPartial, positivePart, squareSide } from "./attention.js";
import { capitalize, displayLabel, points, share, truncate } from "./formatting.js";

export const MAP_TITLES = { attention: "Attention", rollout: "Rollout", gradient: "Gradient", occlusion: "Occlusion", pool: "Pool", plain: "Image" };

/** Tooltips of the map buttons. */
export const MAP_TOOLTIPS = {
  attention: "Attention weights of one query patch in one layer",
  rollout: "Attention rollout: attention multiplied through all layers",
  gradient: "Gradient-weighted attention for the top class, through all layers",
  occlusion: "Drop in the top class's probability when a square is occluded",
  pool: "Attention weights of the pooling head",
  plain: "The image as the model receives it",
};

export const patchName = (patch, { columns }) => `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;

/** The occluded square that contains a patch; the patch itself where squares overlap, because its value is their mean. */
export function squareName(patch, grid) {
  const { rowSpan, columnSpan, count } = coveringSquares(patch, grid), span = (name, [first, last]) => (first === last ? `${name} ${first + 1}` : `${name}s ${first + 1} and ${last + 1}`);
  return count > 1 ? patchName(patch, grid) : `${span("row", rowSpan)}, ${span("column", columnSpan)}`;
}

export function paneTitle({ mapName, layer, head }, model) {
  if (mapName !== "attention") return MAP_TITLES[mapName];
  return `Layer ${layer}, ${head ? `head ${head}` : model.num_heads > 1 ? "all heads" : "single head"}`;
}

/** Describes the query token; null is the input of the head. */
export function describeQuery(query, model, grid) {
  if (query === null) return model.pool === "token" ? (model.prefix_tokens.length === 1 ? "the class token" : "the head input") : "the mean of all patches";
  return query < model.prefix_tokens.length ? `the ${model.prefix_tokens[query]} token` : patchName(query - model.prefix_tokens.length, grid);
}

/** The caption below the image: what is shown. Class names are truncated to `maxLength` characters. */
export function paneCaption({ mapName, head }, state, model, query, maxLength = 28) {
  const [topClass] = state.predictions ?? [], className = topClass ? `“${truncate(displayLabel(topClass.label), maxLength)}”` : "the class", side = squareSide(model.grid);
  if (mapName === "attention") {
    const queryName = query !== null && query >= model.prefix_tokens.length ? "the framed patch" : describeQuery(query, model, model.grid);
    return `Attention of ${queryName}${head ? `, head ${head}` : ""}.`;
  }
  return {
    rollout: "Contribution of each patch to the output.",
    gradient: `Gradient-weighted attention for ${className}.`,
    occlusion: `Drop in ${className} when ${side > 1 ? `${side} × ${side} patches are` : "a patch is"} occluded.`,
    pool: "Attention of the pooling head.",
    plain: "The image as the model receives it.",
  }[mapName];
}

/** The labels at both ends of the color scale; null without values. */
export function colorScaleLabels(mapName, values) {
  if (!values) return null;
  const { low, high, max } = colorRange(mapName === "occlusion" ? positivePart(values) : values), prefix = max > high ? "≥ " : "";
  if (mapName === "gradient") return ["min", "max"];
  if (mapName === "occlusion") return [low > 0 ? points(low) : "≤ 0", prefix + points(high)];
  return [share(low), prefix + share(high)];
}

/** The values at the query, the pointer or the maximum, in a sentence. */
export function queryCaption({ mapName }, state, model, { values, row, query, hovered }) {
  if (!state.image || !state.grid) return "";
  if (!model.methods.length) return "This is an exported model: it gives predictions but no explanations.";
  if (mapName === "plain") return model.methods.includes("rollout") ? `${model.image_size.width} × ${model.image_size.height} pixels.` : "This model is convolutional and has no attention; use occlusion.";
  const stoppedNote = state.stoppedMethod === mapName ? `Stopped${state.partial ? ` at ${state.partial.done} of ${state.partial.total} squares` : ""}; choose ${MAP_TITLES[mapName]} to start again. ` : "";
  if (!values) return stoppedNote;
  if (mapName !== "attention") return stoppedNote + mapValueText(mapName, values, hovered ?? argmax(values), hovered === null, state.grid);
  const numPrefix = model.prefix_tokens.length, topPatch = argmax(values), topToken = argmax(row.subarray(0, numPrefix)), queryToken = query ?? (describeQuery(null, model, state.grid) === "the class token" ? 0 : null);
  const topPatchName = queryToken === topPatch + numPrefix ? "itself" : patchName(topPatch, state.grid), received = (token) => `(${share(row[token])})`;
  const cornerNote = queryToken === topPatch + numPrefix ? "" : cornerRemark(topPatch, state.grid);
  const subject = capitalize(describeQuery(query, model, state.grid));
  if (numPrefix && row[topToken] > values[topPatch]) {
    const topTokenName = queryToken === topToken ? "itself" : `the ${model.prefix_tokens[topToken]} token`;
    return `${subject} attends most to ${topTokenName} ${received(topToken)}, then to ${topPatchName} ${received(topPatch + numPrefix)}.${cornerNote}`;
  }
  return `${subject} attends most to ${topPatchName} ${received(topPatch + numPrefix)}.${cornerNote}`;
}

/** A remark for corner patches: in late layers of many models they receive high attention in every image. */
function cornerRemark(patch, { rows, columns }) {
  const [row, column] = [Math.floor(patch / columns), patch % columns];
  const isCorner = (row === 0 || row === rows - 1) && (column === 0 || column === columns - 1);
  return isCorner ? " Corners often receive high attention, whatever they show." : "";
}

function mapValueText(mapName, values, patch, isMaximum, grid) {
  const value = values[patch], topPatch = argmax(values), max = values[topPatch];
  if (mapName === "occlusion") {
    const name = squareName(patch, grid), { count } = coveringSquares(patch, grid), change = `probability ${value < 0 ? "rises" : "drops"} ${points(Math.abs(value))} points`;
    if (Number.isNaN(value)) return `${capitalize(name)}: not computed yet.`;
    return `${isMaximum ? `Maximum ${isPartial(values) ? "so far " : ""}at ${name}` : capitalize(name)}: ${change} ${count > 1 ? `on average when one of the ${count} squares that contain it is` : "when"} occluded.`;
  }
  const name = patchName(patch, grid), cornerNote = patch === topPatch && max > 0 ? cornerRemark(patch, grid) : "";
  if (mapName !== "gradient") return `${isMaximum ? `Maximum at ${name}` : capitalize(name)}: ${share(Math.max(value, 0))}.${cornerNote}`;
  if (isMaximum) return max > 0 ? `Maximum at ${name}.${cornerNote}` : "No patch has a positive value.";
  if (patch === topPatch && max > 0) return `${capitalize(name)}: the maximum.${cornerNote}`;
  return `${capitalize(name)}: ${max > 0 ? (value / max).toFixed(2) : "0"} of the maximum.`;
}

/** What pointing at a patch shows, for each map. */
const POINTER_HINTS = {
  attention: "see what it attends to",
  rollout: "see its contribution",
  gradient: "see its value",
  occlusion: "see the drop",
  pool: "see its weight",
};

/** The hint above the image: how to explore or hide patches in this view. */
export function usageHint({ mapName, model, mode, touch, activeLetter }) {
  if (activeLetter) return `The controls apply to ${activeLetter}: choose its layer, map or image.`;
  const watchClause = `, and watch the ${model.num_classes ? "prediction" : "features"} change.`, bySquares = mapName === "occlusion" && squareSide(model.grid) > 1;
  const pointerHint = POINTER_HINTS[mapName], target = bySquares ? "a square" : "a patch", hideTarget = bySquares ? "a patch" : "it";
  if (mode === "hide" && (touch || !pointerHint)) return `${touch ? "Tap" : "Click"} patches to hide them${watchClause}`;
  if (!pointerHint) return touch ? `Long-press a patch to hide it${watchClause}` : `Shift-click a patch to hide it${watchClause}`;
  if (touch) return `Tap ${target} to ${pointerHint}. Long-press to hide ${hideTarget}.`;
  if (mode === "hide") return `Point at ${target} to ${pointerHint}. Click to hide ${hideTarget}.`;
  return mapName === "attention" ? "Click a patch to make it the query. Shift-click to hide it." : `Point at ${target} to ${pointerHint}. Shift-click to hide ${hideTarget}.`;
}
