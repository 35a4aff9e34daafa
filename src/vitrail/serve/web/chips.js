// Buttons for the class and register tokens below the image; they can be queries like patches.

import { percent } from "./formatting.js";

let previousQuery;  // the query before the pointer entered a chip

/** `row`: the share of the displayed attention that each token receives, or null; `visible`: whether the pane shows attention. */
export function drawChips(root, { model, view, row, visible, queryToken, render }) {
  const onlyClassToken = model.prefix_tokens.length === 1 && model.pool === "token";
  const poolInput = onlyClassToken ? [] : [[null, model.pool === "token" ? "head input" : "all patches"]];
  const tokens = visible ? [...poolInput, ...model.prefix_tokens.map((name, i) => [i, name])] : [];
  while (root.children.length > tokens.length) root.lastChild.remove();
  while (root.children.length < tokens.length) {
    const chip = Object.assign(document.createElement("button"), { type: "button", className: "chip" });
    chip.append(document.createElement("i"), document.createElement("span"), document.createElement("b"));
    root.append(chip);
  }
  const current = queryToken ?? (onlyClassToken ? 0 : null);
  const preview = (token) => {
    if (token !== null) { previousQuery ??= { query: view.query }; view.query = token; }
    else if (previousQuery) { view.query = previousQuery.query; previousQuery = undefined; }
    render();
  };
  tokens.forEach(([token, name], i) => {
    const chip = root.children[i], [swatch, label, value] = chip.children, share = row && token !== null ? row[token] : null;
    label.textContent = name;
    value.textContent = share === null ? "" : percent(share);
    swatch.style.opacity = share === null ? 0 : Math.min(1, 0.15 + Math.sqrt(share));
    swatch.hidden = share === null;
    chip.setAttribute("aria-pressed", String(current === token));
    chip.title = token === null ? "Use the input of the head as the query" : `Use the ${name} token as the query; it receives ${share === null ? "…" : percent(share)} of the attention shown`;
    chip.onclick = () => { previousQuery = undefined; view.query = token; render(); };
    chip.onpointerenter = (event) => { if (event.pointerType === "mouse" && token !== null) preview(token); };
    chip.onpointerleave = (event) => { if (event.pointerType === "mouse") preview(null); };
  });
}
