// Small things that speak: the banner, the quiet line, groups of buttons of which one is chosen.

const $ = (id) => document.getElementById(id);
let fading = 0;

/** A sentence in the header, over nothing that one might want to press; after `ms` it goes, with 0 it stays. `act` names a button, `count` is not read aloud. */
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

/** The quiet line on the image; `count` is not read aloud. `part`, from 0 to 1, is how much is done. */
export function say(text, count = "", part = null) {
  if ($("doing").textContent !== text) $("doing").textContent = text;
  if ($("doing-count").textContent !== count) $("doing-count").textContent = count;
  $("pill").classList.toggle("quiet", !text);
  $("pill").classList.toggle("counted", part !== null);
  if (part !== null) $("pill").style.setProperty("--part", part);
}

/** Buttons of which one is chosen; `options` are [value, text, what it is], or null where they stand in the page. */
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
