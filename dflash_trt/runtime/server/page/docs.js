// Shows openapi.json: a table of paths, and one of fields for each body.
"use strict";

function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

function table(head, rows) {
  const cells = (tag, values) => element("tr", ...values.map((value) => element(tag, ...[value].flat())));
  return element("table", element("thead", cells("th", head)), element("tbody", ...rows.map((row) => cells("td", row))));
}

function link(name) {
  const made = element("a", name);
  made.href = `#${name}`;
  return made;
}

// What a schema takes, as text and links.
function type(schema) {
  if (schema.$ref) return [link(schema.$ref.split("/").pop())];
  if (schema.anyOf) return schema.anyOf.flatMap((each, index) => (index ? [" or ", ...type(each)] : type(each)));
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  if (schema.type === "array") return ["list of (", ...(schema.items ? type(schema.items) : ["anything"]), ")"];
  const { minimum, maximum } = schema;
  const range = [minimum === undefined ? "" : `at least ${minimum}`, maximum === undefined ? "" : `at most ${maximum}`];
  return [[schema.type ?? "anything", ...range].filter(Boolean).join(", ")];
}

function body(content) {
  return Object.entries(content ?? {}).flatMap(([kind, { schema }], index) =>
    [...(index ? [", "] : []), ...(schema.$ref ? type(schema) : [kind])]);
}

function row(schema, name) {
  const field = schema.properties[name];
  const isRequired = (schema.required ?? []).includes(name);
  const standard = isRequired ? "required" : field.default === undefined ? "" : JSON.stringify(field.default);
  return [element("code", name), type(field), standard, field.description ?? ""];
}

async function show() {
  const { info, paths, components } = await (await fetch("openapi.json")).json();
  document.getElementById("version").append(info.version);
  const operations = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, { summary, requestBody, responses }]) =>
      [element("code", `${method.toUpperCase()} ${path}`), summary, body(requestBody?.content), body(responses[200].content)]));
  document.getElementById("paths").append(table(["path", "", "body", "answer"], operations));
  for (const [name, schema] of Object.entries(components.schemas)) {
    const title = element("h3", name);
    title.id = name;
    const rows = Object.keys(schema.properties).map((field) => row(schema, field));
    document.getElementById("bodies").append(title, element("p", schema.description ?? ""),
      table(["field", "type", "default", ""], rows));
  }
}

show().catch((error) => document.getElementById("paths").append(`cannot read openapi.json: ${error.message}`));
