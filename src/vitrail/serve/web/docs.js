// The API documentation page, generated from /openapi.json.

import { truncate } from "./formatting.js";
import { request, setListeners } from "./server.js";
import { requestToken } from "./token.js";

const EXAMPLE_IMAGE = "cat.jpg";
const UNQUOTED_URL = /^[\w./:-]+$/;

function resolveRef(schema, spec) {
  if (!schema || !schema.$ref) return schema || {};
  return schema.$ref.slice(2).split("/").reduce((node, name) => node[name], spec);
}

// An example value of a schema.
function exampleOf(schemaOrRef, spec, name = "") {
  const schema = resolveRef(schemaOrRef, spec);
  if (schema.examples) return schema.examples[0];
  if (schema.anyOf) return exampleOf(schema.anyOf[0], spec, name);
  if (schema.const !== undefined) return schema.const;
  if (schema.enum) return schema.enum[0];
  switch (schema.type) {
    case "object":
      if (schema.properties) {
        return Object.fromEntries(Object.entries(schema.properties).map(([key, item]) => [key, exampleOf(item, spec, key)]));
      }
      return schema.additionalProperties ? { rollout: exampleOf(schema.additionalProperties, spec) } : {};
    case "array":
      return [exampleOf(schema.items, spec, name)];
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

function typeName(schema) {
  if (schema.anyOf) return schema.anyOf.map(typeName).filter((item) => item !== "null").join(" or ");
  if (schema.enum) return schema.enum.map((item) => truncate(String(item), 24) || "(no name)").join(", ");
  if (schema.type === "array") return schema.items.enum ? `any of ${typeName(schema.items)}` : `list of ${typeName(schema.items)}s`;
  return schema.type || "value";
}

// [path, description] of every field of a response.
function fieldDescriptions(schemaOrRef, spec, path = "") {
  const schema = resolveRef(schemaOrRef, spec);
  const rows = schemaOrRef?.description && path ? [[path, schemaOrRef.description]] : [];
  if (schema.type === "array") return [...rows, ...fieldDescriptions(schema.items, spec, `${path}[]`)];
  if (schema.additionalProperties?.$ref) return [...rows, ...fieldDescriptions(schema.additionalProperties, spec, `${path}.*`)];
  for (const [name, item] of Object.entries(schema.properties || {})) {
    rows.push(...fieldDescriptions(item, spec, path ? `${path}.${name}` : name));
  }
  return rows;
}

function curlCommands(method, path, operation) {
  const url = `${location.origin}${path}`;
  const shellUrl = UNQUOTED_URL.test(url) ? url : `'${url}'`;
  const token = operation.responses["401"] ? " -H 'Authorization: Bearer TOKEN'" : "";
  if (method === "get") return `curl${token} ${shellUrl}`;
  return [
    `curl${token} -F image=@${EXAMPLE_IMAGE} ${shellUrl}`,
    `curl${token} -H 'Content-Type: image/jpeg' --data-binary @${EXAMPLE_IMAGE} ${shellUrl}`,
    `echo "{\\"image\\": \\"$(base64 -w0 ${EXAMPLE_IMAGE})\\"}" |\n  curl${token} --json @- ${shellUrl}`,
  ].join("\n");
}

function makeRow(...cells) {
  const line = document.createElement("tr");
  for (const text of cells) {
    const cell = document.createElement(cells.indexOf(text) ? "td" : "th");
    cell.textContent = text;
    line.append(cell);
  }
  return line;
}

function routeSection(method, path, operation, spec) {
  const fragment = document.getElementById("route-template").content.cloneNode(true);
  const find = (selector) => fragment.querySelector(selector);
  const id = `${method}${path.replaceAll("/", "-")}`;
  find("section").id = id;
  find(".method").textContent = method.toUpperCase();
  find(".path").textContent = path;
  find(".description").textContent = operation.description || operation.summary || "";
  find(".example code").textContent = curlCommands(method, path, operation);
  find(".copy").addEventListener("click", (event) => {
    navigator.clipboard?.writeText(curlCommands(method, path, operation));
    event.target.textContent = "Copied";
  });
  const parameters = operation.parameters || [];
  for (const item of parameters) {
    const kind = item.in === "header" ? "header" : typeName(item.schema);
    find(".parameters tbody").append(makeRow(item.name, kind, item.description || ""));
  }
  find(".parameters").hidden = !parameters.length;
  if (operation.requestBody) {
    find(".request-body").hidden = false;
    find(".request-body p").textContent = `${Object.keys(operation.requestBody.content).join(", ")}. Send parameters with ` +
      "the image: as form fields, JSON keys or query parameters. A list is a repeated parameter or a JSON array.";
  }
  const { content = {}, description } = operation.responses["200"];
  find(".response p").textContent = description === "Successful Response" ? "" : description;
  const [mediaType, media] = Object.entries(content)[0] || ["", {}];
  find(".response code").textContent = mediaType === "application/json"
    ? JSON.stringify(exampleOf(media.schema, spec), null, 2)
    : `${mediaType || "(empty)"}`;
  const descriptions = media.schema ? fieldDescriptions(media.schema, spec) : [];
  find(".response-fields").hidden = !descriptions.length;
  find(".response-fields tbody").append(...descriptions.map((pair) => makeRow(...pair)));
  for (const [status, response] of Object.entries(operation.responses)) {
    if (status === "200") continue;
    find(".errors").hidden = false;
    find(".errors tbody").append(makeRow(status, response.description));
  }
  return [id, fragment];
}

function setSummary(text) { document.getElementById("summary").textContent = text; }

async function main() {
  setListeners({ requestToken, onServerState: (status) => status === "ok" || setSummary("The server is unreachable; retrying.") });
  const spec = await request("/openapi.json");
  const { name } = spec.components.schemas.ModelResponse.examples[0];
  Object.assign(document.getElementById("model-name"), { textContent: name, title: name, dir: "auto" });
  setSummary(`${spec.info.summary.replace(name, () => truncate(name))} ${spec.info.description} Version ${spec.info.version}.`);
  for (const [path, methods] of Object.entries(spec.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const [id, fragment] = routeSection(method, path, operation, spec);
      const link = document.createElement("a");
      link.href = `#${id}`;
      link.textContent = path;
      document.getElementById("contents").append(link);
      document.getElementById("routes").append(fragment);
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

main().catch((error) => setSummary(`This page cannot be shown: ${error.message}`));
