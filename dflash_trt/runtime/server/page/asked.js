// The tabs, and what was asked in each: as curl, as Python, as a JSON file.
"use strict";

const runs = {}; // by tab: what was asked last, as snippets and for the export

// The request as curl and Python send it, and what is exported.
function keepRun(tab, path, body, model, result) {
  const base = new URL(".", location.href).href;
  const hasKey = byId("key").value !== "";
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const key = hasKey ? ' -H "authorization: Bearer $KEY"' : "";
  const curl = `curl -s ${quoted(base + path)}${key} \\\n  -H 'content-type: application/json' \\\n`
    + `  -d ${quoted(JSON.stringify(body))}\n`;
  const { draft_length, structured_outputs, ...known } = body;
  const fields = { ...known, extra_body: { draft_length, ...(structured_outputs && { structured_outputs }) } };
  const lines = Object.entries(fields).map(([name, value]) => `    ${name}=${JSON.stringify(value)},\n`); // no booleans
  const isChat = path.includes("chat");
  const python = `${hasKey ? "import os\n\n" : ""}from openai import OpenAI\n\n`
    + `client = OpenAI(base_url=${JSON.stringify(`${base}v1`)}, api_key=${hasKey ? 'os.environ["KEY"]' : '"none"'})\n`
    + `answer = client.${isChat ? "chat.completions" : "completions"}.create(\n${lines.join("")})\n`
    + `print(answer.choices[0].${isChat ? "message.content" : "text"})\n`;
  const exported = { server: base, model, date: new Date().toISOString(), path, request: body, ...result };
  runs[tab] = { curl, python, exported };
  showAsked();
}

function showAsked() {
  const run = runs[shownTab()];
  byId("asked").hidden = !run;
  byId("copied").textContent = "";
  for (const name of ["curl", "python"]) byId(name).textContent = run?.[name] ?? "";
}

async function copy(id) {
  getSelection().selectAllChildren(byId(id));
  let isCopied = document.execCommand("copy"); // also over plain HTTP, where there is no navigator.clipboard
  if (!isCopied) isCopied = await navigator.clipboard?.writeText(byId(id).textContent).then(() => true, () => false);
  byId("copied").textContent = isCopied ? "copied" : "selected: copy it with Ctrl+C";
}

function exportRun() {
  const run = runs[shownTab()].exported;
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(run, null, 1)], { type: "application/json" }));
  link.download = `dflash-${run.date.slice(0, 19).replaceAll(":", "-")}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

const shownTab = () => (byId("chat").hidden ? "compare" : "chat");

function selectTab(name) {
  for (const each of ["compare", "chat"]) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
    byId(each).hidden = each !== name;
  }
  showAsked();
}

for (const name of ["compare", "chat"]) {
  byId(`tab-${name}`).addEventListener("click", () => selectTab(name));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const other = name === "chat" ? "compare" : "chat";
    selectTab(other);
    byId(`tab-${other}`).focus();
  });
}
byId("settings").addEventListener("submit", (event) => {
  event.preventDefault();
  byId(shownTab() === "compare" ? "ask" : "say").requestSubmit();
});
byId("export").addEventListener("click", exportRun);
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => copy(button.dataset.copy));
}
