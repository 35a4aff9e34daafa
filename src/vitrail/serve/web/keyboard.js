// Keyboard shortcuts of the page. They can be turned off in the help dialog.

const $ = (id) => document.getElementById(id);
const storedSetting = () => { try { return localStorage.getItem("vitrail-keys") !== "off"; } catch { return true; } };

export function addShortcuts({ updatePane, activePane, togglePlay, compare, copyLink, toggleTheme, model, mapNames, view, render, undo, clear }) {
  const stepLayer = (offset) => updatePane({ mapName: model.has_attention ? "attention" : activePane().mapName, layer: activePane().layer + offset });
  const keys = {
    "[": () => model.depth && stepLayer(-1),
    "]": () => model.depth && stepLayer(1),
    p: togglePlay,
    v: () => updatePane({ mapName: mapNames[(mapNames.indexOf(activePane().mapName) + 1) % mapNames.length] }),
    b: () => { view.colorScale = view.colorScale === "light" ? "heat" : "light"; render(); },
    u: undo,
    x: clear,
    c: compare,
    l: copyLink,
    t: toggleTheme,
    o: () => $("open-image").click(),
    d: () => $("save").click(),
    "?": () => $("help-dialog").showModal(),
    Escape: () => { view.query = null; view.hovered = null; render(); },
  };
  let enabled = storedSetting();
  $("shortcuts-enabled").checked = enabled;
  $("shortcuts-enabled").onchange = ({ target }) => {
    enabled = target.checked;
    try { localStorage.setItem("vitrail-keys", enabled ? "on" : "off"); } catch { /* a private window */ }
  };
  addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input:not([type=range]), select, textarea, dialog");
    if (event.ctrlKey || event.metaKey || event.altKey || typing || event.defaultPrevented) return;
    if (!enabled && event.key !== "?" && event.key !== "Escape") return;
    const head = /^\d$/.test(event.key) && Number(event.key) <= (model.num_heads ?? 0) ? Number(event.key) : null;
    if (head !== null) updatePane({ head });
    else if (event.key in keys) keys[event.key]();
    else return;
    event.preventDefault();
  });
}
