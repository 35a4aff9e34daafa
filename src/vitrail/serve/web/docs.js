// The page about the API, written from /openapi.json.

import { short } from "./formatting.js";
import { ask, listen } from "./server.js";
import { askToken } from "./token.js";

const IMAGE = "cat.jpg";
const QUOTED = /^[\w./:-]+$/;

function follow(schema, whole) {
  if (!schema || !schema.$ref) return schema || {};
  return schema.$ref.slice(2).split("/").reduce((at, name) => at[name], whole);
}

// A value that fits a schema, as an example.
function sample(given, whole, name = "") {
  const schema = follow(given, whole);
  if (schema.examples) return schema.examples[0];
  if (schema.anyOf) return sample(schema.anyOf[0], whole, name);
  if (schema.const !== undefined) return schema.const;
  if (schema.enum) return schema.enum[0];
  switch (schema.type) {
    case "object":
      if (schema.properties) {
        return Object.fromEntries(Object.entries(schema.properties).map(([key, one]) => [key, sample(one, whole, key)]));
      }
      return schema.additionalProperties ? { rollout: sample(schema.additionalProperties, whole) } : {};
    case "array":
      return [sample(schema.items, whole, name)];
    case "integer":
      return 1;
    case "number":
      return 0.5;
    case "boolean":
      return true;
    default:
      return "…";
  }
}

function word(schema) {
  if (schema.anyOf) return schema.anyOf.map(word).filter((one) => one !== "null").join(" or ");
  if (schema.enum) return schema.enum.map((one) => short(String(one), 24) || "(no name)").join(", ");
  if (schema.type === "array") return schema.items.enum ? `some of ${word(schema.items)}` : `list of ${word(schema.items)}s`;
  return schema.type || "value";
}

// What the parts of an answer mean, by their place in it.
function meanings(given, whole, place = "") {
  const schema = follow(given, whole);
  const found = given?.description && place ? [[place, given.description]] : [];
  if (schema.type === "array") return [...found, ...meanings(schema.items, whole, `${place}[]`)];
  if (schema.additionalProperties?.$ref) return [...found, ...meanings(schema.additionalProperties, whole, `${place}.*`)];
  for (const [name, one] of Object.entries(schema.properties || {})) {
    found.push(...meanings(one, whole, place ? `${place}.${name}` : name));
  }
  return found;
}

function command(method, path, operation) {
  const address = `${location.origin}${path}`;
  const shell = QUOTED.test(address) ? address : `'${address}'`;
  const token = operation.responses["401"] ? " -H 'Authorization: Bearer TOKEN'" : "";
  if (method === "get") return `curl${token} ${shell}`;
  return [
    `curl${token} -F image=@${IMAGE} ${shell}`,
    `curl${token} -H 'Content-Type: image/jpeg' --data-binary @${IMAGE} ${shell}`,
    `echo "{\\"image\\": \\"$(base64 -w0 ${IMAGE})\\"}" |\n  curl${token} --json @- ${shell}`,
  ].join("\n");
}

function row(...cells) {
  const line = document.createElement("tr");
  for (const text of cells) {
    const cell = document.createElement(cells.indexOf(text) ? "td" : "th");
    cell.textContent = text;
    line.append(cell);
  }
  return line;
}

function section(method, path, operation, whole) {
  const found = document.getElementById("route").content.cloneNode(true);
  const part = (name) => found.querySelector(name);
  const id = `${method}${path.replaceAll("/", "-")}`;
  part("section").id = id;
  part(".method").textContent = method.toUpperCase();
  part(".path").textContent = path;
  part(".about").textContent = operation.description || operation.summary || "";
  part(".example code").textContent = command(method, path, operation);
  part(".copy").addEventListener("click", (event) => {
    navigator.clipboard?.writeText(command(method, path, operation));
    event.target.textContent = "Copied";
  });
  const parameters = operation.parameters || [];
  for (const one of parameters) {
    const where = one.in === "header" ? "header" : word(one.schema);
    part(".values tbody").append(row(one.name, where, one.description || ""));
  }
  part(".values").hidden = !parameters.length;
  if (operation.requestBody) {
    part(".bodies").hidden = false;
    part(".bodies p").textContent = `${Object.keys(operation.requestBody.content).join(", ")}. Values go beside the ` +
      "image: as fields of the form, as keys of the JSON, or in the address. A list is repeated, or JSON.";
  }
  const { content = {}, description } = operation.responses["200"];
  part(".answer p").textContent = description === "Successful Response" ? "" : description;
  const [kind, media] = Object.entries(content)[0] || ["", {}];
  part(".answer code").textContent = kind === "application/json"
    ? JSON.stringify(sample(media.schema, whole), null, 2)
    : `${kind || "nothing"}`;
  const means = media.schema ? meanings(media.schema, whole) : [];
  part(".fields").hidden = !means.length;
  part(".fields tbody").append(...means.map((pair) => row(...pair)));
  for (const [status, about] of Object.entries(operation.responses)) {
    if (status === "200") continue;
    part(".errors").hidden = false;
    part(".errors tbody").append(row(status, about.description));
  }
  return [id, found];
}

function tell(text) { document.getElementById("summary").textContent = text; }

async function main() {
  listen({ token: askToken, state: (kind) => kind === "fine" || tell("The server is unreachable; retrying.") });
  const whole = await ask("/openapi.json");
  const { name } = whole.components.schemas.ModelResponse.examples[0];
  Object.assign(document.getElementById("name"), { textContent: name, title: name, dir: "auto" });
  tell(`${whole.info.summary.replace(name, () => short(name))} ${whole.info.description} Version ${whole.info.version}.`);
  for (const [path, methods] of Object.entries(whole.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const [id, made] = section(method, path, operation, whole);
      const link = document.createElement("a");
      link.href = `#${id}`;
      link.textContent = path;
      document.getElementById("contents").append(link);
      document.getElementById("routes").append(made);
    }
  }
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
  try { localStorage.setItem("vitrail-theme", root.dataset.theme); } catch { /* a private window */ }
});

main().catch((error) => tell(`This page cannot be shown: ${error.message}`));
