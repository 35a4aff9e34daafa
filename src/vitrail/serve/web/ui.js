// Shared interface elements: the banner, the status line, segmented buttons.

const $ = (id) => document.getElementById(id);
let fading = 0;

/** Shows a message in the header for `ms` milliseconds (0: until closed). `act` labels a button; `count` is hidden from screen readers. */
export function banner(text, ms = 0, act = "", count = "") {
  clearTimeout(fading);
  if ($("banner-text").textContent !== text) $("banner-text").textContent = text;
  $("banner-count").textContent = count;
  $("banner-act").textContent = act;
  $("banner-act").hidden = !act;
  $("banner").hidden = false;
  document.body.classList.add("told");
  if (ms) fading = setTimeout(hideBanner, ms);
}

export function hideBanner() {
  $("banner").hidden = true;
  document.body.classList.remove("told");
}

export function onBanner(act) {
  $("banner-act").onclick = act;
  $("banner-close").onclick = hideBanner;
}

/** Sets the status line on the image. `count` is hidden from screen readers; `part` is the progress, 0 to 1. */
export function say(text, count = "", part = null) {
  if ($("doing").textContent !== text) $("doing").textContent = text;
  if ($("doing-count").textContent !== count) $("doing-count").textContent = count;
  $("pill").classList.toggle("quiet", !text);
  $("pill").classList.toggle("counted", part !== null);
  if (part !== null) $("pill").style.setProperty("--part", part);
}

/** Buttons of which one is selected; `options` are [value, text, tooltip], or null if the buttons are in the HTML. */
export function segments(root, options, chosen, choose, key = "value") {
  const signature = JSON.stringify(options);
  if (options && root.dataset.made !== signature) {
    root.dataset.made = signature;
    root.replaceChildren(...options.map(([value, text, title = ""]) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: text, title });
      button.dataset[key] = value;
      return button;
    }));
  }
  for (const button of root.children) {
    button.setAttribute("aria-pressed", String(button.dataset[key] === chosen));
    button.onclick = () => choose(button.dataset[key]);
  }
}
