// Reads images from files, the clipboard and the camera; stores them in the browser so that links can restore them.

const KEPT = 16;  // images remembered

export const isImage = (file) => Boolean(file) && (file.type.startsWith("image/") || /\.(jpe?g|png|webp|gif|bmp|tiff?|avif|heic)$/i.test(file.name ?? ""));

/** The first image among what was dropped or pasted. */
export const imageIn = (transfer) => [...(transfer?.files ?? [])].find(isImage) ?? null;

/** A hash of the bytes: the same image has the same link. */
export async function keyOf(blob) {
  const data = await blob.arrayBuffer();
  if (globalThis.crypto?.subtle) {
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
    return [...digest.slice(0, 8)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  }
  let hash = 0x811c9dc5;  // FNV-1a: pages that came without TLS have no crypto.subtle
  for (const byte of new Uint8Array(data)) hash = Math.imul(hash ^ byte, 0x01000193) >>> 0;
  return hash.toString(16).padStart(8, "0") + data.byteLength.toString(16);
}

function store(mode) {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open("vitrail", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("images", { keyPath: "key" });
    opening.onerror = () => reject(opening.error);
    opening.onsuccess = () => resolve(opening.result.transaction("images", mode).objectStore("images"));
  });
}

const result = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** Stores an image for links and deletes the oldest ones. False if the browser stores nothing (a private window). */
export async function remember(key, blob) {
  try {
    const when = Date.now(), put = async (record) => result((await store("readwrite")).put(record));
    const bare = async () => put({ key, data: await blob.arrayBuffer(), type: blob.type, when });
    await put({ key, blob, when }).catch(bare);  // WebKit keeps no blobs in a private window
    const images = await store("readwrite");
    const all = await result(images.getAll());
    all.sort((a, b) => b.when - a.when).slice(KEPT).forEach((old) => images.delete(old.key));
    return true;
  } catch {
    return false;
  }
}

export async function recall(key) {
  try {
    const { blob, data, type } = await result((await store("readonly")).get(key));
    return blob ?? new Blob([data], { type });
  } catch { return null; }
}

/** The image, resized if it exceeds the server's limits, and a note that says so. */
export async function fitting(blob, limits) {
  let bitmap = null;
  try { bitmap = await createImageBitmap(blob); } catch { return { blob, note: "" }; }  // the server will say what is wrong
  const pixels = bitmap.width * bitmap.height;
  const room = 0.98 * limits.max_bytes - 4096;
  if (blob.size <= room && pixels <= limits.max_pixels) { bitmap.close(); return { blob, note: "" }; }
  const scale = Math.min(1, 2048 / Math.max(bitmap.width, bitmap.height));
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(bitmap.width * scale)), Math.max(1, Math.round(bitmap.height * scale)));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const smaller = await canvas.convertToBlob({ type: "image/jpeg", quality: 0.92 });
  return { blob: smaller, note: `The image is larger than the server accepts: it was resized to ${canvas.width} × ${canvas.height} pixels.` };
}

/** Fills the dialog with what the camera sees; resolves with an image, or null. However it ends, the camera is off. */
export async function takeImage(box) {
  const stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: { ideal: 1280 } } });
  const video = box.querySelector("video");
  const taken = new Promise((resolve) => {
    const end = (blob) => {
      stream.getTracks().forEach((track) => track.stop());
      video.srcObject = null;
      box.onclose = null;
      if (box.open) box.close();
      resolve(blob);
    };
    box.onclose = () => end(null);
    box.querySelector("#camera-stop").onclick = () => end(null);
    box.querySelector("#camera-take").onclick = () => {
      if (!video.videoWidth) return;  // it has shown nothing yet
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
      canvas.getContext("2d").drawImage(video, 0, 0);
      canvas.toBlob(end, "image/jpeg", 0.95);
    };
  });
  video.srcObject = stream;
  box.showModal();
  video.play().catch(() => {});  // called off before it began
  return taken;
}
