// Buttons for the class and register tokens below the image; they can be queries like patches.

import { percent } from "./formatting.js";

let before;  // the query before the pointer entered a chip

/** `row`: what each token gets of the attention shown, or null; `shown`: whether attention is shown at all. */
export function drawChips(box, { model, view, row, shown, asker, render }) {
  const alone = model.prefix_tokens.length === 1 && model.pool === "token";
  const readers = alone ? [] : [[null, model.pool === "token" ? "head input" : "all patches"]];
  const names = shown ? [...readers, ...model.prefix_tokens.map((name, i) => [i, name])] : [];
  while (box.children.length > names.length) box.lastChild.remove();
  while (box.children.length < names.length) {
    const chip = Object.assign(document.createElement("button"), { type: "button", className: "chip" });
    chip.append(document.createElement("i"), document.createElement("span"), document.createElement("b"));
    box.append(chip);
  }
  const current = asker ?? (alone ? 0 : null);
  const peek = (token) => {
    if (token !== null) { before ??= { ask: view.ask }; view.ask = token; }
    else if (before) { view.ask = before.ask; before = undefined; }
    render();
  };
  names.forEach(([token, name], i) => {
    const chip = box.children[i], [light, label, much] = chip.children, share = row && token !== null ? row[token] : null;
    label.textContent = name;
    much.textContent = share === null ? "" : percent(share);
    light.style.opacity = share === null ? 0 : Math.min(1, 0.15 + Math.sqrt(share));
    light.hidden = share === null;
    chip.setAttribute("aria-pressed", String(current === token));
    chip.title = token === null ? "Use the input of the head as the query" : `Use the ${name} token as the query; it receives ${share === null ? "…" : percent(share)} of the attention shown`;
    chip.onclick = () => { before = undefined; view.ask = token; render(); };
    chip.onpointerenter = (event) => { if (event.pointerType === "mouse" && token !== null) peek(token); };
    chip.onpointerleave = (event) => { if (event.pointerType === "mouse") peek(null); };
  });
}
