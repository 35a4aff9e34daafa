// Requests to the server: reports slow ones, waits while it is busy, retries while it is unreachable.

const WAITS = [400, 800, 1600, 3000, 5000];  // milliseconds between attempts
const AGAIN = [429, 502, 503, 504];  // of the server or of a proxy before it: the page itself sets no deadline
const SLOW = 300, LONG = 3000;

export class Refused extends Error {
  constructor(status, { code, message } = {}) {
    super(message ?? `The server answered ${status}.`);
    this.status = status;
    this.code = code;
  }
}

const listeners = { state: () => {}, doing: () => {}, token: async () => "" };
let token = sessionStorage.getItem("vitrail-token");
let trouble = false;  // it was away or busy when last heard of
const waiting = new Set();  // each ends the wait before the next attempt
let asking = null;  // one dialog for all requests that were refused together
const running = new Map();  // what is being waited for -> since when
let ticking = 0;

/** `state(kind, seconds)`: "away", "busy" or "fine"; `doing(what, ms, progress)`; `token()` asks the person for one. */
export function listen(given) { Object.assign(listeners, given); }
export function tryNow() { for (const wake of waiting) wake(); }

/** JSON (or a blob) from the server, retried while it is unreachable; `what` is displayed if it takes long.
 *  `partial` receives partial results and returns the progress: { done, total }. */
export async function ask(path, { body, what = "", signal, as = "json", partial } = {}) {
  const mine = Symbol(what), entry = { what, since: performance.now(), progress: null };
  const hear = partial && ((found) => { entry.progress = partial(found); });
  running.set(mine, entry);
  tick();
  try {
    for (let attempt = 0; ; attempt++) {
      const answer = await once(path, body, signal, as, hear);
      if (trouble && !answer.again) { trouble = false; listeners.state("fine", 0); }  // whatever it answers, it is back
      if (answer.ok) return answer.found;
      if (!answer.again) throw answer.error;
      const wait = answer.after ?? WAITS[Math.min(attempt, WAITS.length - 1)];
      await pause(wait, answer.kind, signal);
    }
  } finally {
    running.delete(mine);
    if (!running.size) { clearInterval(ticking); ticking = 0; listeners.doing("", 0); }
  }
}

/** The last of the JSON lines of an answer; partial results before it are handed on as they come. */
async function lastLine(response, partial) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let rest = "", last = null;
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + decoder.decode(value, { stream: !done })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const found = JSON.parse(line);
      if (found.partial) partial(found.partial);
      else last = found;
    }
    if (done) return last;
  }
}

async function once(path, body, signal, as, partial) {
  let response, found;
  const headers = { ...(token && { Authorization: `Bearer ${token}` }), ...(partial && { Accept: "application/x-ndjson" }) };
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", body, headers, signal });
    const lines = partial && response.headers.get("Content-Type") === "application/x-ndjson";
    found = await (lines ? lastLine(response, partial) : response.ok && as === "blob" ? response.blob() : response.json()).catch(() => null);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { again: true, kind: "away" };
  }
  if (signal?.aborted) throw new DOMException("", "AbortError");
  if (response.ok && found?.error) return { error: new Refused(response.status, found.error) };
  if (response.ok && found !== null) return { ok: true, found };
  if (response.ok || AGAIN.includes(response.status)) {
    const after = Number(response.headers.get("Retry-After")) * 1000 || undefined;
    return { again: true, kind: found?.error?.code === "queue_full" || response.status === 429 ? "busy" : "away", after };
  }
  const error = new Refused(response.status, found?.error);
  if (response.status !== 401) return { error };
  const known = token;
  asking ??= Promise.resolve(listeners.token(known !== null)).finally(() => { asking = null; });
  token = await asking;
  sessionStorage.setItem("vitrail-token", token);
  return { again: true, kind: "token", after: 0 };
}

async function pause(ms, kind, signal) {
  const until = performance.now() + ms;
  const say = () => listeners.state(kind, Math.ceil((until - performance.now()) / 1000));
  if (kind === "token") return;
  trouble = true;
  listeners.doing("", 0);
  say();
  const counting = setInterval(say, 1000);
  let wake, stop, timer = 0;
  try {
    await new Promise((resolve, reject) => {
      wake = resolve;
      stop = () => reject(new DOMException("", "AbortError"));
      waiting.add(wake);
      timer = setTimeout(resolve, ms);
      signal?.addEventListener("abort", stop);
      if (signal?.aborted) stop();
    });
  } finally {
    waiting.delete(wake);
    signal?.removeEventListener("abort", stop);
    clearTimeout(timer);
    clearInterval(counting);
  }
}

function tick() {
  if (ticking) return;
  ticking = setInterval(() => {
    const [longest] = [...running.values()].filter(({ what }) => what).sort((a, b) => a.since - b.since);
    if (!longest || trouble) return;  // the banner says it
    const ms = performance.now() - longest.since;
    if (ms > SLOW) listeners.doing(longest.what, ms > LONG ? ms : 0, longest.progress);
  }, 150);
}

/** Runs `work` for the latest call only: earlier calls are aborted. */
export function latest(work, wait = 0) {
  let control = null, timer = 0;
  return {
    cancel() { clearTimeout(timer); control?.abort(); },
    start(...wishes) {
      clearTimeout(timer);
      control?.abort();
      const mine = (control = new AbortController());
      return new Promise((resolve, reject) => {
        const ended = (error) => (error.name === "AbortError" ? resolve(undefined) : reject(error));
        timer = setTimeout(() => work(mine.signal, ...wishes).then(resolve, ended), wait);
      });
    },
  };
}

/** One image and values as a form. */
export function form(blob, values) {
  const data = new FormData();
  data.append("image", blob, "image");
  for (const [name, value] of Object.entries(values)) {
    if (value !== undefined) data.append(name, typeof value === "string" ? value : JSON.stringify(value));
  }
  return data;
}
