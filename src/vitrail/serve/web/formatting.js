// Formats numbers, class labels and file names for display.

export const percent = (fraction) => (fraction < 0.0005 ? "<\u00a00.1\u00a0%" : `${(100 * fraction).toFixed(fraction < 0.0995 ? 1 : 0)}\u00a0%`);
/** Replaces the hyphen of a negative number with a minus sign. */
export const minus = (text) => String(text).replace("-", "−");
/** A difference of two probabilities in percentage points. */
export const points = (value) => minus((100 * value).toFixed(1).replace(/^-0\.0$/, "0.0"));
/** The signed change in whole percentage points; empty if it rounds to 0. */
export function change(now, before) {
  const far = Math.round(100 * (now - before));
  return far ? `${far > 0 ? "+" : "−"}${Math.abs(far)}` : "";
}
/** Control characters, including those that change the text direction. */
const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]+/g;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]|[\ud802\ud803\ud83a\ud83b]/;
/** A class label for display: its first synonym, on one line. */
export function tidy(label) {
  const line = label.replace(CONTROLS, " ").replaceAll("_", " ").trim();
  return capital(line.split(",")[0].trim() || line) || "(no name)";
}
/** A text cut to `most` characters; a right-to-left text is isolated so that it does not reorder its surroundings. */
export function short(text, most = 40) {
  const letters = [...text.slice(0, 2 * most + 2).replace(CONTROLS, " ")], cut = letters.length > most ? `${letters.slice(0, most - 1).join("").trimEnd()}…` : letters.join("");
  return RIGHT_TO_LEFT.test(cut) ? `\u2068${cut}\u2069` : cut;
}
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
