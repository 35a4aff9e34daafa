// Keyboard shortcuts of the page; the help dialog can turn them off.

const $ = (id) => document.getElementById(id);
const stored = () => { try { return localStorage.getItem("vitrail-keys") !== "off"; } catch { return true; } };

export function listenKeys({ set, pane, play, compare, copyLink, dark, model, shows, view, render, undo, clear }) {
  const step = (by) => set({ show: model.has_attention ? "attention" : pane().show, layer: pane().layer + by });
  const keys = {
    "[": () => model.depth && step(-1),
    "]": () => model.depth && step(1),
    p: play,
    v: () => set({ show: shows[(shows.indexOf(pane().show) + 1) % shows.length] }),
    b: () => { view.paint = view.paint === "light" ? "heat" : "light"; render(); },
    u: undo,
    x: clear,
    c: compare,
    l: copyLink,
    t: dark,
    o: () => $("open").click(),
    d: () => $("save").click(),
    "?": () => $("help-box").showModal(),
    Escape: () => { view.ask = null; view.hover = null; render(); },
  };
  let on = stored();
  $("keys-on").checked = on;
  $("keys-on").onchange = ({ target }) => {
    on = target.checked;
    try { localStorage.setItem("vitrail-keys", on ? "on" : "off"); } catch { /* a private window */ }
  };
  addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input:not([type=range]), select, textarea, dialog");
    if (event.ctrlKey || event.metaKey || event.altKey || typing || event.defaultPrevented) return;
    if (!on && event.key !== "?" && event.key !== "Escape") return;
    const head = /^\d$/.test(event.key) && Number(event.key) <= (model.num_heads ?? 0) ? Number(event.key) : null;
    if (head !== null) set({ head });
    else if (event.key in keys) keys[event.key]();
    else return;
    event.preventDefault();
  });
}
