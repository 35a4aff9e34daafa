// The name of the model in the header; a list to choose from if the server has several.

/** `names`: the models of the server; `onSelect` receives the chosen name. */
export function drawModelName({ name, version }, names, onSelect) {
  const title = `${name}, version ${version}`;
  if (names.length < 2) return Object.assign(document.createElement("b"), { textContent: name, title, dir: "auto" });
  const select = Object.assign(document.createElement("select"), { id: "model-select", title, onchange: ({ target }) => onSelect(target.value) });
  select.setAttribute("aria-label", "Model");
  select.append(...names.map((text) => Object.assign(document.createElement("option"), { value: text, textContent: text, selected: text === name })));
  return select;
}
