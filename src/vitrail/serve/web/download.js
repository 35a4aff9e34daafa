// What is on the page, as one PNG: the panes, what they show, and what the model says.

import { paint } from "./pane.js";
import { change, percent, tidy } from "./says.js";

const SIDE = 720, GAP = 36, BARS = 380, SANS = "system-ui, sans-serif", SERIF = "Georgia, serif";
const FILLS = { mean: "mean colour", blur: "blurred", zero: "grey" };

export async function savePng({ panes, sheets, model, words }) {
  const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
  const sizes = panes.map(({ view }) => {
    const { width, height } = view.sheet.image, scale = SIDE / Math.max(width, height);
    return [Math.round(width * scale), Math.round(height * scale)];
  });
  const tall = Math.max(...sizes.map(([, height]) => height)), told = model.classes ? sheets : [];
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  canvas.width = GAP + sizes.reduce((sum, [width]) => sum + width + GAP, 0) + (told.length ? BARS + GAP : 0);
  canvas.height = Math.max(tall + 2 * GAP + 96, told.length * 360 + 2 * GAP);
  context.fillStyle = colour("--paper");
  context.fillRect(0, 0, canvas.width, canvas.height);
  const write = (text, x, y, font, ink, align = "left", room = undefined) => Object.assign(context, { font, fillStyle: colour(ink), textAlign: align }).fillText(text, x, y, room);
  let left = GAP;
  panes.forEach(({ view, title, means }, i) => {
    const [width, height] = sizes[i];
    context.save();
    context.translate(left, GAP);
    context.beginPath();
    context.roundRect(0, 0, width, height, 10);
    context.clip();
    paint(context, width, height, { ...view, box: null, focus: false, ratio: 1.5 });
    context.restore();
    write(title, left, GAP + height + 32, `600 19px ${SANS}`, "--ink");
    write(means, left, GAP + height + 58, `16px ${SANS}`, "--soft", "left", width);
    left += width + GAP;
  });
  const foot = canvas.height - GAP + 6;
  write(words, GAP, foot, `16px ${SANS}`, "--soft");
  write(`vitrail · ${model.name}`, canvas.width - GAP, foot, `16px ${SERIF}`, "--soft", "right");
  told.forEach((sheet, i) => bars(write, context, colour, sheet, left, GAP + i * 360));
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: `vitrail-${sheets[0].name || "picture"}.png` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** As beside the picture: the likeliest classes, where they stood before, and what is hidden. */
function bars(write, context, colour, sheet, left, top) {
  const [best] = sheet.now ?? [], count = sheet.hide.size;
  if (!best) return;
  write(tidy(best.label), left, top + 30, `500 34px ${SERIF}`, "--ink", "left", BARS - 100);
  write(percent(best.score), left + BARS, top + 30, `500 28px ${SERIF}`, "--accent", "right");
  sheet.now.forEach((prediction, i) => {
    const y = top + 78 + i * 46, before = count ? sheet.before?.get(prediction.index) : undefined;
    write(tidy(prediction.label), left, y, `${i ? 400 : 600} 17px ${SANS}`, i ? "--soft" : "--ink", "left", BARS - 140);
    write(percent(prediction.score), left + BARS, y, `600 17px ${SANS}`, "--ink", "right");
    if (before !== undefined) write(change(prediction.score, before), left + BARS - 66, y, `500 15px ${SANS}`, "--faint", "right");
    context.fillStyle = colour("--wash");
    context.fillRect(left, y + 9, BARS, 8);
    context.globalAlpha = i ? 0.5 : 1;
    context.fillStyle = colour("--accent");
    context.fillRect(left, y + 9, BARS * prediction.score, 8);
    context.globalAlpha = 1;
    context.fillStyle = colour("--ink");
    if (before !== undefined) context.fillRect(left + BARS * before - 1, y + 6, 2, 14);
  });
  const told = count ? [`${count} of ${sheet.patches} patches hidden, ${FILLS[sheet.fill]}.`, "The ticks are where it stood with nothing hidden."] : [];
  told.forEach((text, i) => write(text, left, top + 78 + sheet.now.length * 46 + i * 22, `15px ${SANS}`, "--soft", "left", BARS));
}
