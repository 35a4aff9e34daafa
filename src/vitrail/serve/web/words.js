// Small things that speak: the banner, the quiet line, groups of buttons of which one is chosen.

const $ = (id) => document.getElementById(id);
let fading = 0;

/** A sentence across the page; after `ms` it goes, with 0 it stays. `act` names a button, `count` is not read aloud. */
export function banner(text, ms = 0, act = "", count = "") {
  clearTimeout(fading);
  if ($("banner-text").textContent !== text) $("banner-text").textContent = text;
  $("banner-count").textContent = count;
  $("banner-act").textContent = act;
  $("banner-act").hidden = !act;
  $("banner").hidden = false;
  if (ms) fading = setTimeout(hideBanner, ms);
}

export function hideBanner() { $("banner").hidden = true; }

export function onBanner(act) {
  $("banner-act").onclick = act;
  $("banner-close").onclick = hideBanner;
}

/** The quiet line beside the prediction; `count` is not read aloud. */
export function say(text, count = "") {
  if ($("doing").textContent !== text) $("doing").textContent = text;
  if ($("doing-count").textContent !== count) $("doing-count").textContent = count;
}

/** Buttons of which one is chosen; `options` are [value, text], or null where they stand in the page. */
export function segments(root, options, chosen, choose, key = "value") {
  const signature = JSON.stringify(options);
  if (options && root.dataset.made !== signature) {
    root.dataset.made = signature;
    root.replaceChildren(...options.map(([value, text]) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
      button.dataset[key] = value;
      return button;
    }));
  }
  for (const button of root.children) {
    button.setAttribute("aria-pressed", String(button.dataset[key] === chosen));
    button.onclick = () => choose(button.dataset[key]);
  }
}
