// Formats numbers, class labels and file names for display.

export const percent = (fraction) => (fraction < 0.0005 ? "<\u00a00.1\u00a0%" : `${(100 * fraction).toFixed(fraction < 0.0995 ? 1 : 0)}\u00a0%`);
/** A share of a map: as a percentage with two digits where it is less than 1 %, as among thousands of patches. */
export const share = (fraction) => (fraction >= 0.00995 ? percent(fraction) : fraction < 5e-7 ? "0" : `${Number((100 * fraction).toPrecision(2))}\u00a0%`);
/** Replaces the hyphen of a negative number with a minus sign. */
export const minus = (text) => String(text).replace("-", "−");
/** A difference of two probabilities in percentage points. */
export const points = (value) => minus((100 * value).toFixed(1).replace(/^-0\.0$/, "0.0"));
/** The signed change in whole percentage points; empty if it rounds to 0. */
export function change(score, baseline) {
  const difference = Math.round(100 * (score - baseline));
  return difference ? `${difference > 0 ? "+" : "−"}${Math.abs(difference)}` : "";
}
/** Control characters, including those that change the text direction. */
const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]+/g;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]|[\ud802\ud803\ud83a\ud83b]/;
/** A class label for display: its first synonym, on one line, capitalized. */
export function displayLabel(label) {
  const line = label.replace(CONTROLS, " ").replaceAll("_", " ").trim();
  return capitalize(line.split(",")[0].trim() || line) || "(no name)";
}
/** A text truncated to `maxLength` characters; a right-to-left text is isolated so that it does not reorder its surroundings. */
export function truncate(text, maxLength = 40) {
  const characters = [...text.slice(0, 2 * maxLength + 2).replace(CONTROLS, " ")], truncated = characters.length > maxLength ? `${characters.slice(0, maxLength - 1).join("").trimEnd()}…` : characters.join("");
  return RIGHT_TO_LEFT.test(truncated) ? `\u2068${truncated}\u2069` : truncated;
}
export const capitalize = (text) => text.charAt(0).toUpperCase() + text.slice(1);
