// Requests to the server: reports slow ones, waits while it is busy, retries while it is unreachable.

const RETRY_DELAYS = [400, 800, 1600, 3000, 5000];  // milliseconds between attempts
const RETRY_STATUSES = [429, 502, 503, 504];  // sent by the server or by a proxy; the page itself sets no deadline
const TEXT_AFTER = 300, SECONDS_AFTER = 3000;  // milliseconds until the status shows a text, and the elapsed seconds

export class RequestError extends Error {
  constructor(status, { code, message } = {}) {
    super(message ?? `The server answered ${status}.`);
    this.status = status;
    this.code = code;
  }
}

const listeners = { onServerState: () => {}, onProgress: () => {}, onAnswer: () => {}, requestToken: async () => "" };
/** Name of the model that this page shows, from ?model=; null for the server's default. */
export const chosenModel = new URLSearchParams(location.search).get("model");
let token = sessionStorage.getItem("vitrail-token");
let unavailable = false;  // the last response was missing or "busy"
const pendingRetries = new Set();  // functions that end the wait before the next attempt
let tokenPrompt = null;  // one dialog for all requests rejected at the same time
const runningRequests = new Map();  // id -> description, start time, progress
let progressTimer = 0;

/** The path with the chosen model as its parameter. */
export function ofModel(path) { return chosenModel === null ? path : `${path}?${new URLSearchParams({ model: chosenModel })}`; }

/** `onServerState(status, seconds)`: "unreachable", "busy" or "ok"; `onAnswer(data)`: an answer of the model; `onProgress(description, ms, progress)`; `requestToken(rejected)` prompts for a token. */
export function setListeners(callbacks) { Object.assign(listeners, callbacks); }
export function retryNow() { for (const wake of pendingRetries) wake(); }

/** JSON (or a blob) from the server, retried while it is unreachable; `description` is displayed if it takes long.
 *  `partial` receives partial results and returns the progress: { done, total }. */
export async function request(path, { body, description = "", signal, as = "json", partial } = {}) {
  const id = Symbol(description), entry = { description, since: performance.now(), progress: null };
  const onPartial = partial && ((partialResult) => { entry.progress = partial(partialResult); });
  runningRequests.set(id, entry);
  startProgressTimer();
  try {
    for (let attempt = 0; ; attempt++) {
      const outcome = await attemptRequest(path, body, signal, as, onPartial);
      if (unavailable && !outcome.retry) { unavailable = false; listeners.onServerState("ok", 0); }  // any response means that it is back
      if (outcome.ok) {
        if (body && outcome.data?.version) listeners.onAnswer(outcome.data);
        return outcome.data;
      }
      if (!outcome.retry) throw outcome.error;
      const wait = outcome.retryAfter ?? RETRY_DELAYS[Math.min(attempt, RETRY_DELAYS.length - 1)];
      await waitToRetry(wait, outcome.status, signal);
    }
  } finally {
    runningRequests.delete(id);
    if (!runningRequests.size) { clearInterval(progressTimer); progressTimer = 0; listeners.onProgress("", 0); }
  }
}

/** The last of the JSON lines of a response; `partial` receives the partial results before it. */
async function lastLine(response, partial) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let rest = "", result = null;
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + decoder.decode(value, { stream: !done })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = JSON.parse(line);
      if (data.partial) partial(data.partial);
      else result = data;
    }
    if (done) return result;
  }
}

async function attemptRequest(path, body, signal, as, partial) {
  let response, data;
  const headers = { ...(token && { Authorization: `Bearer ${token}` }), ...(partial && { Accept: "application/x-ndjson" }) };
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", body, headers, signal });
    const lines = partial && response.headers.get("Content-Type") === "application/x-ndjson";
    data = await (lines ? lastLine(response, partial) : response.ok && as === "blob" ? response.blob() : response.json()).catch(() => null);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { retry: true, status: "unreachable" };
  }
  if (signal?.aborted) throw new DOMException("", "AbortError");
  if (response.ok && data?.error) return { error: new RequestError(response.status, data.error) };
  if (response.ok && data !== null) return { ok: true, data };
  if (response.ok || RETRY_STATUSES.includes(response.status)) {
    const retryAfter = Number(response.headers.get("Retry-After")) * 1000 || undefined;
    return { retry: true, status: data?.error?.code === "queue_full" || response.status === 429 ? "busy" : "unreachable", retryAfter };
  }
  const error = new RequestError(response.status, data?.error);
  if (response.status !== 401) return { error };
  const previousToken = token;
  tokenPrompt ??= Promise.resolve(listeners.requestToken(previousToken !== null)).finally(() => { tokenPrompt = null; });
  token = await tokenPrompt;
  sessionStorage.setItem("vitrail-token", token);
  return { retry: true, status: "token", retryAfter: 0 };
}

async function waitToRetry(ms, status, signal) {
  const retryAt = performance.now() + ms;
  const reportState = () => listeners.onServerState(status, Math.ceil((retryAt - performance.now()) / 1000));
  if (status === "token") return;
  unavailable = true;
  listeners.onProgress("", 0);
  reportState();
  const countdown = setInterval(reportState, 1000);
  let wake, onAbort, timer = 0;
  try {
    await new Promise((resolve, reject) => {
      wake = resolve;
      onAbort = () => reject(new DOMException("", "AbortError"));
      pendingRetries.add(wake);
      timer = setTimeout(resolve, ms);
      signal?.addEventListener("abort", onAbort);
      if (signal?.aborted) onAbort();
    });
  } finally {
    pendingRetries.delete(wake);
    signal?.removeEventListener("abort", onAbort);
    clearTimeout(timer);
    clearInterval(countdown);
  }
}

function startProgressTimer() {
  if (progressTimer) return;
  progressTimer = setInterval(() => {
    const [longest] = [...runningRequests.values()].filter(({ description }) => description).sort((a, b) => a.since - b.since);
    if (!longest || unavailable) return;  // the banner reports it
    const ms = performance.now() - longest.since;
    if (ms > TEXT_AFTER) listeners.onProgress(longest.description, ms > SECONDS_AFTER ? ms : 0, longest.progress);
  }, 150);
}

/** Runs `task` for the latest call only: earlier calls are aborted. */
export function latest(task, delay = 0) {
  let controller = null, timer = 0;
  return {
    cancel() { clearTimeout(timer); controller?.abort(); },
    start(...args) {
      clearTimeout(timer);
      controller?.abort();
      const current = (controller = new AbortController());
      return new Promise((resolve, reject) => {
        const onError = (error) => (error.name === "AbortError" ? resolve(undefined) : reject(error));
        timer = setTimeout(() => task(current.signal, ...args).then(resolve, onError), delay);
      });
    },
  };
}

/** A form with an image and parameters. */
export function imageForm(blob, parameters) {
  const data = new FormData();
  data.append("image", blob, "image");
  if (chosenModel !== null) data.append("model", chosenModel);
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== undefined) data.append(name, typeof value === "string" ? value : JSON.stringify(value));
  }
  return data;
}
