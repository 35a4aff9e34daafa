// Reads images from files, the clipboard and the camera; stores them in the browser so that links can restore them.

const MAX_STORED_IMAGES = 16;

export const isImage = (file) => Boolean(file) && (file.type.startsWith("image/") || /\.(jpe?g|png|webp|gif|bmp|tiff?|avif|heic)$/i.test(file.name ?? ""));

/** The first image of a drop, a paste or a file input; null without one. */
export const firstImage = (dataTransfer) => [...(dataTransfer?.files ?? [])].find(isImage) ?? null;

/** A hash of the bytes, so that the same image has the same link. */
export async function hashOf(blob) {
  const data = await blob.arrayBuffer();
  if (globalThis.crypto?.subtle) {
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
    return [...digest.slice(0, 8)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  }
  let hash = 0x811c9dc5;  // FNV-1a: pages loaded without TLS have no crypto.subtle
  for (const byte of new Uint8Array(data)) hash = Math.imul(hash ^ byte, 0x01000193) >>> 0;
  return hash.toString(16).padStart(8, "0") + data.byteLength.toString(16);
}

function openStore(mode) {
  return new Promise((resolve, reject) => {
    const openRequest = indexedDB.open("vitrail", 1);
    openRequest.onupgradeneeded = () => openRequest.result.createObjectStore("images", { keyPath: "key" });
    openRequest.onerror = () => reject(openRequest.error);
    openRequest.onsuccess = () => resolve(openRequest.result.transaction("images", mode).objectStore("images"));
  });
}

const resultOf = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** Stores an image for links and deletes the oldest ones. False if the browser stores nothing (a private window). */
export async function storeImage(key, blob) {
  try {
    const storedAt = Date.now(), put = async (record) => resultOf((await openStore("readwrite")).put(record));
    const putBytes = async () => put({ key, data: await blob.arrayBuffer(), type: blob.type, when: storedAt });
    await put({ key, blob, when: storedAt }).catch(putBytes);  // WebKit stores no blobs in a private window
    const store = await openStore("readwrite");
    const records = await resultOf(store.getAll());
    records.sort((a, b) => b.when - a.when).slice(MAX_STORED_IMAGES).forEach((record) => store.delete(record.key));
    return true;
  } catch {
    return false;
  }
}

export async function loadImage(key) {
  try {
    const { blob, data, type } = await resultOf((await openStore("readonly")).get(key));
    return blob ?? new Blob([data], { type });
  } catch { return null; }
}

/** The image, resized if it exceeds the server's limits, and a note that says so. */
export async function fitToLimits(blob, limits) {
  let bitmap = null;
  try { bitmap = await createImageBitmap(blob); } catch { return { blob, note: "" }; }  // the server reports the error
  const pixels = bitmap.width * bitmap.height;
  const maxBytes = 0.98 * limits.max_bytes - 4096;
  if (blob.size <= maxBytes && pixels <= limits.max_pixels) { bitmap.close(); return { blob, note: "" }; }
  const scale = Math.min(1, 2048 / Math.max(bitmap.width, bitmap.height));
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(bitmap.width * scale)), Math.max(1, Math.round(bitmap.height * scale)));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const smaller = await canvas.convertToBlob({ type: "image/jpeg", quality: 0.92 });
  return { blob: smaller, note: `The image is larger than the server accepts: it was resized to ${canvas.width} × ${canvas.height} pixels.` };
}

/** Shows the camera in the dialog; resolves with a photo, or null if cancelled. The camera is always switched off at the end. */
export async function takePhoto(dialog) {
  const stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: { ideal: 1280 } } });
  const video = dialog.querySelector("video");
  const photo = new Promise((resolve) => {
    const finish = (blob) => {
      stream.getTracks().forEach((track) => track.stop());
      video.srcObject = null;
      dialog.onclose = null;
      if (dialog.open) dialog.close();
      resolve(blob);
    };
    dialog.onclose = () => finish(null);
    dialog.querySelector("#camera-cancel").onclick = () => finish(null);
    dialog.querySelector("#camera-take").onclick = () => {
      if (!video.videoWidth) return;  // no frame yet
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
      canvas.getContext("2d").drawImage(video, 0, 0);
      canvas.toBlob(finish, "image/jpeg", 0.95);
    };
  });
  video.srcObject = stream;
  dialog.showModal();
  video.play().catch(() => {});  // closed before playback started
  return photo;
}
