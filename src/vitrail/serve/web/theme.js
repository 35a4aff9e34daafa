// Before anything is drawn: the colors chosen last time, else those of the system.
const chosen = (() => { try { return localStorage.getItem("vitrail-theme"); } catch { return null; } })();
if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
