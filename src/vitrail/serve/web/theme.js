// Runs before anything is drawn: applies the stored theme; without one, the page follows the system.
const storedTheme = (() => { try { return localStorage.getItem("vitrail-theme"); } catch { return null; } })();
if (storedTheme === "dark" || storedTheme === "light") document.documentElement.dataset.theme = storedTheme;
