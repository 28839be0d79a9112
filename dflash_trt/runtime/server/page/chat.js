// A conversation through the target's chat template; each answer shows what it cost.
"use strict";

let conversation = []; // messages whose answers came to their end

async function say(event) {
  event.preventDefault();
  const content = byId("message").value.trim();
  if (!content) return;
  controller = new AbortController();
  fail("");
  setRunning(true);
  const system = byId("system").value ? [{ role: "system", content: byId("system").value }] : [];
  if (conversation.length === 0) byId("log").replaceChildren();
  const asked = turn("user", "You", content);
  const answer = turn("assistant", "Answer", "");
  byId("log").setAttribute("aria-busy", "true");
  try {
    const model = await fetchModel(controller.signal);
    if (!byId("settings").reportValidity()) throw new Error("expected settings within their limits, found others");
    const body = { messages: [...system, ...conversation, { role: "user", content }], ...settings(model) };
    byId("message").value = "";
    const recording = await record("v1/chat/completions", body, controller.signal, (choice) => {
      answer.reasoning.textContent += choice.delta.reasoning ?? "";
      answer.said.textContent += choice.delta.content ?? "";
      if (choice.finish_reason === "length") answer.note.textContent = `cut at ${body.max_tokens} tokens; `;
      byId("log").scrollTop = byId("log").scrollHeight;
    });
    answer.note.textContent += costs(recording);
    conversation.push({ role: "user", content }, { role: "assistant", content: answer.said.textContent });
    keepRun("chat", "v1/chat/completions", body, model, { answer: conversation.at(-1), recording });
  } catch (error) {
    byId("message").value = content;
    answer.note.textContent = "This turn is forgotten.";
    asked.root.classList.add("note");
    if (error.name !== "AbortError") fail(error.message);
  } finally {
    byId("log").removeAttribute("aria-busy");
    byId("log").scrollTop = byId("log").scrollHeight;
    setRunning(false);
    byId("message").focus();
  }
}

function turn(role, title, text) {
  const root = element("article", `turn ${role}`);
  const [reasoning, said, note] = [element("p", "said reasoning"), element("p", "said", text), element("p", "note")];
  root.append(element("h3", "", title), reasoning, said, note);
  byId("log").append(root);
  return { root, reasoning, said, note };
}

function costs(recording) {
  const steps = recording.steps.map(([, step]) => step);
  const verified = steps.filter((step) => !step.is_prefill);
  const count = (list) => list.reduce((sum, step) => sum + step.tokens.length, 0);
  const tau = verified.length ? `tau ${(count(verified) / verified.length).toFixed(2)}, ` : "";
  return `${count(steps)} tokens, ${tau}${recording.speed.toFixed(0)} tokens/s`;
}

byId("say").addEventListener("submit", say);
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!byId("send").disabled) byId("say").requestSubmit();
});
byId("reset").addEventListener("click", () => {
  conversation = [];
  byId("log").replaceChildren();
});
