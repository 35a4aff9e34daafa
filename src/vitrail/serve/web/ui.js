// Shared interface elements: the banner, the status on the image, segmented buttons.

const $ = (id) => document.getElementById(id);
let hideTimer = 0;

/** Shows a message in the header for `ms` milliseconds (0: until closed). `action` labels a button; `countdown` is hidden from screen readers. */
export function showBanner(text, ms = 0, action = "", countdown = "") {
  clearTimeout(hideTimer);
  if ($("banner-text").textContent !== text) $("banner-text").textContent = text;
  $("banner-countdown").textContent = countdown;
  $("banner-action").textContent = action;
  $("banner-action").hidden = !action;
  $("banner").hidden = false;
  document.body.classList.add("has-banner");
  if (ms) hideTimer = setTimeout(hideBanner, ms);
}

export function hideBanner() {
  $("banner").hidden = true;
  document.body.classList.remove("has-banner");
}

export function initBanner(action) {
  $("banner-action").onclick = action;
  $("banner-close").onclick = hideBanner;
}

/** Sets the status on the image. `detail` is hidden from screen readers; `progress` is from 0 to 1. */
export function setStatus(text, detail = "", progress = null) {
  if ($("status-text").textContent !== text) $("status-text").textContent = text;
  if ($("status-progress").textContent !== detail) $("status-progress").textContent = detail;
  $("status-pill").classList.toggle("idle", !text);
  $("status-pill").classList.toggle("has-progress", progress !== null);
  if (progress !== null) $("status-pill").style.setProperty("--progress", progress);
}

/** Buttons of which one is selected; `options` are [value, text, tooltip], or null if the buttons are in the HTML. */
export function drawSegments(root, options, selected, onSelect, key = "value") {
  const signature = JSON.stringify(options);
  if (options && root.dataset.signature !== signature) {
    root.dataset.signature = signature;
    root.replaceChildren(...options.map(([value, text, title = ""]) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: text, title });
      button.dataset[key] = value;
      return button;
    }));
  }
  for (const button of root.children) {
    button.setAttribute("aria-pressed", String(button.dataset[key] === selected));
    button.onclick = () => onSelect(button.dataset[key]);
  }
}
